"""The read path of a server: leases on what it owns, and what readers found bad (P10, P11, P15).

An owner also notes, as a hint that it never trusts, which servers said that they would keep a
replica of a segment. While its clients of other nodes are reading more than a threshold, it sends
those who allow it to one of these in turn (P18).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ptstore_mpi.cache.leases import LeaseKey
from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.actions import Action, Answer, ToPeer
from ptstore_mpi.protocol.messages import AcquireReply, AcquireRequest, Grant, ReplicaPlace
from ptstore_mpi.protocol.removal import Removal
from ptstore_mpi.protocol.replicas import ReplicaPath
from ptstore_mpi.types import SegmentRef, segment_owner

__all__ = ["ReadPath"]

_NO_GRANT = Grant(0, 0, b"")
_MOST_HOLDERS = 64


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
    redirect_bytes
        Bytes under way to clients that may be redirected, from which on they are; 0: never.
    """

    def __init__(
        self,
        cache: OwnedCache,
        removal: Removal,
        replicas: ReplicaPath,
        *,
        is_intact: Callable[[Segment, bytes], bool],
        lease_cap_s: float,
        redirect_bytes: int,
    ) -> None:
        self._cache = cache
        self._removal = removal
        self._replicas = replicas
        self._is_intact = is_intact
        self._lease_cap_s = lease_cap_s
        self._redirect_bytes = redirect_bytes
        self._reading: dict[LeaseKey, int] = {}
        self._keeping: dict[LeaseKey, list[tuple[Segment, int]]] = {}
        self.reading_bytes = 0
        self.redirect_count = 0
        self.stale_hint_count = 0

    def acquire(self, request: AcquireRequest, now: float) -> Iterator[Action | ToPeer]:
        """Lease a prefix of the segments asked for: the first that is gone ends it."""
        key = (request.client, request.op)
        granted_s = min(request.remaining_s, self._lease_cap_s)
        grants: list[Grant] = []
        segments: list[Segment] = []
        redirects: list[tuple[int, int]] = []
        reading_bytes = 0
        keepers = request.keepers or (-1,) * len(request.refs)
        for place, (ref, keeper) in enumerate(zip(request.refs, keepers, strict=True)):
            segment = self._cache.find(ref)
            if segment is None:
                break
            segments.append(segment)
            holder = self._holder(segment, keeper) if request.may_redirect else None
            if holder is not None:
                redirects.append((place, holder))
                grants.append(_NO_GRANT)
                continue
            self._cache.lease(segment, key, now + granted_s)
            checksums = segment.checksums[: 4 * ref.block_count] if request.checksums else b""
            hashes = segment.hashes[: ref.block_count].tobytes() if keeper >= 0 else b""
            grants.append(Grant(segment.offset, segment.block_count, checksums, hashes))
            reading_bytes += segment.nbytes
        self._cache.use(segments, now)
        self._forget_stale(segments, request.stale)
        if request.may_redirect:
            self._count_reading(key, reading_bytes)
            self._keeping[key] = list(zip(segments, keepers, strict=False))
        places: tuple[ReplicaPlace, ...] = ()
        if request.wish is not None:
            places = yield from self._replicas.grant(request, request.wish, now)
        yield Answer(
            request.client,
            AcquireReply(
                self._cache.server,
                request.op,
                request.attempt,
                tuple(grants),
                granted_s,
                tuple(redirects),
                places,
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
        if not self._is_intact(segment, segment.checksums):
            yield from self._removal.lose(segment, now)

    def release(self, key: LeaseKey, now: float) -> None:
        """End the leases of one operation; what it was to keep a replica of has one by now."""
        self._cache.release(key, now)
        for segment, keeper in self._keeping.get(key, ()):
            if keeper >= 0 and segment.state is SegmentState.PUBLISHED:
                segment.holders[keeper] = None
                if len(segment.holders) > _MOST_HOLDERS:
                    del segment.holders[next(iter(segment.holders))]
        self._forget(key)

    def raise_low(self, client: int, low: float, now: float) -> None:
        """End the leases of a client's operations below its watermark (P3)."""
        self._cache.release_before(client, low, now)
        for key in [key for key in self._reading if key[0] == client and key[1] < low]:
            self._forget(key)

    def expire(self, now: float) -> None:
        """End leases whose time is over."""
        self._cache.expire_leases(now)
        for key in [key for key in self._reading if not self._cache.has_lease(key)]:
            self._forget(key)

    # -- fan-out -----------------------------------------------------------------------------

    def _holder(self, segment: Segment, keeper: int) -> int | None:
        """Return the server to ask instead, each in its turn; None: this one serves."""
        if not self._redirect_bytes or self.reading_bytes < self._redirect_bytes:
            return None
        holder = next((server for server in segment.holders if server != keeper), None)
        if holder is not None:
            del segment.holders[holder]
            segment.holders[holder] = None
            self.redirect_count += 1
        return holder

    def _forget_stale(self, segments: list[Segment], stale: tuple[int, ...]) -> None:
        for segment, holder in zip(segments, stale, strict=False):
            if segment.holders.pop(holder, self) is None:
                self.stale_hint_count += 1

    def _count_reading(self, key: LeaseKey, nbytes: int) -> None:
        self.reading_bytes += nbytes - self._reading.get(key, 0)
        self._reading[key] = nbytes

    def _forget(self, key: LeaseKey) -> None:
        self.reading_bytes -= self._reading.pop(key, 0)
        self._keeping.pop(key, None)
