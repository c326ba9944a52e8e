"""The read path of a server: leases on what it owns, and what readers found bad (P10, P11, P15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.protocol.actions import Action, Answer, ToPeer
from ptstore_mpi.protocol.messages import AcquireReply, AcquireRequest, Grant
from ptstore_mpi.protocol.removal import Removal
from ptstore_mpi.types import SegmentRef

__all__ = ["ReadPath"]


class ReadPath:
    """Acquires of one server. Its methods return the actions they cause.

    Parameters
    ----------
    cache
        Owned cache of this server.
    removal
        Takes what is lost.
    is_intact
        Tells whether the bytes of a segment have these checksums.
    lease_cap_s
        Longest lease it grants, s.
    """

    def __init__(
        self,
        cache: OwnedCache,
        removal: Removal,
        *,
        is_intact: Callable[[Segment, bytes], bool],
        lease_cap_s: float,
    ) -> None:
        self._cache = cache
        self._removal = removal
        self._is_intact = is_intact
        self._lease_cap_s = lease_cap_s

    def acquire(self, request: AcquireRequest, now: float) -> Iterator[Action | ToPeer]:
        """Lease a prefix of the segments asked for: the first that is gone ends it."""
        granted_s = min(request.remaining_s, self._lease_cap_s)
        grants: list[Grant] = []
        segments: list[Segment] = []
        for ref in request.refs:
            segment = self._cache.find(ref)
            if segment is None:
                break
            segments.append(segment)
            self._cache.lease(segment, (request.client, request.op), now + granted_s)
            checksums = segment.checksums[: 4 * ref.block_count] if request.checksums else b""
            grants.append(Grant(segment.offset, segment.block_count, checksums))
        self._cache.use(segments, now)
        reply = AcquireReply(
            self._cache.server, request.op, request.attempt, tuple(grants), granted_s
        )
        yield Answer(request.client, reply)

    def check_lost(self, ref: SegmentRef, now: float) -> Iterator[Action | ToPeer]:
        """Look for oneself whether a segment is bad, and lose it if so."""
        segment = self._cache.find(ref)
        if segment is None or not segment.checksums:
            return
        if not self._is_intact(segment, segment.checksums):
            yield from self._removal.lose(segment, now)
