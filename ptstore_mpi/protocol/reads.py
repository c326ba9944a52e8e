"""The read path of a server: leases on what it owns, and what readers found bad (P10, P11, P15)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ptstore_mpi.cache.leases import LeaseKey
from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.protocol.actions import Action, Answer, ToPeer
from ptstore_mpi.protocol.fan_out import FanOut
from ptstore_mpi.protocol.messages import AcquireReply, AcquireRequest, Grant, ReplicaPlace
from ptstore_mpi.protocol.promotion import Promotion
from ptstore_mpi.protocol.removal import Removal
from ptstore_mpi.protocol.replicas import ReplicaPath
from ptstore_mpi.types import SegmentRef, segment_owner

__all__ = ["ReadPath"]

_ELSEWHERE = Grant(0, 0, b"")
_NOT_ELSEWHERE: Mapping[int, int] = {}


class ReadPath:
    """Acquires of one server. Its methods return the actions they cause.

    Parameters
    ----------
    cache
        Owned cache of this server.
    removal
        Takes what is lost.
    replicas
        Replicas kept here.
    is_intact
        Tells whether the bytes of a segment have these checksums.
    lease_cap_s
        Longest lease it grants, s.
    fan_out
        Says which copy serves a reader.

    Attributes
    ----------
    promotion
        Brings back what is in a file tier; None: there is none.
    """

    def __init__(
        self,
        cache: OwnedCache,
        removal: Removal,
        replicas: ReplicaPath,
        *,
        is_intact: Callable[[Segment, bytes], bool],
        lease_cap_s: float,
        fan_out: FanOut,
    ) -> None:
        self._cache = cache
        self._removal = removal
        self._replicas = replicas
        self._is_intact = is_intact
        self._lease_cap_s = lease_cap_s
        self.fan_out = fan_out
        self._deferred: dict[LeaseKey, AcquireRequest] = {}
        self.promotion: Promotion | None = None

    def acquire(self, request: AcquireRequest, now: float) -> Iterator[Action | ToPeer]:
        """Lease a prefix of the segments asked for: the first that is gone ends it."""
        segments: list[Segment] = []
        for ref in request.refs:
            segment = self._cache.find(ref)
            if segment is None:
                break
            segments.append(segment)
        key = (request.client, request.op)
        promotion = self.promotion
        is_whole = all(segment.has_bytes for segment in segments)
        if promotion is not None and (not is_whole or promotion.is_pending(key)):
            self._deferred.pop(key, None)
            yield from promotion.acquire(request, segments, now)
            return
        self.fan_out.hear(request.lent)
        elsewhere = self.fan_out.choose(request, segments, now)
        if elsewhere is None:
            self._deferred[key] = request
            return
        self._deferred.pop(key, None)
        yield from self.grant(request, segments, (), now, elsewhere=elsewhere)

    def grant(
        self,
        request: AcquireRequest,
        segments: Sequence[Segment],
        fetched: Collection[Segment],
        now: float,
        *,
        elsewhere: Mapping[int, int] = _NOT_ELSEWHERE,
    ) -> Iterator[Action | ToPeer]:
        """Lease segments that are in memory, and answer (P11).

        Some were ``fetched`` from files for it; for others, by position, a server ``elsewhere``
        is named instead.
        """
        granted_s = min(request.remaining_s, self._lease_cap_s)
        expiry_s = now + granted_s
        grants: list[Grant] = []
        for place, (ref, segment) in enumerate(zip(request.refs, segments, strict=False)):
            segment.is_reused = True
            if place in elsewhere:
                grants.append(_ELSEWHERE)
                continue
            self._cache.lease(segment, (request.client, request.op), expiry_s)
            if self.promotion is not None:
                self.promotion.granted(segment)
            checksums = segment.checksums[: 4 * ref.block_count] if request.checksums else b""
            is_kept = bool(request.keepers) and request.keepers[place] >= 0
            hashes = segment.hashes[: ref.block_count].tobytes() if is_kept else b""
            grants.append(
                Grant(segment.offset, segment.block_count, checksums, hashes, segment in fetched)
            )
        self.fan_out.serve(request, segments, elsewhere, until_s=expiry_s)
        places: tuple[ReplicaPlace, ...] = ()
        if request.wish is not None:
            places = yield from self._replicas.grant(request, request.wish, now)
            if not request.wish.may_fill:  # by a reader of another node
                block_bytes = sum(request.wish.tensor_bytes)
                here = zip(request.wish.refs, places, strict=True)
                blocks = sum(r.block_count for r, place in here if place.status == "here")
                self.fan_out.lend(blocks * block_bytes)
        yield Answer(
            request.client,
            AcquireReply(
                self._cache.server,
                request.op,
                request.attempt,
                tuple(grants),
                granted_s,
                tuple(elsewhere.items()),
                places,
                self.fan_out.lent_bytes,
            ),
        )

    def check_lost(self, ref: SegmentRef, now: float) -> Iterator[Action | ToPeer]:
        """Look for oneself whether a segment is bad, and lose it if so."""
        if segment_owner(ref.segment) != self._cache.server:
            self._replicas.check_lost(ref, now)
            return
        segment = self._cache.find(ref)
        if segment is None or not segment.checksums:
            return
        if not segment.has_bytes:
            return  # what comes from a file is verified there
        if not self._is_intact(segment, segment.checksums):
            yield from self._removal.lose(segment, now)

    def release(self, key: LeaseKey, now: float) -> Iterator[Action | ToPeer]:
        """End the leases of one operation; who waits for a copy may have one now."""
        self._cache.release(key, now)
        self.fan_out.release(key)
        yield from self._retry(now)

    def withdraw(self, key: LeaseKey) -> None:
        """An operation ends: it does not wait for a copy any more."""
        self._deferred.pop(key, None)

    def raise_low(self, client: int, low: float, now: float) -> Iterator[Action | ToPeer]:
        """End the leases of a client's operations below its watermark (P3)."""
        self._cache.release_before(client, low, now)
        self.fan_out.drop_below(client, low)
        for key in [key for key in self._deferred if key[0] == client and key[1] < low]:
            del self._deferred[key]
        yield from self._retry(now)

    def expire(self, now: float) -> Iterator[Action | ToPeer]:
        """End leases whose time is over."""
        self._cache.expire_leases(now)
        self.fan_out.expire(now)
        yield from self._retry(now)

    @property
    def deferred_count(self) -> int:
        """Readers that wait for a copy that is less busy."""
        return len(self._deferred)

    def _retry(self, now: float) -> Iterator[Action | ToPeer]:
        """Ask again for those who wait; where one has to go on waiting, others like it have too."""
        in_vain: set[int] = set()
        for key, request in list(self._deferred.items()):
            first = request.refs[0].segment
            if first not in in_vain or self.fan_out.is_overdue(key, now):
                yield from self.acquire(request, now)
                if key in self._deferred:
                    in_vain.add(first)
