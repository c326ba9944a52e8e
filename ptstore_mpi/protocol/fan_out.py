"""Fan-out: which copy of a segment a reader of another node is sent to (P18).

An owner knows who said that it would keep a replica, and how many bytes it lends and has sent
readers elsewhere for. While it is busy, or has lent much more in all than a holder, a reader goes
to the copy that is least of both; while every copy is busy and more are on their way, it waits a
little: a hot prefix then spreads like a tree, each new copy serving the next readers, and not by
one queue at its owner. What others have lent is hearsay, which clients carry about. All of this is
a hint: a holder grants what it has, and the owner serves whoever comes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ptstore_mpi.cache.leases import LeaseKey
from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.messages import AcquireRequest

__all__ = ["FanOut"]

_MOST_HOLDERS = 1024
_UNEVEN = 2  # times `busy_bytes`, that an owner may have lent more in all than a holder
_PATIENCE_SHARE = 0.25  # of its time that a reader may be kept waiting


@dataclass(slots=True, eq=False)
class _Reader:
    """One operation of another node: bytes by whom it reads them from, until when."""

    until_s: float
    nbytes: Counter[int] = field(default_factory=Counter)
    keeping: list[tuple[Segment, int]] = field(default_factory=list)


class FanOut:
    """Readers of one owner.

    Parameters
    ----------
    server
        This owner.
    busy_bytes
        Bytes that a copy may have under way before further readers are sent to others; 0: always
        the owner.

    Attributes
    ----------
    redirect_count, stale_hint_count, deferred_count
        Segments that readers were sent elsewhere for, those sent in vain, and readers kept waiting.
    """

    def __init__(self, server: int, busy_bytes: int) -> None:
        self._server = server
        self._busy_bytes = busy_bytes
        self._readers: dict[LeaseKey, _Reader] = {}
        self._under_way: Counter[int] = Counter()
        self._lent: Counter[int] = Counter()  # in all, as far as known
        self._coming: Counter[Segment] = Counter()  # copies that are being fetched
        self._deferred_until_s: dict[LeaseKey, float] = {}
        self.redirect_count = 0
        self.stale_hint_count = 0
        self.deferred_count = 0

    @property
    def reading_bytes(self) -> int:
        """Bytes lent here to readers of other nodes."""
        return self._under_way[self._server]

    @property
    def lent_bytes(self) -> int:
        """Bytes lent here to readers of other nodes in all, from replicas too."""
        return self._lent[self._server]

    def lend(self, nbytes: int) -> None:
        """Take note of bytes lent from replicas."""
        self._lent[self._server] += nbytes

    def hear(self, lent: Sequence[tuple[int, int]]) -> None:
        """Take note of what others have lent in all."""
        for server, nbytes in lent:
            if server != self._server:
                self._lent[server] = max(self._lent[server], nbytes)

    def choose(
        self, request: AcquireRequest, segments: Sequence[Segment], now: float
    ) -> dict[int, int] | None:
        """Return who else is to be asked, by position among ``segments``; None: not yet.

        Holders take turns among equals.
        """
        if not self._busy_bytes or not request.may_redirect or not segments:
            return {}
        keepers = request.keepers or (-1,) * len(segments)
        first = segments[0]
        chosen = self._least_busy(first, keepers[0])
        if self._under_way[chosen] >= self._busy_bytes and self._coming[first]:
            key = (request.client, request.op)
            patience_s = _PATIENCE_SHARE * request.remaining_s
            if now < self._deferred_until_s.setdefault(key, now + patience_s):
                return None
        if chosen == self._server:
            return {}
        elsewhere = {}
        for place, (segment, keeper) in enumerate(zip(segments, keepers, strict=False)):
            if chosen in segment.holders and chosen != keeper:
                del segment.holders[chosen]
                segment.holders[chosen] = None  # the next turn is another's
                elsewhere[place] = chosen
        return elsewhere

    def is_overdue(self, key: LeaseKey, now: float) -> bool:
        """Tell whether a reader that waits has waited long enough."""
        return self._deferred_until_s.get(key, now) <= now

    def serve(
        self,
        request: AcquireRequest,
        segments: Sequence[Segment],
        elsewhere: Mapping[int, int],
        *,
        until_s: float,
    ) -> None:
        """Take note of where a reader gets what, at most until when, and what it will keep."""
        key = (request.client, request.op)
        deferred = self._deferred_until_s.pop(key, None) is not None
        if not request.may_redirect:
            self._take_back(self._readers.get(key), request.stale, segments)
            return
        self.deferred_count += deferred
        self._forget(key)  # of an earlier attempt
        reader = self._readers[key] = _Reader(until_s)
        keepers = request.keepers or (-1,) * len(segments)
        for place, (segment, keeper) in enumerate(zip(segments, keepers, strict=False)):
            reader.nbytes[elsewhere.get(place, self._server)] += segment.nbytes
            if keeper >= 0:
                reader.keeping.append((segment, keeper))
                self._coming[segment] += 1
        self._under_way.update(reader.nbytes)
        self._lent.update(reader.nbytes)
        self.redirect_count += len(elsewhere)

    def release(self, key: LeaseKey) -> None:
        """A reader is done: what it was to keep has one more copy by now."""
        reader = self._readers.get(key)
        for segment, keeper in () if reader is None else reader.keeping:
            if segment.state is SegmentState.PUBLISHED and len(segment.holders) < _MOST_HOLDERS:
                segment.holders.setdefault(keeper, None)
        self._forget(key)

    def drop_below(self, client: int, low: float) -> None:
        """Forget the operations of a client below its watermark (P3)."""
        for key in [k for k in self._readers if k[0] == client and k[1] < low]:
            self._forget(key)
        for key in [k for k in self._deferred_until_s if k[0] == client and k[1] < low]:
            del self._deferred_until_s[key]

    def expire(self, now: float) -> None:
        """Forget readers whose time is over."""
        for key in [key for key, reader in self._readers.items() if reader.until_s <= now]:
            self._forget(key)

    def counters(self) -> dict[str, int]:
        """Return counters by name; bytes and counts."""
        return {
            "reading_bytes": self.reading_bytes,
            "lent_bytes": self.lent_bytes,
            "redirect_count": self.redirect_count,
            "stale_hint_count": self.stale_hint_count,
            "deferred_count": self.deferred_count,
        }

    def _take_back(
        self, reader: _Reader | None, stale: tuple[int, ...], segments: Sequence[Segment]
    ) -> None:
        """Serve here what a reader was sent away for in vain, and forget who had nothing."""
        for segment, holder in zip(segments, stale, strict=False):
            if segment.holders.pop(holder, self) is None:
                self.stale_hint_count += 1
            if reader is not None and 0 < segment.nbytes <= reader.nbytes.get(holder, 0):
                moved = {holder: -segment.nbytes, self._server: segment.nbytes}
                for counts in (reader.nbytes, self._under_way, self._lent):
                    counts.update(moved)

    def _least_busy(self, segment: Segment, keeper: int) -> int:
        copies = [self._server, *(holder for holder in segment.holders if holder != keeper)]
        best = min(copies, key=lambda s: (self._under_way[s] >= self._busy_bytes, self._lent[s]))
        is_busy = self._under_way[self._server] >= self._busy_bytes
        uneven = self._lent[self._server] - self._lent[best] > _UNEVEN * self._busy_bytes
        return best if is_busy or uneven else self._server

    def _forget(self, key: LeaseKey) -> None:
        reader = self._readers.pop(key, None)
        if reader is None:
            return
        self._under_way.subtract(reader.nbytes)
        for segment, _ in reader.keeping:
            self._coming[segment] -= 1
            if not self._coming[segment]:
                del self._coming[segment]
