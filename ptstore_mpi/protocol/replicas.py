"""The replica path of a server: wishes, fills, waiters, and room for them (P17, P18).

::

    wish --+-- here                                  leased at once, a plain load on this node
           +-- fill --> filled --> complete          the first who asks; leases it to all waiters
           |     `----- failed, late, given up       its slot waits for P3; waiters are told
           +-- wait --> await ---> here | none       whoever asks meanwhile
           `-- none                                  not admitted, or no room: fetch it directly

A wish is handled in one step, and no fill waits for another: two loads cannot wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import msgspec
import numpy as np

from ptstore_mpi.cache.admission import Admission
from ptstore_mpi.cache.balance import Balance
from ptstore_mpi.cache.leases import LeaseKey
from ptstore_mpi.cache.replicas import Replica, ReplicaCache, ReplicaState
from ptstore_mpi.protocol.actions import Action, Answer, ToPeer
from ptstore_mpi.protocol.making_room import MakingRoom
from ptstore_mpi.protocol.messages import (
    AcquireRequest,
    AwaitReply,
    AwaitRequest,
    FilledRequest,
    Grant,
    ReplicaPlace,
    ReplicaWish,
)
from ptstore_mpi.types import HASH_BYTES, SegmentRef, ServerIndex

__all__ = ["ReplicaPath"]

_NONE = ReplicaPlace("none")
_WAIT = ReplicaPlace("wait")


class ReplicaPath:
    """Replicas kept by one server. Its methods return the actions they cause.

    Parameters
    ----------
    replicas
        What is kept here.
    server
        This server.
    making_room
        Lets owned segments go.
    admission
        Says what is worth a slot.
    is_intact
        Tells whether the bytes of a replica have its checksums.
    lease_cap_s
        Longest lease it grants, s.
    balance
        Hears of replicas that are missed; None: their share is fixed.
    """

    def __init__(
        self,
        replicas: ReplicaCache,
        server: ServerIndex,
        *,
        making_room: MakingRoom,
        admission: Admission,
        is_intact: Callable[[Replica, bytes], bool],
        lease_cap_s: float,
        balance: Balance | None = None,
    ) -> None:
        self.replicas = replicas
        self._server = server
        self._making_room = making_room
        self._admission = admission
        self._is_intact = is_intact
        self._lease_cap_s = lease_cap_s
        self._balance = balance
        self._asked: dict[LeaseKey, None] = {}  # wishes that were handled: no second slot (P2)
        self._awaiting: dict[LeaseKey, AwaitRequest] = {}
        self.hit_count = 0
        self.refused_count = 0
        self.wait_count = 0

    # -- requests of clients -----------------------------------------------------------------

    def grant(
        self, request: AcquireRequest, wish: ReplicaWish, now: float
    ) -> Generator[Action | ToPeer, None, tuple[ReplicaPlace, ...]]:
        """Lease what is here, open slots for what is worth it, all in one step."""
        key = (request.client, request.op)
        again = key in self._asked
        self._asked[key] = None
        lease_s = min(request.remaining_s, self._lease_cap_s)
        places: list[ReplicaPlace] = []
        for ref in wish.refs:
            place = self._here(ref, request, now + lease_s, now)
            if place is not None and not wish.may_fill:  # its asker may keep one too
                place = self._with_hashes(place, ref)
            if place is None and wish.may_fill:
                self._miss(ref, wish)
                place = self._join(ref, key, lease_s)
                if place is None and not again:
                    place = yield from self._open(ref, wish, key, now + request.remaining_s, now)
            places.append(place or _NONE)
        return tuple(places)

    def filled(self, request: FilledRequest, now: float) -> Iterator[Action | ToPeer]:
        """Take note that slots are filled: found from now on, and leased to who waits (P17)."""
        key = (request.client, request.op)
        start = 0
        for ref in request.refs:
            end = start + ref.block_count
            replica = self.replicas.slot_of(key, ref)
            if replica is not None:
                hashes = np.frombuffer(request.hashes, np.uint8).reshape(-1, HASH_BYTES)[start:end]
                checksums = request.checksums[4 * start : 4 * end]
                self.replicas.publish(replica, hashes, checksums, now)
                for waiter, (wanted, lease_s) in replica.waiters.items():
                    if replica.holds(wanted):
                        self.replicas.lease(replica, waiter, now + lease_s)
                yield from self._tell(replica, now)
            start = end

    def wait(self, request: AwaitRequest, now: float) -> Iterator[Action | ToPeer]:
        """Answer when no fill of what is asked for is under way any more."""
        self.wait_count += (request.client, request.op) not in self._awaiting
        self._awaiting[request.client, request.op] = request
        yield from self._answer_if_over((request.client, request.op), now)

    def release(self, key: LeaseKey, now: float) -> Iterator[Action | ToPeer]:
        """An operation has ended: its leases, its waiting, and the fills it did not complete."""
        self._awaiting.pop(key, None)
        self.replicas.forget_waiter(key)
        self.replicas.release(key, now)
        for replica in self.replicas.slots_of(key):
            if replica.state is ReplicaState.FILLING:
                yield from self._give_up(replica, now)

    def raise_low(self, client: int, low: float, now: float) -> Iterator[Action | ToPeer]:
        """Free what the client confirms that it will not write any more (P3)."""
        self.replicas.release_before(client, low, now)
        for key in [k for k in self._asked if k[0] == client and k[1] < low]:
            del self._asked[key]
            self.replicas.forget_waiter(key)
        for key in [k for k in self._awaiting if k[0] == client and k[1] < low]:
            del self._awaiting[key]
        for key in self.replicas.fillers_before(client, low):
            yield from self.release(key, now)
            for replica in self.replicas.slots_of(key):
                self.replicas.free_slot(replica)

    def clear(self, namespace: bytes, now: float) -> Iterator[Action | ToPeer]:
        """Drop the replicas of a namespace; those that are being filled are given up."""
        for replica in self.replicas.of_namespace(namespace):
            self.replicas.drop(replica, now)
        for replica in self.replicas.filling_of(namespace):
            yield from self._give_up(replica, now)

    def check_lost(self, ref: SegmentRef, now: float) -> None:
        """Look for oneself whether a replica is bad, and drop it if so."""
        replica = self.replicas.find(ref)
        if replica is None or not replica.checksums:
            return
        if not self._is_intact(replica, replica.checksums):
            self.replicas.drop(replica, now)

    # -- time --------------------------------------------------------------------------------

    def expire(self, now: float) -> Iterator[Action | ToPeer]:
        """End leases, and fills whose time is over: the next who asks may fill anew (P17)."""
        self.replicas.expire_leases(now)
        for replica in self.replicas.overdue(now):
            yield from self._give_up(replica, now)

    @property
    def remembered_count(self) -> int:
        """What is kept for clients besides leases and slots."""
        return len(self._asked) + len(self._awaiting)

    def counters(self) -> dict[str, int]:
        """Return counters by name; bytes and counts."""
        return {
            **self.replicas.counters(),
            "replica_hit_count": self.hit_count,
            "replica_refused_count": self.refused_count,
            "replica_wait_count": self.wait_count,
        }

    # -- internals ---------------------------------------------------------------------------

    def _here(
        self, ref: SegmentRef, request: AcquireRequest | AwaitRequest, expiry_s: float, now: float
    ) -> ReplicaPlace | None:
        key = (request.client, request.op)
        replica = self.replicas.find(ref)
        if replica is None:
            return None
        self.hit_count += key not in replica.leases
        self.replicas.lease(replica, key, expiry_s)
        self.replicas.use(replica, now)
        sums = replica.checksums[: 4 * ref.block_count] if request.checksums else b""
        return ReplicaPlace("here", Grant(replica.offset, replica.block_count, sums))

    def _with_hashes(self, place: ReplicaPlace, ref: SegmentRef) -> ReplicaPlace:
        replica = self.replicas.find(ref)
        assert replica is not None, "it was leased in this step"
        hashes = replica.hashes[: ref.block_count].tobytes()
        return ReplicaPlace(place.status, msgspec.structs.replace(place.grant, hashes=hashes))

    def _miss(self, ref: SegmentRef, wish: ReplicaWish) -> None:
        if self._balance is not None:
            self._balance.replica_side.missed(ref, ref.block_count * sum(wish.tensor_bytes))

    def _join(self, ref: SegmentRef, key: LeaseKey, lease_s: float) -> ReplicaPlace | None:
        """Answer from a fill that is under way: the asker's own, or another's."""
        own = self.replicas.slot_of(key, ref)
        if own is not None:
            return ReplicaPlace("fill", Grant(own.offset, own.block_count, b""))
        replica = self.replicas.filling(ref)
        if replica is None:
            return None
        replica.waiters[key] = (ref, lease_s)
        return _WAIT

    def _open(
        self, ref: SegmentRef, wish: ReplicaWish, key: LeaseKey, expiry_s: float, now: float
    ) -> Generator[Action | ToPeer, None, ReplicaPlace | None]:
        content = int.from_bytes(ref.last_hash[:8], "little")
        if not self._admission.admits(content) or not self.replicas.may_fill(ref):
            self.refused_count += 1
            return None
        replica: Replica | None = None
        if (yield from self._make_room(ref, wish.tensor_bytes, now)):
            replica = self.replicas.reserve(
                ref, wish.namespace, wish.tensor_bytes, filler=key, expiry_s=expiry_s
            )
        if replica is None:
            self.refused_count += 1
            if self._balance is not None:
                needed = self.replicas.needs_bytes(ref, wish.tensor_bytes)
                self._balance.replica_side.refused(ref, sum(needed))
            return None
        return ReplicaPlace("fill", Grant(replica.offset, replica.block_count, b""))

    def _make_room(
        self, ref: SegmentRef, tensor_bytes: tuple[int, ...], now: float
    ) -> Generator[Action | ToPeer, None, bool]:
        """Drop replicas, or owned leaves while replicas have less than their lower limit."""
        replicas, room = self.replicas, self.replicas.room
        nbytes, metadata_bytes = replicas.needs_bytes(ref, tensor_bytes)
        wanted = nbytes + metadata_bytes
        below = replicas.used_bytes + wanted <= replicas.least_bytes
        others_bytes = self._making_room.idle_bytes if below else 0
        short_bytes = max(
            replicas.used_bytes + wanted - replicas.most_bytes,
            wanted - room.free_bytes - others_bytes,
        )
        if short_bytes > replicas.idle_bytes:
            return False  # nothing is dropped in vain
        while replicas.used_bytes + wanted > replicas.most_bytes or not room.fits(
            nbytes, metadata_bytes=metadata_bytes
        ):
            below = replicas.used_bytes + wanted <= replicas.least_bytes
            if below and (yield from self._making_room.of_owned(wanted, now)):
                continue
            if (victim := replicas.victim()) is not None:
                replicas.drop(victim, now, evicted=True)
            else:
                return False
        return True

    def _give_up(self, replica: Replica, now: float) -> Iterator[Action | ToPeer]:
        self.replicas.give_up(replica)
        yield from self._tell(replica, now)

    def _tell(self, replica: Replica, now: float) -> Iterator[Action | ToPeer]:
        """Answer those for whom this fill was the last they waited for."""
        for waiter in replica.waiters:
            yield from self._answer_if_over(waiter, now)

    def _answer_if_over(self, key: LeaseKey, now: float) -> Iterator[Action | ToPeer]:
        request = self._awaiting.get(key)
        if request is None or any(self._waits(key, ref) for ref in request.refs):
            return
        del self._awaiting[key]
        lease_s = min(request.remaining_s, self._lease_cap_s)
        places = tuple(
            self._here(ref, request, now + lease_s, now) or _NONE for ref in request.refs
        )
        yield Answer(
            request.client,
            AwaitReply(self._server, request.op, request.attempt, places, lease_s),
        )

    def _waits(self, key: LeaseKey, ref: SegmentRef) -> bool:
        replica = self.replicas.filling(ref)
        return replica is not None and key in replica.waiters
