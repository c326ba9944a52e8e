"""Rules P5-P9: publish, region states, links, the index, and partial matches."""

from __future__ import annotations

import numpy as np
import pytest
from hand import Hand, posted, ref_of, replies, statuses, to_peers

from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import peer_messages as peer
from ptstore_mpi.protocol.effects import Pack, Send
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import Actor, small_config

# -- P5: nothing is visible before its bytes are complete ---------------------------------------


def test_p5_publish_of_another_nodes_writer_waits_for_the_data():
    hand = Hand()
    (receives,) = posted(hand.reserve([1, 2, 3], op=1, mapped=False))
    assert [nbytes for _, nbytes in receives.extents] == [4096, 2048]
    assert hand.publish(op=1) == [], "the answer waits"
    assert hand.match([1, 2, 3]) == ()
    assert statuses(hand.handler.received(7, 1, hand.now)) == ["published"]
    assert len(hand.match([1, 2, 3])) == 2


def test_p5_data_first_then_publish():
    hand = Hand()
    hand.reserve([1, 2], op=1, mapped=False)
    assert hand.handler.received(7, 1, hand.now) == []
    assert hand.match([1, 2]) == ()
    assert statuses(hand.publish(op=1)) == ["published"]


def test_p5_data_of_the_wrong_size_is_never_published():
    hand = Hand()
    hand.reserve([1, 2], op=1, mapped=False)
    hand.handler.received(7, 1, hand.now, intact=False)
    assert statuses(hand.publish(op=1)) == ["abandoned"]
    assert hand.match([1, 2]) == ()
    assert hand.states() == {"RESERVED": 1}


def test_p5_the_last_attempt_of_a_waiting_publish_is_answered():
    hand = Hand()
    hand.reserve([1, 2], op=1, mapped=False)
    hand.publish(op=1, attempt=0)
    hand.publish(op=1, attempt=1)
    (reply,) = replies(hand.handler.received(7, 1, hand.now))
    assert (reply.status, reply.attempt) == ("published", 1)


def test_p5_an_owner_that_verifies_refuses_bad_bytes():
    for verify, mapped, expected in [
        ("off", False, "published"),
        ("remote", True, "published"),
        ("always", True, "corrupt"),
        ("remote", False, "corrupt"),
    ]:
        hand = Hand(verify=verify)
        hand.reserve([1, 2, 3], op=1, mapped=mapped)
        second = max(segment.offset for segment in hand.cache.slots)
        hand.bad.add(second)
        answers = hand.publish(op=1, checksums=b"sums" * 3)
        if not mapped:
            answers = hand.handler.received(7, 1, hand.now)
        assert statuses(answers) == [expected]
    assert hand.match([1, 2, 3]) == ()
    hand.release(op=2)
    assert hand.is_empty


# -- P6: region states --------------------------------------------------------------------------


def test_p6_expiry_ends_publishability_and_unlinks_at_once():
    hand = Hand()
    (parent,) = hand.stored([1, 2])
    hand.reserve([1, 2, 3], ancestors=(parent,), op=20)
    segment = hand.cache.find(parent)
    assert len(segment.links) == 1
    hand.tick(29.9)
    assert len(segment.links) == 1
    hand.tick(0.1)
    assert segment.links == {}
    assert hand.states() == {"PUBLISHED": 1, "RESERVED": 1}, "quarantined, not free"
    assert statuses(hand.publish(op=20)) == ["expired"]


def test_p6_a_publish_that_comes_with_the_expiry_is_too_late():
    hand = Hand()
    hand.reserve([1, 2], op=1)
    hand.now += 30.0  # no tick came in between
    assert statuses(hand.publish(op=1)) == ["expired"]
    assert hand.match([1, 2]) == ()


def test_p6_a_publish_that_waits_learns_of_the_expiry():
    hand = Hand()
    hand.reserve([1, 2], op=1, mapped=False)
    hand.publish(op=1)
    assert statuses(hand.tick(31)) == ["expired"]
    assert hand.handler.received(7, 1, hand.now) == []


def test_p6_published_zombie_free():
    hand = Hand()
    (ref,) = hand.stored([1, 2])
    hand.acquire(ref, op=20, remaining_s=5.0)
    hand.drop(ref, op=21, low=20)
    assert hand.states() == {"ZOMBIE": 1}
    assert hand.match([1, 2]) == ()
    (reply,) = replies(hand.acquire(ref, op=22, low=20))
    assert reply.grants == (), "a zombie is not leased again"
    hand.tick(4.9)
    assert hand.states() == {"ZOMBIE": 1}
    hand.tick(0.2)
    assert hand.is_empty


