"""The state machine of one server: ``handle(request, now)`` returns actions, and nothing else.

No MPI, no clock, no bytes: a transport feeds it requests, peer messages, finished receives and
the time, and carries out the actions it returns. Everything it promises is in `WritePath`
(writing, links), `ReadPath` (leases), `Removal` and `OwnedCache` (index, leases, links).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ptstore_mpi.cache.admission import Admission
from ptstore_mpi.cache.balance import Balance
from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.replicas import Replica, ReplicaCache
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.protocol.actions import Action, Answer, SendFrame, ToPeer
from ptstore_mpi.protocol.fan_out import FanOut
from ptstore_mpi.protocol.lower_tier import LowerTier
from ptstore_mpi.protocol.making_room import MakingRoom
from ptstore_mpi.protocol.messages import (
    AbandonRequest,
    AcquireRequest,
    AwaitRequest,
    ByeRequest,
    ClearRequest,
    CountReply,
    DropRequest,
    FilledRequest,
    LostRequest,
    MatchReply,
    MatchRequest,
    PingReply,
    PingRequest,
    PublishRequest,
    ReleaseRequest,
    Request,
    ReserveRequest,
    StatsReply,
    StatsRequest,
)
from ptstore_mpi.protocol.peer_link import PeerLink
from ptstore_mpi.protocol.peer_messages import PeerFrame
from ptstore_mpi.protocol.reads import ReadPath
from ptstore_mpi.protocol.removal import Removal
from ptstore_mpi.protocol.replicas import ReplicaPath
from ptstore_mpi.protocol.writes import Verify, WritePath
from ptstore_mpi.types import HASH_BYTES, ServerIndex

__all__ = ["ServerHandler"]

_LONGEST_PING_BYTES = 1 << 24


class ServerHandler:
    """One server.

    Parameters
    ----------
    cache, replicas
        What it owns, and what it keeps of others, in one arena.
    admission
        Says what is worth a replica.
    lease_cap_s
        Longest lease it grants, s.
    redirect_bytes
        As in `FanOut`.
    unconfirmed_count
        Unsettled regions a client may hold here (P2).
    is_intact
        Tells whether the bytes of a segment have these checksums: the handler itself never sees
        a byte.
    server_count
        Servers of the job; None: any, as far as this one knows.
    verify
        Increments that are verified before they become visible; see `WritePath`.
    peer_resend_s
        Time after which an unconfirmed message to another server is sent again, s.
    reused_only
        Whether only what was read since it was published goes to the cache's file tier.
    balance
        Moves the replicas' lower limit; None: it is fixed.
    """

    def __init__(
        self,
        cache: OwnedCache,
        replicas: ReplicaCache,
        *,
        admission: Admission,
        is_intact: Callable[[Segment | Replica, bytes], bool],
        server_count: int | None = None,
        lease_cap_s: float = 60.0,
        redirect_bytes: int = 0,
        unconfirmed_count: int = 8,
        verify: Verify = "remote",
        peer_resend_s: float = 1.0,
        reused_only: bool = False,
        balance: Balance | None = None,
    ) -> None:
        self.cache = cache
        self.removal = Removal(cache)
        making_room = MakingRoom(cache, replicas, self.removal)
        self.balance = balance
        if balance is not None:
            cache.watch, replicas.watch = balance.segment_side, balance.replica_side
        self.replicas = ReplicaPath(
            replicas,
            cache.server,
            making_room=making_room,
            admission=admission,
            is_intact=is_intact,
            lease_cap_s=lease_cap_s,
            balance=balance,
        )
        self.reads = ReadPath(
            cache,
            self.removal,
            self.replicas,
            is_intact=is_intact,
            lease_cap_s=lease_cap_s,
            fan_out=FanOut(cache.server, redirect_bytes),
        )
        self.writes = WritePath(
            cache,
            making_room,
            unconfirmed_count=unconfirmed_count,
            server_count=server_count,
            is_intact=is_intact,
            verify=verify,
        )
        self.lower: LowerTier | None = None
        if cache.tier is not None:
            self.lower = LowerTier(cache, self.reads, self.writes, reused_only=reused_only)
        self._low: dict[int, float] = {}
        self._peer_resend_s = peer_resend_s
        self._links: dict[ServerIndex, PeerLink] = {}
        self._removed_counts: dict[tuple[int, int], int] = {}
        self.gone_clients: set[int] = set()
        self.request_count = 0
        self.dropped_count = 0
        self.malformed_count = 0  # messages the transport refused; they count as never sent

    # -- entry points ----------------------------------------------------------------------

    def handle(self, request: Request, now: float) -> list[Action]:
        """Handle one request of a client."""
        self.request_count += 1
        actions = self._framed(self._handle(request, now), now)
        if self.lower is not None:
            self.lower.demotion.write_ahead()
        return actions

    def handle_peer(self, sender: ServerIndex, frame: PeerFrame, now: float) -> list[Action]:
        """Handle one frame of another server."""
        actions: list[Action] = []
        for message in self._link(sender).receive(frame):
            actions += self._framed(self.writes.handle_peer(sender, message, now), now)
        return actions

    def received(self, client: int, op: int, now: float, *, intact: bool = True) -> list[Action]:
        """Take note that all data messages of a write have arrived."""
        return self._framed(self.writes.received(client, op, now, intact=intact), now)

    def settled(self, client: int, op: int) -> None:
        """Take note that no receive of a write is open any more."""
        self.writes.settled(client, op)

    def tick(self, now: float) -> list[Action]:
        """Let time pass: end leases and reservations whose time is over, repeat frames."""
        actions = self._framed(self.reads.expire(now), now)
        actions += self._framed(self.replicas.expire(now), now)
        actions += self._framed(self.writes.expire(now), now)
        if self.lower is not None:
            actions += self._framed(self.lower.tick(now), now)
        for peer, link in self._links.items():
            actions += (SendFrame(peer, frame) for frame in link.tick(now))
        return actions

    def grow(self, populated_bytes: int, now: float) -> list[Action]:
        """Use the pages populated so far."""
        if not self.cache.room.grow(populated_bytes):
            return []
        return self._framed(self.writes.retry_waiting(now), now)

    def poll_tier(self, now: float) -> list[Action]:
        """Take note of the reads and writes of the file tier that have ended."""
        return [] if self.lower is None else self._framed(self.lower.poll(now), now)

    def close_tier(self) -> None:
        """Give the file tier up, at the end of the job; it waits for the I/O under way."""
        if self.cache.tier is not None:
            self.cache.tier.close()

    @property
    def peers_are_quiet(self) -> bool:
        """Whether no message to or from another server waits for its confirmation."""
        return all(link.is_quiet for link in self._links.values())

    def counters(self) -> dict[str, int]:
        """Return the counters of this server by name; bytes and counts."""
        statuses = {f"write_{k}_count": v for k, v in sorted(self.writes.status_counts.items())}
        return {
            **self.cache.counters(),
            **self.replicas.counters(),
            **self.reads.fan_out.counters(),
            **({} if self.balance is None else self.balance.counters()),
            "request_count": self.request_count,
            "malformed_count": self.malformed_count,
            "dropped_count": self.dropped_count,
            "evicted_count": self.removal.evicted_count,
            "lost_count": self.removal.lost_count,
            "pruned_count": self.removal.pruned_count,
            "trim_asked_count": self.writes.trimming.asked_count,
            "trimmed_count": self.writes.trimming.trimmed_count,
            "peer_resend_count": sum(link.resend_count for link in self._links.values()),
            "live_reservation_count": self.writes.reservations.live_count,
            **statuses,
            **({} if self.lower is None else self.lower.counters()),
        }

    @property
    def lease_holders(self) -> set[int]:
        """Clients that hold a lease here."""
        return self.cache.lease_holders | self.replicas.replicas.lease_holders

    @property
    def unconfirmed_count(self) -> int:
        """Messages to other servers that are not known to have arrived."""
        return sum(link.unconfirmed_count for link in self._links.values())

    @property
    def remembered_count(self) -> int:
        """What is kept for clients besides leases: 0 once all have left."""
        kept = self.writes.remembered_count + self.replicas.remembered_count
        kept += self.reads.deferred_count
        kept += 0 if self.lower is None else self.lower.promotion.pending_count
        return len(self._removed_counts) + kept

    def _link(self, peer: ServerIndex) -> PeerLink:
        return self._links.setdefault(peer, PeerLink(self._peer_resend_s))

    def _framed(self, actions: Iterable[Action | ToPeer], now: float) -> list[Action]:
        return [
            SendFrame(action.server, self._link(action.server).send(action.message, now))
            if isinstance(action, ToPeer)
            else action
            for action in actions
        ]

    # -- requests --------------------------------------------------------------------------

    def _handle(self, request: Request, now: float) -> Iterator[Action | ToPeer]:
        client = request.client
        if isinstance(request, ByeRequest):
            self.gone_clients.add(client)
            yield from self._raise_low(client, math.inf, now)
            return
        if isinstance(request, ReleaseRequest):
            self.reads.withdraw((client, request.op))  # before others leave: it is not its turn
        yield from self._raise_low(client, request.low, now)
        if request.op < self._low[client]:
            return  # a late duplicate of an operation its client has finished (P3)
        match request:
            case MatchRequest():
                yield Answer(client, self._match(request, now))
            case AcquireRequest():
                yield from self.reads.acquire(request, now)
            case FilledRequest():
                yield from self.replicas.filled(request, now)
            case AwaitRequest():
                yield from self.replicas.wait(request, now)
            case ReleaseRequest(times=times):
                if times and self.balance is not None:
                    self.balance.measured(times)
                if self.lower is not None:
                    self.lower.promotion.release((client, request.op))
                yield from self.reads.release((client, request.op), now)
                yield from self.replicas.release((client, request.op), now)
            case ReserveRequest():
                yield from self.writes.reserve(request, now)
            case PublishRequest():
                yield from self.writes.publish(request, now)
            case AbandonRequest():
                yield from self.writes.abandon(client, request.op, now)
            case LostRequest(ref=ref):
                yield from self.reads.check_lost(ref, now)
            case ClearRequest() | DropRequest():
                yield from self._remove(request, now)
            case StatsRequest():
                yield Answer(client, self._stats(request))
            case PingRequest(reply_bytes=nbytes):
                payload = bytes(min(max(nbytes, 0), _LONGEST_PING_BYTES))
                yield Answer(
                    client, PingReply(self.cache.server, request.op, request.attempt, payload)
                )

    def _raise_low(self, client: int, low: float, now: float) -> Iterator[Action | ToPeer]:
        before = self._low.get(client, 0)
        self._low[client] = max(before, low)
        if low > before:
            if self.lower is not None:
                self.lower.promotion.cancel(client, low)
            yield from self.reads.raise_low(client, low, now)
            yield from self.replicas.raise_low(client, low, now)
            for key in [k for k in self._removed_counts if k[0] == client and k[1] < low]:
                del self._removed_counts[key]
            yield from self.writes.raise_low(client, low, now)

    def _stats(self, request: StatsRequest) -> StatsReply:
        decisions = () if self.balance is None else tuple(self.balance.decisions)
        return StatsReply(
            self.cache.server,
            request.op,
            request.attempt,
            self.counters(),
            decisions if request.decisions else (),
        )

    def _match(self, request: MatchRequest, now: float) -> MatchReply:
        hashes = np.frombuffer(request.hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
        refs = self.cache.match(hashes)
        if request.is_use:
            if self.balance is not None:  # first: it asks how long ago they were used
                self.balance.asked(hashes, refs, now)
            self.cache.use(refs, now)
        return MatchReply(
            self.cache.server, request.op, request.attempt, refs, self.cache.room.free_bytes
        )

    def _remove(self, request: ClearRequest | DropRequest, now: float) -> Iterator[Action | ToPeer]:
        key = (request.client, request.op)
        if key not in self._removed_counts:  # a repetition is answered, not done again (P2)
            removed_count = 0
            if isinstance(request, ClearRequest):
                yield from self.replicas.clear(request.namespace, now)
                removed_count = yield from self.writes.clear(request.namespace, now)
            else:
                segment = self.cache.find(request.ref)
                whole = segment is not None and segment.block_count == request.ref.block_count
                if segment is not None and whole and not segment.links:
                    removed_count = yield from self.removal.remove(segment, now)
            self._removed_counts[key] = removed_count
            self.dropped_count += removed_count
        yield Answer(
            request.client,
            CountReply(self.cache.server, request.op, request.attempt, self._removed_counts[key]),
        )
