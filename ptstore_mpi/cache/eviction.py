"""Which published segment of a server goes first where there is no room.

Owns nothing but the ranking: it is told what becomes of segments and names the one worth least.
A victim is a published leaf: nothing continues it, here or on another server, no reservation is
about to, and nobody holds a lease on it (P15).
"""

from __future__ import annotations

from collections.abc import Sequence

from ptstore_mpi.cache.policies.tree import EvictionPolicy
from ptstore_mpi.cache.segment import Segment

__all__ = ["Eviction"]


class Eviction:
    """The published segments of one server in an `EvictionPolicy`, named by their serials.

    Parameters
    ----------
    policy
        A fresh policy.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._segments: dict[int, Segment] = {}
        self._above: dict[int, int | None] = {}

    def victim(self) -> Segment | None:
        """Return the segment worth least, or None: nothing may go."""
        serial = self._policy.victim()
        return None if serial is None else self._segments[serial]

    def published(self, segment: Segment, parent: Segment | None, now: float) -> None:
        """Take in a segment that has become visible; ``parent`` if that is on this server.

        What losing it costs is taken as proportional to its blocks. The seconds that a block costs
        are the same for all of one pool, and a common factor changes no order: clocks scale too.
        """
        above = None if parent is None or parent.serial not in self._segments else parent.serial
        self._segments[segment.serial] = segment
        self._above[segment.serial] = above
        self._policy.add(
            segment.serial,
            segment.nbytes,
            cost_s=float(segment.block_count),
            parent=above,
            content=int.from_bytes(segment.block_hash(-1)[:8], "little"),
            now=now,
        )

    def retired(self, segment: Segment, *, evicted: bool) -> None:
        """Forget a segment that is not visible any more, after those that continue it here."""
        del self._segments[segment.serial], self._above[segment.serial]
        leave = self._policy.evict if evicted else self._policy.remove
        leave(segment.serial)

    def used(self, segments: Sequence[Segment], now: float) -> None:
        """Note that one request used these, in the order of its prefix."""
        for segment, after in zip(segments, (*segments[1:], None), strict=True):
            if after is None or self._above.get(after.serial) != segment.serial:
                self._policy.hit(segment.serial, now)

    def last_use(self, segment: Segment) -> int:
        """Return the number of a segment's last use that ended there, among all uses."""
        return self._policy.last_use(segment.serial)

    def is_idle(self, segment: Segment) -> bool:
        """Tell whether nothing holds a segment."""
        return not self._policy.is_pinned(segment.serial)

    def hold(self, segment: Segment) -> None:
        """Keep a segment, until as many `let_go`: for a lease, or for what is to continue it."""
        if segment.serial in self._segments:
            self._policy.pin(segment.serial)

    def let_go(self, segment: Segment) -> None:
        """End one `hold`; a segment that is not visible any more has none."""
        if segment.serial in self._segments:
            self._policy.unpin(segment.serial)

    def __contains__(self, serial: int) -> bool:
        return serial in self._segments
