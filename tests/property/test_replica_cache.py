"""The replica cache against a dictionary: room, names, leases and slots over random steps."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ptstore_mpi.cache.policies.factory import make_policy
from ptstore_mpi.cache.replicas import ReplicaCache, ReplicaState
from ptstore_mpi.cache.room import Room
from ptstore_mpi.types import SegmentRef

CAPACITY_BYTES = 16 * 4096
TENSOR_BYTES = (1500, 500)
SEGMENTS = st.integers(0, 4)
CONTENTS = st.integers(0, 1)
BLOCKS = st.integers(1, 3)
KEYS = st.tuples(st.integers(1, 2), st.integers(1, 3))


def hashes_of(segment, content, blocks):
    """Return hashes such that equal prefixes have equal ones."""
    rows = [[segment, content, block, *[9] * 13] for block in range(blocks)]
    return np.array(rows, dtype=np.uint8)


def ref_of(segment, content, blocks):
    last_hash = hashes_of(segment, content, blocks)[-1].tobytes()
    return SegmentRef((1 << 48) + (segment << 20), blocks, last_hash)


class ReplicaMachine(RuleBasedStateMachine):
    """What is complete, filling and leased, as three dictionaries."""

    def __init__(self):
        super().__init__()
        self.room = Room(CAPACITY_BYTES)
        self.cache = ReplicaCache(
            self.room, make_policy("lru", CAPACITY_BYTES), least_bytes=0, most_bytes=40_000
        )
        self.complete = {}  # segment: (content, blocks, replica)
        self.filling = {}  # segment: (content, blocks, key, replica)
        self.now = 0.0

    @rule(segment=SEGMENTS, content=CONTENTS, blocks=BLOCKS, key=KEYS)
    def reserve(self, segment, content, blocks, key):
        ref = ref_of(segment, content, blocks)
        assert self.cache.may_fill(ref) == (segment not in self.filling)
        if segment in self.filling:
            return
        free_bytes = self.room.free_bytes
        replica = self.cache.reserve(ref, b"n" * 16, TENSOR_BYTES, filler=key, expiry_s=1e9)
        if replica is None:
            assert self.room.free_bytes == free_bytes
        else:
            self.filling[segment] = (content, blocks, key, replica)

    @rule(segment=SEGMENTS, fails=st.booleans())
    def end_fill(self, segment, fails):
        if segment not in self.filling:
            return
        content, blocks, key, replica = self.filling.pop(segment)
        assert self.cache.slot_of(key, replica.ref) is replica
        if fails:
            self.cache.give_up(replica)
            assert self.cache.slot_of(key, replica.ref) is None
        else:
            hashes = hashes_of(segment, content, blocks)
            self.cache.publish(replica, hashes, bytes(4 * blocks), self.now)
            self.complete[segment] = (content, blocks, replica)

    @rule(client=st.integers(1, 2), low=st.integers(1, 4))
    def raise_low(self, client, low):
        for key in self.cache.fillers_before(client, low):
            for replica in self.cache.slots_of(key):
                if replica.state is ReplicaState.FILLING:
                    self.cache.give_up(replica)
                    self.filling = {s: f for s, f in self.filling.items() if f[3] is not replica}
                self.cache.free_slot(replica)
        self.cache.release_before(client, low, self.now)

    @rule(segment=SEGMENTS, content=CONTENTS, blocks=BLOCKS, key=KEYS)
    def read(self, segment, content, blocks, key):
        found = self.cache.find(ref_of(segment, content, blocks))
        known = self.complete.get(segment)
        expected = known is not None and known[0] == content and known[1] >= blocks
        assert (found is not None) == expected
        if found is not None:
            self.cache.lease(found, key, self.now + 2)
            self.cache.use(found, self.now)

    @rule()
    def drop_victim(self):
        victim = self.cache.victim()
        idle = [r for _, _, r in self.complete.values() if not r.leases]
        assert (victim is None) == (not idle)
        if victim is not None:
            assert victim in idle
            self.cache.drop(victim, self.now, evicted=True)
            self.complete = {s: c for s, c in self.complete.items() if c[2] is not victim}

    @rule(key=KEYS)
    def release(self, key):
        self.cache.release(key, self.now)

    @rule()
    def time_passes(self):
        self.now += 1
        self.cache.expire_leases(self.now)

    @invariant()
    def the_accounts_add_up(self):
        extents = sorted((r.offset, r.offset + r.nbytes) for r in self.cache)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(extents))
        used = sum(r.charged_bytes for r in self.cache)
        assert used == self.cache.used_bytes == CAPACITY_BYTES - self.room.free_bytes
        assert used <= self.cache.most_bytes
        idle = sum(r.charged_bytes for _, _, r in self.complete.values() if not r.leases)
        assert self.cache.kept_bytes == used - idle
        assert self.cache.leased_bytes == sum(r.nbytes for r in self.cache if r.leases)


TestReplicaCache = ReplicaMachine.TestCase
