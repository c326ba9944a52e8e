"""Making room: what a full server evicts, what it never does, and what it then refuses."""

from __future__ import annotations

import numpy as np
import pytest

from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import Actor, small_config
from ptstore_mpi.testing.checks import check_links, check_reachable, check_space

SEGMENT_TOKENS = 8


def prompt(number: int, segments: int = 1) -> np.ndarray:
    return np.arange(segments * SEGMENT_TOKENS) + 1000 * number


def one_server(slots: int, **settings: object) -> tuple[Cluster, Actor]:
    config = small_config(**{"slots": slots, "eviction": "lru", **settings})
    cluster = Cluster(config, server_nodes=(0,), client_nodes=(0,))
    return cluster, Actor(cluster, cluster.clients[0])


def known(actor: Actor, *numbers: int) -> list[int]:
    return [number for number in numbers if actor.known_blocks(prompt(number))]


def test_the_least_recently_loaded_goes_and_is_counted():
    cluster, actor = one_server(slots=3)
    for number in (1, 2, 3):
        assert actor.store(prompt(number)) == "stored"
    assert actor.load(prompt(1)) == 2
    assert actor.store(prompt(4)) == "stored"
    assert known(actor, 1, 2, 3, 4) == [1, 3, 4]
    assert cluster.servers[0].removal.evicted_count == 1
    check_space(cluster)


def test_without_eviction_a_full_server_refuses():
    cluster, actor = one_server(slots=3, eviction="none")
    reasons = [actor.store(prompt(number)) for number in range(1, 6)]
    assert reasons == ["stored"] * 3 + ["full"] * 2
    assert cluster.servers[0].removal.evicted_count == 0


def test_a_prompt_goes_from_its_end():
    cluster, actor = one_server(slots=4)
    actor.store(prompt(1, segments=3))
    actor.store(prompt(2))
    depths = []
    for number in (3, 4):
        actor.store(prompt(number))
        refs = cluster.servers[0].cache.match(actor.hashes(prompt(1, segments=3)))
        depths.append(sum(ref.block_count for ref in refs))
    assert depths == [4, 2]
    check_reachable(cluster)
    check_links(cluster)


def test_what_somebody_reads_stays():
    cluster, actor = one_server(slots=2)
    actor.store(prompt(1))
    actor.store(prompt(2))
    load = actor.start_load(prompt(1), actor.match(prompt(1)).refs)
    while not cluster.servers[0].cache.leased_bytes:
        load.operation.step()
    assert actor.store(prompt(3)) == "stored"
    assert load.checked_blocks(actor.oracle) == 2
    assert known(actor, 1, 2, 3) == [1, 3]


def test_a_store_does_not_evict_what_it_continues():
    _, actor = one_server(slots=2)
    actor.store(prompt(1))
    actor.store(prompt(2))
    actor.load(prompt(2))
    longer = np.append(prompt(1), prompt(5))
    assert actor.store(longer) == "stored"
    assert actor.load(longer) == 4
    assert known(actor, 2) == []


def test_a_parent_of_a_segment_elsewhere_stays():
    cluster = Cluster(small_config(slots=2, eviction="lru", placement="local"))
    near, far = (Actor(cluster, client) for client in cluster.clients)
    near.store(prompt(1))
    far.store(np.append(prompt(1), prompt(9)))
    for number in range(2, 8):
        assert near.store(prompt(number)) == "stored"
    assert far.load(np.append(prompt(1), prompt(9))) == 4
    assert cluster.servers[0].removal.evicted_count == 5
    check_links(cluster)


@pytest.mark.parametrize("policy", ["lru", "lfu", "gdsf", "s3fifo", "adaptive"])
def test_what_never_fits_is_refused(policy):
    cluster, actor = one_server(slots=4, eviction=policy)
    actor.store(prompt(1))
    actor.store(prompt(9))
    load = actor.start_load(prompt(1), actor.match(prompt(1)).refs)
    while not cluster.servers[0].cache.leased_bytes:
        load.operation.step()
    assert actor.store(prompt(2, segments=4)) == "full"
    assert known(actor, 9) == [9], "nothing was evicted in vain"
    assert load.checked_blocks(actor.oracle) == 2
    assert actor.store(prompt(3, segments=3)) == "stored"
    check_space(cluster)
