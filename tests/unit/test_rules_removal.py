"""Rule P15: drop, prune, lost segments and clear; and the room they give back."""

from __future__ import annotations

import numpy as np
import pytest
from hand import Hand, hashes_of, ref_of, replies, statuses, to_peers

from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import peer_messages as peer
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import SMALL, Actor, small_config
from ptstore_mpi.testing.checks import check_links, check_reachable, check_space

PROMPT = np.arange(32)


def test_drop_takes_leaves_tail_first_and_frees_their_bytes():
    hand = Hand()
    refs = hand.stored([1, 2, 3, 4, 5])
    before = hand.cache.room.free_bytes
    for op, (ref, expected) in enumerate(
        [(refs[0], 0), (refs[1], 0), (refs[2], 1), (refs[2], 0), (refs[1], 1), (refs[0], 1)], 20
    ):
        (reply,) = replies(hand.drop(ref, op=op))
        assert reply.count == expected
        assert len(hand.match([1, 2, 3, 4, 5])) == len(hand.cache.published())
    assert hand.is_empty
    assert before < hand.cache.room.free_bytes


def test_a_reserved_segment_cannot_be_dropped():
    hand = Hand()
    hand.reserve([1, 2], op=1)
    (segment,) = hand.cache.slots
    (reply,) = replies(hand.drop(m.SegmentRef(segment.id, 2, segment.block_hash(1)), op=2, low=1))
    assert reply.count == 0
    assert statuses(hand.publish(op=1)) == ["published"]


def test_prune_goes_to_every_child_and_recurses():
    hand = Hand()
    root = hand.stored([1, 2])
    refs = hand.stored([1, 2, 3, 4], ancestors=root)
    hand.stored([1, 2, 5, 6], ancestors=root)
    hand.reserve([1, 2, 7, 8], ancestors=root, op=50)
    hand.peer(peer.Link(77, refs[1], (1 << 48) | 5))
    (segment,) = (s for s in hand.cache.slots if s.id == root[0].segment)
    assert len(segment.links) == 3
    hand.bad.add(segment.offset)
    segment.checksums = b"some"
    actions = hand.send(m.LostRequest, root[0], op=60, client=8)
    assert to_peers(actions) == [peer.Prune(77, (1 << 48) | 5)]
    assert hand.states() == {"RESERVED": 1}
    assert statuses(hand.publish(op=50)) == ["gone"]
    assert hand.handler.removal.lost_count == 1


def test_what_a_wire_bent_is_not_lost():
    hand = Hand()
    (ref,) = hand.stored([1, 2])
    hand.cache.find(ref).checksums = b"some"
    assert hand.send(m.LostRequest, ref, op=60) == []
    assert hand.states() == {"PUBLISHED": 1}
    assert hand.handler.removal.lost_count == 0


@pytest.mark.parametrize("state", ["published", "reserved", "gone"])
def test_prune_of_a_child(state):
    hand = Hand()
    parent = ref_of(1, 3, [1, 2], 2)
    (link,) = to_peers(hand.reserve([1, 2, 3], ancestors=(parent,), op=1))
    if state == "published":
        hand.peer(peer.LinkResult(link.serial, True, ()))
        hand.publish(op=1)
    elif state == "gone":
        hand.release(op=2)
        hand.stored([8, 9])  # the same slot and id, another serial
    actions = hand.peer(peer.Prune(link.serial, link.child))
    if state == "published":
        assert hand.is_empty
    elif state == "reserved":
        assert statuses(hand.publish(op=1)) == ["gone"]
    else:
        assert actions == []
        assert len(hand.match([8, 9])) == 1
    assert hand.match([1, 2, 3]) == ()


def test_pruned_bytes_are_freed_after_their_leases():
    hand = Hand()
    parent = ref_of(1, 3, [1, 2], 2)
    (link,) = to_peers(hand.reserve([1, 2, 3], ancestors=(parent,), op=1))
    hand.peer(peer.LinkResult(link.serial, True, ()))
    hand.publish(op=1)
    hand.acquire(hand.match([1, 2, 3])[1], op=2, remaining_s=4.0)
    hand.peer(peer.Prune(link.serial, link.child))
    assert hand.states() == {"ZOMBIE": 1}
    hand.release(op=2)
    assert hand.is_empty


def test_clear_takes_one_namespace_and_ends_its_reservations():
    hand = Hand()
    hand.stored([1, 2, 3])
    hand.reserve([4], op=20)
    hand.send(
        m.ReserveRequest,
        b"o" * 16,
        (),
        hashes_of(1, root=b"o" * 16).tobytes(),
        (1,),
        (64,),
        30.0,
        True,
        op=20,
        client=8,
    )
    (reply,) = replies(hand.clear(op=30, client=9))
    assert reply.count == 2
    assert hand.match([1, 2, 3]) == ()
    assert statuses(hand.publish(op=20)) == ["gone"]
    assert statuses(hand.publish(op=20, client=8)) == ["published"]


