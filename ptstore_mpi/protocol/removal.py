"""Taking segments out of sight: dropped, lost, pruned, cleared, evicted (P15).

Every way out ends in `Removal.remove`: a segment goes with all that hangs on it, in one step per
server, children first; bytes are freed at their last lease's end. Each way is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.actions import Action, ToPeer
from ptstore_mpi.protocol.peer_messages import Prune, Unlink
from ptstore_mpi.types import segment_owner

__all__ = ["Removal"]


class Removal:
    """What leaves one server.

    Parameters
    ----------
    cache
        Owned cache of this server.

    Attributes
    ----------
    end_write
        Makes the write that a reserved segment belongs to unpublishable; set by its keeper.
    """

    def __init__(self, cache: OwnedCache) -> None:
        self._cache = cache
        self.end_write: Callable[[Segment, float], Iterator[Action | ToPeer]] = _no_writes
        self.evicted_count = 0
        self.lost_count = 0
        self.pruned_count = 0

    def lose(self, segment: Segment, now: float) -> Iterator[Action | ToPeer]:
        """Remove a segment whose bytes are not what they were, with all that hangs on it."""
        removed_count = yield from self.remove(segment, now)
        self.lost_count += 1
        self.pruned_count += removed_count - 1

    def prune(self, child: int, serial: int, now: float) -> Iterator[Action | ToPeer]:
        """Remove a segment whose parent is lost, if that link still is its own."""
        segment = self._cache.slots.get(child)
        if segment is not None and segment.serial == serial:
            self.pruned_count += yield from self.remove(segment, now)

    def evict(self, segment: Segment, now: float) -> Iterator[Action | ToPeer]:
        """Remove a leaf to make room."""
        self.evicted_count += yield from self.remove(segment, now, evicted=True)

    def remove(
        self, segment: Segment, now: float, *, evicted: bool = False
    ) -> Generator[Action | ToPeer, None, int]:
        """Take a segment and all that hangs on it out of sight, in one step per server (P15).

        Published ones leave the index, children first, and are freed after their leases; a
        reserved one can no longer be published. Returns how many published segments were removed
        here.
        """
        removed: list[Segment] = []
        pending = [segment]
        while pending:
            segment = pending.pop()
            if segment.state is SegmentState.RESERVED:
                yield from self.end_write(segment, now)
            elif segment.state is SegmentState.PUBLISHED:
                removed.append(segment)
                for serial, child in list(segment.links.items()):
                    if segment_owner(child) != self._cache.server:
                        yield ToPeer(segment_owner(child), Prune(serial, child))
                        continue
                    own = self._cache.slots.get(child)
                    if own is not None and own.serial == serial:
                        pending.append(own)
        for segment in reversed(removed):
            yield from self.unlink(segment)
            self._cache.retire(segment, now, evicted=evicted)
        return len(removed)

    def remove_namespace(
        self, namespace: bytes, now: float
    ) -> Generator[Action | ToPeer, None, int]:
        """Remove the published segments of a namespace and return their count."""
        removed_count = 0
        for segment in self._cache.published(namespace):
            if segment.state is SegmentState.PUBLISHED:
                removed_count += yield from self.remove(segment, now)
        return removed_count

    def unlink(self, segment: Segment) -> Iterator[Action | ToPeer]:
        """Undo the link of a segment to its parent."""
        parent = segment.parent
        if parent is None:
            return
        if segment_owner(parent.segment) != self._cache.server:
            yield ToPeer(segment_owner(parent.segment), Unlink(segment.serial, parent, segment.id))
            return
        own = self._cache.slots.get(parent.segment)
        if own is not None:
            self._cache.unlink(own, segment.serial)


def _no_writes(segment: Segment, now: float) -> Iterator[Action | ToPeer]:
    raise AssertionError("a reserved segment, and nobody who keeps writes")
