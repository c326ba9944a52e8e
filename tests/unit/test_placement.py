"""Who owns an increment: a pure function of hashes and loads."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ptstore_mpi.protocol.placement import place

HASHES = [bytes(row) for row in np.random.default_rng(5).integers(0, 256, (3000, 16), np.uint8)]


def owner(placement, first_hash, *, servers=5, near=(1, 3), free=None):
    return place(
        placement,
        first_hash,
        server_count=servers,
        near=near,
        free_bytes=dict.fromkeys(range(servers), 100) if free is None else free,
    )


def test_local_stays_on_the_node_and_uses_all_its_servers():
    owners = Counter(owner("local", block) for block in HASHES)
    assert set(owners) == {1, 3}
    assert min(owners.values()) > 0.4 * len(HASHES)


@pytest.mark.parametrize("placement", ["random", "least_loaded"])
def test_every_client_chooses_the_same_owner(placement):
    for block in HASHES[:200]:
        assert len({owner(placement, block, near=near) for near in [(0,), (1, 3), (4,)]}) == 1


def test_random_is_even_and_ignores_load():
    free = {0: 0, 1: 10**12}
    owners = Counter(owner("random", block, free=free) for block in HASHES)
    assert set(owners) == set(range(5))
    assert min(owners.values()) > 0.17 * len(HASHES)


def test_least_loaded_takes_the_emptier_of_two():
    free = {0: 50, 1: 40, 2: 30, 3: 20, 4: 10}
    owners = Counter(owner("least_loaded", block, free=free) for block in HASHES)
    assert owners[4] == 0, "the fullest server is never the emptier of two"
    assert owners[0] > 1.6 * len(HASHES) / 5
    assert sorted(owners, key=owners.get, reverse=True) == [0, 1, 2, 3]


def test_least_loaded_candidates_differ_and_ties_go_to_the_lower_server():
    for block in HASHES[:200]:
        emptiest = {s: owner("least_loaded", block, free={s: 1}) == s for s in range(5)}
        assert sum(emptiest.values()) == 2, "two candidates, each chosen when it is the emptier"
        low, _ = sorted(s for s, chosen in emptiest.items() if chosen)
        assert owner("least_loaded", block) == low
        assert owner("least_loaded", block, free={}) == low, "silent servers count as full"


@pytest.mark.parametrize("placement", ["local", "random", "least_loaded"])
def test_one_server_owns_everything(placement):
    assert {owner(placement, block, servers=1, near=(0,)) for block in HASHES[:50]} == {0}