# -- P7: link first -----------------------------------------------------------------------------


def test_p7_the_own_parent_is_linked_in_the_step_of_reserve():
    hand = Hand()
    (parent,) = hand.stored([1, 2])
    assert statuses(hand.reserve([1, 2, 3], ancestors=(parent,), op=20)) == ["reserved"]
    (dropped,) = replies(hand.drop(parent, op=21, low=20))
    assert dropped.count == 0
    hand.abandon(op=20)
    (dropped,) = replies(hand.drop(parent, op=22))
    assert dropped.count == 1
    assert statuses(hand.reserve([1, 2, 3], ancestors=(parent,), op=23)) == ["gone"]


def test_p7_later_segments_hang_on_their_predecessors():
    hand = Hand()
    refs = hand.stored([1, 2, 3, 4, 5])
    chain = [hand.cache.find(ref) for ref in refs]
    assert [list(segment.links.values()) for segment in chain] == [
        [chain[1].id],
        [chain[2].id],
        [],
    ]


def other_servers_parent():
    parent = ref_of(1, 3, [1, 2], 2)
    hand = Hand()
    (link,) = to_peers(hand.reserve([1, 2, 3], ancestors=(parent,), op=1))
    assert (link.parent, link.child) == (parent, hand.cache.slots.get(link.child).id)
    return hand, link, parent


def test_p7_publish_waits_for_the_link():
    hand, link, _ = other_servers_parent()
    assert hand.publish(op=1) == []
    assert hand.match([1, 2, 3]) == ()
    assert statuses(hand.peer(peer.LinkResult(link.serial, True, ()))) == ["published"]
    assert [ref.block_count for ref in hand.match([1, 2, 3])] == [2, 1]


def test_p7_a_parent_that_is_gone_ends_the_write():
    hand, link, _ = other_servers_parent()
    hand.publish(op=1)
    actions = hand.peer(peer.LinkResult(link.serial, False, ()))
    assert statuses(actions) == ["gone"]
    assert to_peers(actions) == [], "nothing was linked, so nothing is unlinked"
    assert hand.peer(peer.LinkResult(link.serial, True, ())) == [], "answered once"
    assert hand.match([1, 2, 3]) == ()


@pytest.mark.parametrize("end", ["abandon", "expire", "clear", "low"])
def test_p7_whatever_ends_a_write_unlinks_it(end):
    hand, link, parent = other_servers_parent()
    actions = {
        "abandon": lambda: hand.abandon(op=1),
        "expire": lambda: hand.tick(31),
        "clear": lambda: hand.clear(op=9, client=8),
        "low": lambda: hand.release(op=2),
    }[end]()
    assert to_peers(actions) == [peer.Unlink(link.serial, parent, link.child)]
    assert hand.peer(peer.LinkResult(link.serial, True, ())) == [], "a late answer changes nothing"
    assert hand.match([1, 2, 3]) == ()


def test_p7_links_are_a_set_of_serials():
    hand = Hand()
    (parent,) = hand.stored([1, 2])
    child = 1 << 48
    for serial in (11, 12, 11):
        (action,) = hand.peer(peer.Link(serial, parent, child))
        assert action.message == peer.LinkResult(serial, True, ())
    segment = hand.cache.find(parent)
    assert set(segment.links) == {11, 12}, "linked twice is linked once"
    hand.peer(peer.Unlink(11, parent, child))
    hand.peer(peer.Unlink(11, parent, child))
    assert set(segment.links) == {12}, "unlinked twice does not take another's link"
    hand.peer(peer.Unlink(12, parent, child))
    (dropped,) = replies(hand.drop(parent, op=30))
    assert dropped.count == 1


def test_p7_serials_are_never_used_again():
    hand = Hand(server=2)
    serials = []
    for op in range(1, 6):
        hand.reserve([op, op], op=op)
        serials += [segment.serial for segment in hand.cache.slots]
    assert len(set(serials)) == 5
    assert all(serial >> 48 == 2 for serial in serials), "unlike those of any other server"


def test_p7_gone_makes_the_client_match_again_once():
    cluster = Cluster(small_config(), server_nodes=(0,), client_nodes=(0, 0))
    actor, other = (Actor(cluster, client) for client in cluster.clients)
    prompt = list(range(16))
    other.store(prompt[:8])
    operation = actor.start_store(prompt)
    while not isinstance(operation.run_to(Send).message, m.ReserveRequest):
        operation.step()
    other.drop(other.match(prompt).refs[-1])
    assert operation.finish().block_count == 4, "matched again, and stored from the beginning"
    assert actor.load(prompt) == 4