def test_clear_prunes_children_on_other_servers():
    cluster = Cluster(small_config(placement="local"), server_nodes=(0, 1), client_nodes=(0, 1))
    one, two = (Actor(cluster, client) for client in cluster.clients)
    one.store(PROMPT[:8])
    two.store(PROMPT[:16])
    one.store(PROMPT)
    check_links(cluster)
    cluster.on_request = lambda server, message: (
        [] if isinstance(message, m.ClearRequest) and server == 1 else [message]
    )
    assert one.clear() is None, "server 1 never heard of it"
    assert one.known_blocks(PROMPT) == 0
    assert two.known_blocks(PROMPT[:16]) == 0
    assert [len(handler.cache.published()) for handler in cluster.servers] == [0, 0]
    check_space(cluster)


def test_clear_counts_no_segment_twice():
    """A child that another server's clear prunes before its own server's comes is not counted."""
    cluster = Cluster(small_config(placement="local"), server_nodes=(0, 1), client_nodes=(0, 1))
    one, two = (Actor(cluster, client) for client in cluster.clients)
    one.store(PROMPT[:8])
    two.store(PROMPT[:16])
    assert one.clear() in (1, 2)
    assert one.clear() == 0


def test_clear_leaves_other_namespaces_alone_and_slots_are_used_again():
    cluster = Cluster(small_config(slots=4), server_nodes=(0,), client_nodes=(0,))
    actor = Actor(cluster, cluster.clients[0])
    other = Actor(cluster, cluster.clients[0], salt="other")
    assert other.store(PROMPT[:8]) == "stored"
    ids = set()
    for start in range(0, 400, 40):
        assert actor.store(PROMPT[:16] + start) == "stored"
        ids |= {ref.segment for ref in actor.match(PROMPT[:16] + start).refs}
        assert actor.clear() == 2
    assert len(ids) == 2, "two slots, used again and again"
    assert other.load(PROMPT[:8]) == 2


def test_a_clear_between_reserve_and_publish():
    cluster = Cluster(small_config(), server_nodes=(0,), client_nodes=(0, 0))
    writer, cleaner = (Actor(cluster, client) for client in cluster.clients)
    operation = writer.start_store(PROMPT)
    while not isinstance(getattr(operation.effect, "message", None), m.PublishRequest):
        operation.step()
    cleaner.clear()
    assert operation.finish().reason == "stored", "gone, then matched again, and stored anew"
    assert writer.load(PROMPT) == 8
    check_space(cluster)


@pytest.mark.parametrize("verify", ["always", "remote"])
def test_flipped_bits_are_a_miss_and_the_segment_is_lost_with_its_children(verify):
    cluster = Cluster(small_config(placement="local", verify=verify))
    near, far = (Actor(cluster, client) for client in cluster.clients)
    near.store(PROMPT[:24])
    far.store(PROMPT)
    second = near.match(PROMPT).refs[1]
    segment = cluster.servers[0].cache.find(second)
    cluster.memories[0][segment.offset + 5] ^= 1
    reader = near if verify == "always" else far
    assert reader.load(PROMPT) == 2
    assert reader.context.counters["corrupt_count"] == 1
    assert reader.known_blocks(PROMPT) == 2, "lost: nobody will try it again"
    assert cluster.servers[0].removal.lost_count == 1
    check_reachable(cluster)
    check_links(cluster)
    check_space(cluster)
    assert near.store(PROMPT[:24]) == "stored"
    assert near.load(PROMPT[:24]) == 6


def test_a_bit_flipped_in_flight_is_a_miss_but_nothing_is_lost():
    cluster = Cluster(small_config(placement="local", verify="remote"))
    near, far = (Actor(cluster, client) for client in cluster.clients)
    near.store(PROMPT)
    far.transport.hold_transfers = True
    load = far.start_load(PROMPT, far.match(PROMPT).refs)
    while far.transport.in_flight_count == 0:
        load.operation.step()
    far.transport.land(1)
    far.transport._memories[None][3] ^= 0x10
    far.transport.hold_transfers = False
    far.transport.land()
    assert load.checked_blocks(far.oracle) == 0
    assert load.operation.result.reason == "corrupt"
    assert cluster.servers[0].removal.lost_count == 0
    assert far.load(PROMPT) == 8


def test_block_checksums_cover_every_byte():
    cluster = Cluster(small_config(placement="local", verify="always"))
    actor = Actor(cluster, cluster.clients[0])
    actor.store(PROMPT[:8])
    (ref,) = actor.match(PROMPT[:8]).refs
    segment = cluster.servers[0].cache.find(ref)
    image = range(segment.offset, segment.offset + 2 * SMALL.block_bytes)
    for where in image:
        cluster.memories[0][where] ^= 0x40
        load = actor.start_load(PROMPT[:8], (ref,))
        cluster.on_request = lambda server, message: (
            [] if isinstance(message, m.LostRequest) else [message]
        )
        assert load.checked_blocks(actor.oracle) == 0, where
        cluster.memories[0][where] ^= 0x40
    assert actor.load(PROMPT[:8]) == 2
