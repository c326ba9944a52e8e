"""The shadow pool: what it counts and what it keeps, for random chains of any sizes."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ptstore_mpi.cache.policies.factory import POLICY_NAMES, make_policy
from ptstore_mpi.cache.shadow import ShadowPool

CAPACITY = 20
steps = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=60)


def chain_of(path):
    keys = [int("1" + "".join(map(str, path[: i + 1])), 3) for i in range(len(path))]
    return [(key, 1 + key % 5, 1.0) for key in keys]


@given(steps)
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_linked_contents_have_no_holes_and_fit(name, paths):
    pool = ShadowPool(make_policy(name, CAPACITY), CAPACITY)
    for path in paths:
        chain = chain_of(path)
        there = [key in pool.policy for key, _, _ in chain]
        assert there == sorted(there, reverse=True)
        assert pool.access(chain) == sum(there)
        assert pool.policy.nbytes <= CAPACITY
    assert pool.counts.hit_block_count == pool.counts.prefix_hit_block_count
    assert pool.counts.block_count == sum(map(len, paths))


@given(steps)
def test_unlinked_blocks_come_and_go_on_their_own(paths):
    pool = ShadowPool(make_policy("lru", CAPACITY), CAPACITY, linked=False)
    kept: OrderedDict[int, int] = OrderedDict()
    hits = usable = hit_bytes = 0
    for path in paths:
        there = []
        for key, nbytes, _ in chain_of(path):
            there.append(key in kept)
            hit_bytes += there[-1] * nbytes
            while not there[-1] and sum(kept.values()) + nbytes > CAPACITY:
                kept.popitem(last=False)
            kept[key] = nbytes
            kept.move_to_end(key)
        hits += sum(there)
        usable += [*there, False].index(False)
        pool.access(chain_of(path))
    counts = pool.counts
    assert (counts.hit_block_count, counts.prefix_hit_block_count) == (hits, usable)
    assert counts.hit_bytes == hit_bytes
    assert set(kept) == {key for key in range(3**8) if key in pool.policy}
