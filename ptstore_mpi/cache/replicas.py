"""Replicas in one arena: copies of the first blocks of other servers' segments, droppable any time.

It decides nothing about messages; the handler's replica path calls it. Invariants:

- only complete replicas are found, and each by the id *and* the hash of what is asked for (P4);
- a slot that its filler may still be writing is not freed, whatever became of the fill (P3);
- a replica's bytes are freed only when it is out of sight and no lease on it is valid;
- what they take, descriptions included, is charged to the arena's `Room` and never passes
  ``most_bytes``.

::

    reserve -> filling --+-- complete -> (found, leased) -> dropped -> freed after its leases
                         `-- quarantined ------------------------------> freed by P3 only
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ptstore_mpi.cache.leases import LeaseKey, Leases, is_leased
from ptstore_mpi.cache.owned import metadata_bytes_of
from ptstore_mpi.cache.policies.tree import EvictionPolicy
from ptstore_mpi.cache.room import Room
from ptstore_mpi.cache.sides import Watch
from ptstore_mpi.types import HASH_BYTES, BlockHashes, SegmentRef, whole_pages

__all__ = ["Replica", "ReplicaCache", "ReplicaState"]

_NO_HASHES = np.zeros((0, HASH_BYTES), np.uint8)


class ReplicaState(enum.Enum):
    """Where a replica is in its life; a freed one no longer exists."""

    FILLING = enum.auto()
    COMPLETE = enum.auto()
    QUARANTINED = enum.auto()
    ZOMBIE = enum.auto()


@dataclass(slots=True, eq=False)
class Replica:
    """A copy, or the slot of one that is being fetched.

    Attributes
    ----------
    serial
        Its name here, never reused.
    ref
        What it holds: the first ``block_count`` blocks of a segment.
    namespace
        Digest of its namespace.
    block_bytes
        Bytes of one block of each tensor.
    offset, nbytes, metadata_bytes
        Its extent in the arena, in whole pages, and what describing it costs.
    filler
        Operation that fills it (P17).
    expiry_s
        When the fill is given up.
    waiters
        Operations that wait for it, by key: what each asked for, and how long a lease it wants, s.
    hashes, checksums
        Of its blocks, once complete.
    """

    serial: int
    ref: SegmentRef
    namespace: bytes
    tensor_bytes: tuple[int, ...]
    offset: int
    nbytes: int
    metadata_bytes: int
    filler: LeaseKey
    expiry_s: float
    state: ReplicaState = ReplicaState.FILLING
    waiters: dict[LeaseKey, tuple[SegmentRef, float]] = field(default_factory=dict)
    hashes: BlockHashes = field(default_factory=lambda: _NO_HASHES)
    checksums: bytes = b""
    leases: dict[LeaseKey, float] = field(default_factory=dict)

    @property
    def block_count(self) -> int:
        """Blocks that it holds."""
        return self.ref.block_count

    @property
    def charged_bytes(self) -> int:
        """Bytes of the budget that it takes."""
        return self.nbytes + self.metadata_bytes

    def holds(self, ref: SegmentRef) -> bool:
        """Tell whether it is complete and holds what ``ref`` names (P4)."""
        return (
            self.state is ReplicaState.COMPLETE
            and self.ref.segment == ref.segment
            and ref.block_count <= self.block_count
            and bytes(self.hashes[ref.block_count - 1]) == ref.last_hash
        )


class ReplicaCache(Leases[Replica]):
    """The replicas of one server.

    Parameters
    ----------
    room
        Room of its arena.
    policy
        Names what goes first; a fresh one.
    least_bytes, most_bytes
        They are not dropped for owned segments while they take no more than the first, and never
        take more than the second.

    Attributes
    ----------
    watch
        Hears what becomes of complete replicas, where somebody wants to know.
    """

    def __init__(
        self, room: Room, policy: EvictionPolicy, *, least_bytes: int, most_bytes: int
    ) -> None:
        super().__init__()
        self.room = room
        self.least_bytes = least_bytes
        self.most_bytes = most_bytes
        self.watch: Watch[Replica] | None = None
        self._policy = policy
        self._complete: dict[int, Replica] = {}  # by segment
        self._filling: dict[int, Replica] = {}  # by segment
        self._by_serial: dict[int, Replica] = {}
        self._fills: dict[LeaseKey, list[Replica]] = {}  # slots their fillers may still write
        self._next_serial = 1
        self.used_bytes = 0
        self._idle_bytes = 0  # of those complete and not leased
        self.filled_count = 0
        self.failed_count = 0
        self.dropped_count = 0

    def __iter__(self) -> Iterator[Replica]:
        """Iterate over all that have bytes here, over a copy."""
        return iter(list(self._by_serial.values()))

    # -- reading -----------------------------------------------------------------------------

    def find(self, ref: SegmentRef) -> Replica | None:
        """Return the complete replica that holds what ``ref`` names."""
        replica = self._complete.get(ref.segment)
        return replica if replica is not None and replica.holds(ref) else None

    def filling(self, ref: SegmentRef) -> Replica | None:
        """Return the slot that is being filled with at least what ``ref`` names, as far as known.

        Hashes of its blocks are known only when it is complete.
        """
        replica = self._filling.get(ref.segment)
        if replica is None or replica.block_count < ref.block_count:
            return None
        if replica.block_count == ref.block_count and replica.ref != ref:
            return None
        return replica

    def use(self, replica: Replica, now: float) -> None:
        """Note that a request used a replica."""
        self._policy.hit(replica.serial, now)
        if self.watch is not None:
            self.watch.used((replica,))

    # -- filling -----------------------------------------------------------------------------

    def needs_bytes(self, ref: SegmentRef, tensor_bytes: tuple[int, ...]) -> tuple[int, int]:
        """Return the extent of a replica, and what describing it costs."""
        nbytes = whole_pages(ref.block_count * sum(tensor_bytes))
        return nbytes, metadata_bytes_of(ref.block_count)

    def may_fill(self, ref: SegmentRef) -> bool:
        """Tell whether a slot may be opened: nobody is filling one for this segment."""
        return ref.segment not in self._filling

    def reserve(
        self,
        ref: SegmentRef,
        namespace: bytes,
        tensor_bytes: tuple[int, ...],
        *,
        filler: LeaseKey,
        expiry_s: float,
    ) -> Replica | None:
        """Open a slot for ``filler``; None: no room now, or the limit is reached."""
        nbytes, metadata_bytes = self.needs_bytes(ref, tensor_bytes)
        if self.used_bytes + nbytes + metadata_bytes > self.most_bytes:
            return None
        offsets = self.room.take([nbytes], metadata_bytes=metadata_bytes)
        if offsets is None:
            return None
        replica = Replica(
            self._next_serial,
            ref,
            namespace,
            tensor_bytes,
            offsets[0],
            nbytes,
            metadata_bytes,
            filler,
            expiry_s,
        )
        self._next_serial += 1
        self.used_bytes += nbytes + metadata_bytes
        self._filling[ref.segment] = replica
        self._by_serial[replica.serial] = replica
        self._fills.setdefault(filler, []).append(replica)
        return replica

    def slot_of(self, filler: LeaseKey, ref: SegmentRef) -> Replica | None:
        """Return the slot that an operation is filling with ``ref``."""
        slots = self._fills.get(filler, ())
        return next(
            (r for r in slots if r.ref == ref and r.state is ReplicaState.FILLING),
            None,
        )

    def slots_of(self, filler: LeaseKey) -> list[Replica]:
        """Return the slots that an operation may still be writing."""
        return list(self._fills.get(filler, ()))

    def fillers_before(self, client: int, low: float) -> list[LeaseKey]:
        """Return the operations of a client below its watermark that have slots (P3)."""
        return [key for key in self._fills if key[0] == client and key[1] < low]

    def filling_of(self, namespace: bytes) -> list[Replica]:
        """Return the slots of a namespace that are being filled."""
        return [r for r in self._filling.values() if r.namespace == namespace]

    def forget_waiter(self, waiter: LeaseKey) -> None:
        """An operation does not wait for any fill any more."""
        for replica in self._filling.values():
            replica.waiters.pop(waiter, None)

    def overdue(self, now: float) -> list[Replica]:
        """Return the slots whose fills have taken too long."""
        return [replica for replica in self._filling.values() if replica.expiry_s <= now]

    def publish(self, replica: Replica, hashes: BlockHashes, checksums: bytes, now: float) -> None:
        """Make a filled slot found; a shorter or outdated copy of its segment is dropped."""
        assert replica.state is ReplicaState.FILLING
        self._detach(replica)
        self._let_filler_go(replica)
        before = self._complete.get(replica.ref.segment)
        if before is not None:
            self.drop(before, now)
        replica.hashes, replica.checksums = hashes, checksums
        replica.state = ReplicaState.COMPLETE
        self._complete[replica.ref.segment] = replica
        self._idle_bytes += replica.charged_bytes
        self._policy.add(
            replica.serial,
            replica.nbytes,
            cost_s=float(replica.block_count),
            content=int.from_bytes(replica.ref.last_hash[:8], "little"),
            now=now,
        )
        self.filled_count += 1
        if self.watch is not None:
            self.watch.kept(replica)

    def give_up(self, replica: Replica) -> None:
        """End a fill that has failed; its filler may still be writing (P17)."""
        assert replica.state is ReplicaState.FILLING
        self._detach(replica)
        replica.state = ReplicaState.QUARANTINED
        self.failed_count += 1

    def free_slot(self, replica: Replica) -> None:
        """Free a given-up slot: its filler has confirmed that it does not write any more (P3)."""
        assert replica.state is ReplicaState.QUARANTINED
        self._let_filler_go(replica)
        self._free(replica)

    # -- dropping ----------------------------------------------------------------------------

    def victim(self) -> Replica | None:
        """Return the replica worth least that nobody reads; None: there is none."""
        serial = self._policy.victim()
        return None if serial is None else self._by_serial[serial]

    def victim_for_owned(self) -> Replica | None:
        """Return the same, unless then less than the lower limit would be left."""
        victim = self.victim()
        if victim is None or self.used_bytes - victim.charged_bytes < self.least_bytes:
            return None
        return victim

    @property
    def idle_bytes(self) -> int:
        """Bytes of those that could be dropped now."""
        return self._idle_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that owned segments cannot have: those in use, or up to the lower limit."""
        return max(self.used_bytes - self._idle_bytes, min(self.used_bytes, self.least_bytes))

    def drop(self, replica: Replica, now: float, *, evicted: bool = False) -> None:
        """Take a complete replica out of sight; free its bytes after its last lease."""
        assert replica.state is ReplicaState.COMPLETE
        leave = self._policy.evict if evicted else self._policy.remove
        leave(replica.serial)
        del self._complete[replica.ref.segment]
        replica.state = ReplicaState.ZOMBIE
        self._idle_bytes -= 0 if replica.leases else replica.charged_bytes
        self.dropped_count += 1
        if self.watch is not None:
            self.watch.left(replica, evicted=evicted)
        self.free_if_dead(replica, now)

    def of_namespace(self, namespace: bytes) -> list[Replica]:
        """Return the complete replicas of a namespace."""
        return [r for r in self._complete.values() if r.namespace == namespace]

    def counters(self) -> dict[str, int]:
        """Return sizes by name, in bytes and counts."""
        return {
            "replica_bytes": self.used_bytes,
            "replica_most_bytes": self.most_bytes,
            "replica_count": len(self._complete),
            "replica_leased_bytes": self.leased_bytes,
            "replica_filled_count": self.filled_count,
            "replica_failed_count": self.failed_count,
            "replica_dropped_count": self.dropped_count,
        }

    # -- leases ------------------------------------------------------------------------------

    def hold(self, copy: Replica) -> None:
        """Keep a replica from being a victim."""
        if copy.state is ReplicaState.COMPLETE:
            self._policy.pin(copy.serial)
            self._idle_bytes -= 0 if copy.leases else copy.charged_bytes

    def let_go(self, copy: Replica) -> None:
        """End one `hold`."""
        if copy.state is ReplicaState.COMPLETE:
            self._policy.unpin(copy.serial)
            self._idle_bytes += 0 if copy.leases else copy.charged_bytes

    def free_if_dead(self, copy: Replica, now: float) -> None:
        """Free a dropped replica that no lease keeps any more."""
        if copy.state is ReplicaState.ZOMBIE and not is_leased(copy, now):
            self._free(copy)

    # -- internals ---------------------------------------------------------------------------

    def _detach(self, replica: Replica) -> None:
        del self._filling[replica.ref.segment]

    def _let_filler_go(self, replica: Replica) -> None:
        slots = self._fills[replica.filler]
        slots.remove(replica)
        if not slots:
            del self._fills[replica.filler]

    def _free(self, replica: Replica) -> None:
        if self._by_serial.pop(replica.serial, None) is None:
            return
        self.forget_leases(replica)
        self.used_bytes -= replica.charged_bytes
        self.room.give_back(replica.offset, replica.nbytes, metadata_bytes=replica.metadata_bytes)
