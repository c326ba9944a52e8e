"""Room on a server full of parents, whose leaves live on others (P16).

Only leaves may go, so such a server cannot help itself: it asks the owners of the leaves under its
coldest segment to drop some although they have room. Their unlinks then make leaves of its own.

::

    A is full: p1 p2 p3     p1 <- c1 on B     A: Trim(c1) -> B drops c1: Unlink -> A: p1 may go
"""

from __future__ import annotations

from collections.abc import Iterator

from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.actions import Action, ToPeer
from ptstore_mpi.protocol.peer_messages import Trim
from ptstore_mpi.protocol.removal import Removal
from ptstore_mpi.types import segment_owner

__all__ = ["Trimming"]

_AGAIN_S = 1.0
_MOST_VISITED = 1024


class Trimming:
    """Asks other servers to drop leaves, and drops leaves for others.

    Parameters
    ----------
    cache
        Owned cache of this server.
    removal
        Takes what is dropped.
    """

    def __init__(self, cache: OwnedCache, removal: Removal) -> None:
        self._cache = cache
        self._removal = removal
        self._asked_s: dict[int, float] = {}  # by serial of the link: when it was asked about
        self.asked_count = 0
        self.trimmed_count = 0

    def ask(self, now: float) -> Iterator[ToPeer]:
        """Nothing here may go and there is no room: ask for the leaves under the coldest parent.

        Nobody is asked again about the same link for a second: its leaves may be in use.
        """
        self._asked_s = {s: at for s, at in self._asked_s.items() if at + _AGAIN_S > now}
        blocked = [segment for segment in self.blocked() if not self.is_asked(segment)]
        if not self._cache.evicts or not blocked:
            return
        coldest = min(blocked, key=self._cache.last_use)
        for serial, child in coldest.links.items():
            self._asked_s[serial] = now
            self.asked_count += 1
            yield ToPeer(segment_owner(child), Trim(serial, child))

    def blocked(self) -> list[Segment]:
        """Return the idle segments that go on only on other servers."""
        return [
            segment
            for segment in self._cache.published()
            if segment.links
            and not segment.leases
            and all(segment_owner(child) != self._cache.server for child in segment.links.values())
        ]

    def is_asked(self, segment: Segment) -> bool:
        """Tell whether the owners of what continues a segment have been asked lately."""
        return any(serial in self._asked_s for serial in segment.links)

    def trim(self, child: int, serial: int, now: float) -> Iterator[Action | ToPeer]:
        """Drop the coldest leaf that hangs on a segment of this server, or ask where it goes on."""
        segment = self._cache.slots.get(child)
        if segment is None or segment.serial != serial or not self._cache.evicts:
            return
        leaves, elsewhere = self._under(segment)
        if leaves:
            yield from self._removal.evict(min(leaves, key=self._cache.last_use), now)
            self.trimmed_count += 1
        else:
            for link, foreign in elsewhere.items():
                yield ToPeer(segment_owner(foreign), Trim(link, foreign))

    def _under(self, segment: Segment) -> tuple[list[Segment], dict[int, int]]:
        """Return the droppable leaves from a segment on, and the links that lead elsewhere."""
        leaves: list[Segment] = []
        elsewhere: dict[int, int] = {}
        pending = [segment]
        for _ in range(_MOST_VISITED):
            if not pending:
                break
            segment = pending.pop()
            if segment.state is not SegmentState.PUBLISHED:
                continue
            if not segment.links and self._cache.may_go(segment):
                leaves.append(segment)
            for serial, child in segment.links.items():
                if segment_owner(child) != self._cache.server:
                    elsewhere[serial] = child
                elif (own := self._cache.slots.get(child)) is not None and own.serial == serial:
                    pending.append(own)
        return leaves, elsewhere
