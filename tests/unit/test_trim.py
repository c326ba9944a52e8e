"""P16: a server full of parents whose leaves live on others gets room from these."""

from __future__ import annotations

import numpy as np
from hand import Hand, to_peers

from ptstore_mpi.protocol import peer_messages as peer
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import Actor, small_config

ROOT = np.arange(1, 9)


def grown(count):
    """Return a cluster whose server 0 is full of parents, each with a child on server 1."""
    config = small_config(slots=3, placement="local", eviction="lru")
    cluster = Cluster(config)
    near, far = (Actor(cluster, client) for client in cluster.clients)
    for number in range(count):
        assert near.store(ROOT * 100 + number) == "stored"
        assert far.store(np.append(ROOT * 100 + number, ROOT + number)) == "stored"
    return cluster, near, far


def test_leaves_elsewhere_make_room():
    """CE 10: without it server 0 would refuse for ever."""
    cluster, near, _ = grown(3)
    assert near.store(ROOT * 7) == "full"
    assert cluster.servers[1].writes.trimming.trimmed_count == 1
    assert near.store(ROOT * 7) == "stored"
    assert near.load(ROOT * 7) == 2
    oldest = np.append(ROOT * 100, ROOT)
    assert near.known_blocks(oldest) == 0, "the coldest has gone, with what hung on it"
    assert near.known_blocks(np.append(ROOT * 100 + 2, ROOT + 2)) == 4


def test_a_trim_takes_the_coldest_leaf_or_goes_on_where_the_leaves_are():
    hand = Hand(eviction="lru")
    first = hand.stored([1, 2])
    warm, cold = (hand.stored([1, 2, block], ancestors=first)[-1] for block in (5, 6))
    hand.match([1, 2, 5])
    parent = next(segment for segment in hand.cache.slots if segment.links)
    hand.peer(peer.Trim(parent.serial, parent.id))
    assert [hand.cache.find(ref) is None for ref in (warm, cold)] == [False, True]
    hand.peer(peer.Trim(parent.serial + 1, parent.id))
    assert hand.cache.find(warm), "another link's serial"
    elsewhere = (1 << 48) + 7
    hand.peer(peer.Link(99, first[0], elsewhere))
    hand.acquire(warm, op=50)
    asked = to_peers(hand.peer(peer.Trim(parent.serial, parent.id)))
    assert asked == [peer.Trim(99, elsewhere)]
    assert hand.cache.find(warm), "it is leased"
