"""Which memory copy of a published segment goes first, where a file tier lies below.

Owns an order and nothing else: no bytes, no slots. In memory a child that lies elsewhere does not
keep its parent, because a segment that leaves memory stays published (P15): leases, moves and what
is being continued do. Copies are in one of two places::

    ranking   all others, by the eviction policy: the coldest is written, or got ready if it has
              a file copy already
    ready     clean and cold: freed in an instant, oldest first; whoever uses one takes it back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ptstore_mpi.cache.eviction import Eviction
from ptstore_mpi.cache.segment import Segment

__all__ = ["MemoryCopies"]


class MemoryCopies:
    """The memory copies of one server.

    Parameters
    ----------
    ranking
        A fresh ranking.

    Attributes
    ----------
    parent_of
        Finds the parent of a segment on this server; set by the cache.
    ready_bytes
        Memory that can be freed in an instant.
    """

    def __init__(self, ranking: Eviction) -> None:
        self._ranking = ranking
        self.parent_of: Callable[[Segment], Segment | None] = lambda segment: None
        self._holds: dict[int, int] = {}  # of every published segment, in memory or not
        self._ready: dict[Segment, None] = {}
        self._now = 0.0
        self.ready_bytes = 0

    def enter(self, segment: Segment, now: float) -> None:
        """Take in a memory copy that came about by a publish or a promotion."""
        self._now = max(self._now, now)
        self._holds.setdefault(segment.serial, 0)
        self._rank(segment)

    def leave(self, segment: Segment) -> None:
        """Forget a memory copy that is freed; its segment stays published."""
        self._take_out(segment, evicted=True)

    def retired(self, segment: Segment, *, evicted: bool) -> None:
        """Forget a segment that is not published any more."""
        self._holds.pop(segment.serial, None)
        self._take_out(segment, evicted=evicted)

    def used(self, segments: Sequence[Segment], now: float) -> None:
        """Note that one request used these, in the order of its prefix."""
        self._now = max(self._now, now)
        for segment in segments:
            self._take_back(segment)
        self._ranking.used(segments, now)

    def hold(self, segment: Segment) -> None:
        """Keep a segment in memory, if it is there, until as many `let_go`."""
        if segment.serial not in self._holds:
            return
        self._holds[segment.serial] += 1
        if not self._take_back(segment):
            self._ranking.hold(segment)

    def let_go(self, segment: Segment) -> None:
        """End one `hold`."""
        if segment.serial in self._holds:
            self._holds[segment.serial] -= 1
            self._ranking.let_go(segment)

    def is_ready(self, segment: Segment) -> bool:
        """Whether a segment's memory is among what would be freed first."""
        return segment in self._ready

    def coldest_clean(self) -> Segment | None:
        """Return the copy to free next, or None: there is none that could be freed at once."""
        self.coldest_dirty()
        return next(iter(self._ready), None)

    def coldest_dirty(self) -> Segment | None:
        """Return the copy to write next; what is clean and colder gets ready."""
        while (victim := self._ranking.victim()) is not None and victim.is_clean:
            self._take_out(victim, evicted=True)
            self._ready[victim] = None
            self.ready_bytes += victim.nbytes
        return victim

    def coldest_leaf(self) -> Segment | None:
        """Return the coldest copy that nobody reads, of a segment that nothing continues."""
        passed: list[Segment] = []
        while (victim := self._ranking.victim()) is not None and victim.links:
            self._ranking.hold(victim)
            passed.append(victim)
        for segment in passed:
            self._ranking.let_go(segment)
        return victim

    # -- internals -------------------------------------------------------------------------

    def _take_back(self, segment: Segment) -> bool:
        """Rank a copy again that was ready to go; return whether it was."""
        is_ready = segment in self._ready
        if is_ready:
            self._take_out(segment, evicted=False)
            self._rank(segment)
        return is_ready

    def _rank(self, segment: Segment) -> None:
        self._ranking.published(segment, self.parent_of(segment), self._now)
        for _ in range(self._holds[segment.serial]):
            self._ranking.hold(segment)

    def _take_out(self, segment: Segment, *, evicted: bool) -> None:
        if segment in self._ready:
            del self._ready[segment]
            self.ready_bytes -= segment.nbytes
        elif segment.serial in self._ranking:
            self._ranking.retired(segment, evicted=evicted)