def test_p7_gone_twice_is_the_result():
    cluster = Cluster(small_config(), server_nodes=(0,), client_nodes=(0,))
    actor = Actor(cluster, cluster.clients[0])
    sent = []

    def refuse(client, reply):
        if isinstance(reply, m.ReserveReply):
            sent.append(reply)
            return [m.ReserveReply(reply.server, reply.op, reply.attempt, "gone")]
        return [reply]

    cluster.on_reply = refuse
    assert actor.store(range(16)) == "gone"
    assert len(sent) == 2


# -- P8: dedup, sets in the index, records that are never mixed ---------------------------------


def test_p8_an_increment_whose_last_block_is_known_here_is_dedup_as_a_whole():
    hand = Hand()
    hand.reserve([1, 2, 3], op=1)
    hand.reserve([1, 2, 3], op=1, client=8)
    assert statuses(hand.publish(op=1)) == ["published"]
    assert statuses(hand.publish(op=1, client=8)) == ["dedup"]
    assert hand.states() == {"PUBLISHED": 2, "RESERVED": 2}, "the region waits for its writer"
    hand.release(op=2, client=8)
    assert hand.states() == {"PUBLISHED": 2}
    assert statuses(hand.reserve([1, 2, 3], op=5, client=9)) == ["dedup"], "before any byte moves"


def test_p8_dedup_unlinks():
    hand = Hand()
    (parent,) = hand.stored([1, 2])
    hand.reserve([1, 2, 3], ancestors=(parent,), op=20)
    hand.reserve([1, 2, 3], ancestors=(parent,), op=20, client=8)
    hand.publish(op=20)
    hand.publish(op=20, client=8)
    assert len(hand.cache.find(parent).links) == 1


def test_p8_a_longer_increment_over_known_blocks_is_published_whole():
    hand = Hand()
    hand.stored([1, 2, 3])
    op = hand.op()
    hand.reserve([1, 2, 3, 4], op=op)
    assert statuses(hand.publish(op=op)) == ["published"]
    assert hand.cache.counters()["block_count"] == 4
    assert hand.states() == {"PUBLISHED": 4}
    assert sum(ref.block_count for ref in hand.match([1, 2, 3, 4])) == 4
    assert sum(ref.block_count for ref in hand.match([1, 2, 3, 5])) == 3


def test_p8_a_record_is_the_path_of_its_own_links():
    """The client names an equal prefix on another path; the record follows the real parent."""
    hand = Hand()
    refs = hand.stored([1, 2, 3, 4])
    other = ref_of(1, 9, [1, 2], 2)
    op = 30
    hand.reserve([1, 2, 3, 4, 5], ancestors=(other, refs[1]), own=1, op=op)
    hand.publish(op=op)
    assert hand.match([1, 2, 3, 4, 5])[:2] == refs


def test_p8_base_is_the_lesser_of_match_and_verified_depth():
    cluster = Cluster(small_config(slots=20), server_nodes=(0,), client_nodes=(0,))
    actor = Actor(cluster, cluster.clients[0])
    prompt = np.arange(40)
    actor.store(prompt[:24])
    stored = actor.start_store(prompt, verified_blocks=3).finish()
    assert stored.block_count == 7
    record = actor.match(prompt).refs
    assert [ref.block_count for ref in record] == [2, 1, 2, 2, 2, 1]
    assert actor.load(prompt) == 10


# -- P9: a match that lacks an answer -----------------------------------------------------------


def test_p9_a_store_after_a_partial_match_is_skipped():
    cluster = Cluster(small_config(match_timeout_s=1.0, store_timeout_s=4.0))
    actor = Actor(cluster, cluster.clients[0])
    sent = []

    def server_1_is_silent(server, message):
        sent.append(message)
        return [] if server == 1 else [message]

    cluster.on_request = server_1_is_silent
    assert actor.store(range(16)) == "partial"
    assert not any(isinstance(message, m.ReserveRequest) for message in sent)
    cluster.on_request = None
    assert actor.store(range(16)) == "stored"


def test_p9_the_longest_record_wins_then_the_nearest():
    cluster = Cluster(small_config(placement="local"))
    one, two = (Actor(cluster, client) for client in cluster.clients)
    prompt = list(range(24))
    for actor in (one, two):
        operation = actor.start_store(prompt[:16])
        operation.run_to(Pack)
        actor.pending = operation
    for actor in (one, two):  # both reserved before either was visible: legal duplicates
        assert actor.pending.finish().reason == "stored"
    for actor, server in ((one, 0), (two, 1)):
        assert {ref.segment >> 48 for ref in actor.match(prompt).refs} == {server}
    one.store(prompt)
    assert two.known_blocks(prompt) == 6
