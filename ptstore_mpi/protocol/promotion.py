"""From the file tier back to memory: acquires that meet demoted segments (P11, P14).

::

    acquire --> wait for room, holding nothing --> leases, room --> wait for reads --> answer

An acquire takes room for what is missing front to back, never at the cost of what it needs
itself; where there is none and will not be, its prefix ends. From then on it holds leases and does
not wait for room: two that did could wait for each other. For the reads it waits, and is answered
once, when the last has ended; its leases count from then. Acquires of one segment share one read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

from ptstore_mpi.cache.leases import LeaseKey
from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.actions import Action, ToPeer
from ptstore_mpi.protocol.demotion import Demotion
from ptstore_mpi.protocol.messages import AcquireRequest
from ptstore_mpi.protocol.removal import Removal

__all__ = ["Grants", "Promotion"]

_WAITING_SHARE = 0.5  # of the time of a load, that it may wait for room: it has yet to read

Grants = Callable[
    [AcquireRequest, Sequence[Segment], Collection[Segment], float], Iterator[Action | ToPeer]
]
"""Leases segments, of which some came from a file, and answers: (request, all, some, now)."""


@dataclass(slots=True, eq=False)
class _Pending:
    """An acquire that waits for reads; ``fetched`` are the segments it waited for."""

    request: AcquireRequest
    segments: list[Segment]
    fetched: set[Segment]
    waiting: set[Segment]
    until: float


class Promotion:
    """Brings segments of one server back from its file tier.

    Parameters
    ----------
    cache
        Its owned cache, with copies and tier.
    removal
        Takes what cannot be read.
    demotion
        Says whether there will be room.
    make_room
        Lets something go, of replicas too: (bytes wanted in all, now).
    grant
        Answers an acquire.
    again
        Handles an acquire that has waited for room, anew.
    """

    def __init__(
        self,
        cache: OwnedCache,
        removal: Removal,
        *,
        demotion: Demotion,
        make_room: Callable[[int, float], Generator[Action | ToPeer, None, bool]],
        grant: Grants,
        again: Callable[[AcquireRequest, float], Iterator[Action | ToPeer]],
    ) -> None:
        assert cache.tier is not None, "nothing can be brought back without a tier"
        self._cache = cache
        self._tier = cache.tier
        self._removal = removal
        self._demotion = demotion
        self._make_room = make_room
        self._grant = grant
        self._again = again
        self._roomless: dict[LeaseKey, tuple[AcquireRequest, float]] = {}  # and when each came
        self._pending: dict[LeaseKey, _Pending] = {}
        self._to_read: deque[Segment] = deque()
        self.promoted_count = 0
        self.useful_bytes = 0

    @property
    def pending_count(self) -> int:
        """Acquires that wait, for room or for reads."""
        return len(self._roomless) + len(self._pending)

    def acquire(
        self, request: AcquireRequest, segments: list[Segment], now: float
    ) -> Generator[Action | ToPeer, None, None]:
        """Grant a prefix of ``segments``, at once or when what is in files has been read."""
        key = (request.client, request.op)
        known = self._pending.get(key)
        until = now + request.remaining_s
        if known is not None:  # asked again: answered once, with the newest attempt
            if request.attempt > known.request.attempt:
                known.request, known.until = request, max(known.until, until)
                self._keep(known.segments, key, known.until)
            return
        earlier, came_s = self._roomless.pop(key, (request, now))
        if earlier.attempt > request.attempt:
            request = earlier
        if all(segment.has_bytes for segment in segments):
            yield from self._answer(request, segments, set(), now)
            return
        may_wait = now - came_s < _WAITING_SHARE * request.remaining_s
        if may_wait and self._demotion.is_making_room_for(segments):
            self._roomless[key] = (request, came_s)
            return
        prefix, taken = yield from self._take_room(segments, now)
        if len(prefix) < len(segments) and may_wait and self._demotion.is_freeing:
            for segment in reversed(taken):
                self._leave_room(segment)
            self._roomless[key] = (request, came_s)
            return
        self._keep(prefix, key, until)
        waiting = {segment for segment in prefix if segment.move == "read"}
        if waiting:
            self._pending[key] = _Pending(request, prefix, waiting, set(waiting), until)
            yield from self.start_reads(now)
        else:
            yield from self._answer(request, prefix, set(), now)

    def is_pending(self, key: LeaseKey) -> bool:
        """Tell whether an acquire waits, for room or for reads."""
        return key in self._pending or key in self._roomless

    def granted(self, segment: Segment) -> None:
        """Take note that a segment is lent: what was read for it was of use."""
        if segment.is_fetched:
            segment.is_fetched = False
            self.useful_bytes += segment.nbytes

    def start_reads(self, now: float) -> Iterator[Action | ToPeer]:
        """Begin the reads that the tier was too busy for."""
        while self._to_read:
            segment = self._to_read[0]
            is_gone = segment.slot is None  # it was removed meanwhile
            if not is_gone and not self._tier.start_read(segment):
                return
            self._to_read.popleft()
            if is_gone:
                yield from self.read_ended(segment, now, is_done=False)

    def read_ended(
        self, segment: Segment, now: float, *, is_done: bool
    ) -> Iterator[Action | ToPeer]:
        """Take note of the end of a read; what cannot be read is lost (P15)."""
        self._end_move(segment, now)
        if segment.state is SegmentState.PUBLISHED:
            if is_done:
                self.promoted_count += 1
                segment.is_fetched = True
            else:
                yield from self._removal.lose(segment, now)
        for key, pending in list(self._pending.items()):
            pending.waiting.discard(segment)
            if not pending.waiting:
                del self._pending[key]
                yield from self._answer(pending.request, pending.segments, pending.fetched, now)

    def retry_roomless(self, now: float) -> Iterator[Action | ToPeer]:
        """Look again whether those that wait for room have it."""
        for request, _ in list(self._roomless.values()):
            yield from self._again(request, now)

    def cancel(self, client: int, low: float) -> None:
        """Forget the acquires of a client below its watermark (P3)."""
        known = [*self._pending, *self._roomless]
        for key in [key for key in known if key[0] == client and key[1] < low]:
            self.release(key)

    def release(self, key: LeaseKey) -> None:
        """Forget one acquire: its client does not want it any more."""
        self._pending.pop(key, None)
        self._roomless.pop(key, None)

    def expire(self, now: float) -> None:
        """Forget the acquires whose time is over: nobody waits for them."""
        for key in [key for key, pending in self._pending.items() if pending.until <= now]:
            del self._pending[key]

    # -- internals -------------------------------------------------------------------------

    def _take_room(
        self, segments: Sequence[Segment], now: float
    ) -> Generator[Action | ToPeer, None, tuple[list[Segment], list[Segment]]]:
        """Take room for what is not in memory; return the prefix that has it, and what is new."""
        for segment in segments:
            self._cache.hold(segment)
        prefix: list[Segment] = []
        taken: list[Segment] = []
        for segment in segments:
            if not segment.in_memory:
                if not (yield from self._take(segment, now)):
                    break
                taken.append(segment)
            prefix.append(segment)
        for segment in segments:
            self._cache.let_go(segment)
        return prefix, taken

    def _leave_room(self, segment: Segment) -> None:
        """Undo `_take`, before the read was begun: who waits for room holds nothing (P14)."""
        self._to_read.remove(segment)
        segment.move = ""
        self._cache.let_go(segment)
        self._cache.free_memory(segment)

    def _take(self, segment: Segment, now: float) -> Generator[Action | ToPeer, None, bool]:
        while not self._cache.take_memory(segment, now):
            if not (yield from self._make_room(segment.nbytes, now)):
                return False
        segment.move = "read"
        self._cache.hold(segment)
        self._to_read.append(segment)
        return True

    def _keep(self, segments: Sequence[Segment], key: LeaseKey, until: float) -> None:
        """Keep what an acquire has met until it is answered."""
        for segment in segments:
            if segment.state is SegmentState.PUBLISHED:
                self._cache.lease(segment, key, until)

    def _end_move(self, segment: Segment, now: float) -> None:
        segment.move = ""
        self._cache.let_go(segment)
        self._cache.free_if_dead(segment, now)

    def _answer(
        self,
        request: AcquireRequest,
        segments: Sequence[Segment],
        fetched: Collection[Segment],
        now: float,
    ) -> Iterator[Action | ToPeer]:
        prefix: list[Segment] = []
        for segment in segments:
            if segment.state is not SegmentState.PUBLISHED or not segment.has_bytes:
                break
            prefix.append(segment)
        yield from self._grant(request, prefix, fetched, now)
