"""The counterexamples of the protocol that concern owned segments, shortest traces, as tests.

Numbers are those of the protocol's list. Every id is used again at once (no generation bits).
Numbers 2, 13 and 17 are with the rules they belong to (P13, P10 and P3).
"""

from __future__ import annotations

import numpy as np
import pytest
from hand import Hand, cancelled, ref_of, replies, statuses, to_peers

from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import peer_messages as peer
from ptstore_mpi.protocol.effects import AwaitTokens, Pack, Send, StartWrite, Unpack
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import Actor, small_config
from ptstore_mpi.testing.checks import check_links, check_reachable, check_space

PROMPT = np.arange(8)


def one_server(*, clients=2, **settings):
    cluster = Cluster(
        small_config(**{"slots": 3, **settings}), server_nodes=(0,), client_nodes=(0,) * clients
    )
    return cluster, *(Actor(cluster, client) for client in cluster.clients)


def to_message(operation, kind):
    """Carry an operation to the point where a message of this kind is to be sent."""
    while not isinstance(operation.run_to(Send).message, kind):
        operation.step()


# -- 1: the clock is checked before the local copy ----------------------------------------------


def test_1_a_reader_that_stalls_before_its_copy_does_not_trust_it():
    cluster, reader, other = one_server(load_timeout_s=5.0)
    reader.store(PROMPT)
    load = reader.start_load(PROMPT, reader.match(PROMPT).refs)
    load.operation.run_to(Unpack)
    cluster.advance(6.0)
    other.clear()
    for start in range(100, 400, 100):
        assert other.store(PROMPT + start) == "stored"
    load.operation.step()
    wrong = [
        not np.array_equal(a, b)
        for a, b in zip(load.out, reader.oracle.arrays(PROMPT), strict=True)
    ]
    assert any(wrong), "the slot was not used again: the trace is not the counterexample"
    assert load.checked_blocks(reader.oracle) == 0
    assert load.operation.result.reason == "late"


# -- 3: published before it is linked -----------------------------------------------------------


def test_3_a_parent_dropped_before_its_link_leaves_no_dangling_child():
    cluster = Cluster(small_config(placement="local"))
    one, two = (Actor(cluster, client) for client in cluster.clients)
    one.store(PROMPT)
    cluster.hold_peers = True
    operation = two.start_store(np.arange(16))
    to_message(operation, m.PublishRequest)
    operation.step()
    assert not two.transport.replies, "the answer waits"
    assert one.drop(one.match(PROMPT).refs[-1]) is True
    cluster.hold_peers = False
    cluster.deliver_peers()
    assert operation.finish().block_count == 4, "gone, matched again, stored from the beginning"
    check_reachable(cluster)
    check_links(cluster)
    assert two.load(np.arange(16)) == 4


# -- 4: the reserve reply is lost ---------------------------------------------------------------


@pytest.mark.parametrize("mapped", [True, False])
def test_4_a_region_its_writer_does_not_know_of_is_freed_by_low(mapped):
    hand = Hand()
    hand.reserve([1, 2], op=1, mapped=mapped)  # its reply never arrives
    hand.tick(1000)
    assert hand.states() == {"RESERVED": 1}
    actions = hand.abandon(op=1, low=2)
    if not mapped:
        assert cancelled(actions) == [(7, 1)]
        hand.handler.settled(7, 1)
    assert hand.is_empty


def test_4_the_client_gives_up_and_tells_the_owner():
    cluster, actor, _ = one_server(store_timeout_s=1.0)
    cluster.on_reply = lambda client, reply: [] if isinstance(reply, m.ReserveReply) else [reply]
    assert actor.store(PROMPT) == "late"
    counters = cluster.servers[0].counters()
    assert counters["reserved_bytes"] == 0
    assert counters["free_bytes"] == counters["capacity_bytes"]
    cluster.on_reply = None
    assert actor.store(PROMPT) == "stored"


# -- 11: increments that share blocks -----------------------------------------------------------


def test_11_dropping_one_of_two_equal_blocks_does_not_hide_the_other():
    hand = Hand()
    hand.reserve([1, 2, 3], op=1)
    hand.reserve([1, 2, 4], op=1, client=8)
    hand.publish(op=1)
    hand.publish(op=1, client=8)
    assert hand.cache.counters()["block_count"] == 4
    first = hand.match([1, 2, 3])
    for op, ref in enumerate(reversed(first), 10):
        (reply,) = replies(hand.drop(ref, op=op))
        assert reply.count == 1
    left = hand.match([1, 2, 4])
    assert sum(ref.block_count for ref in left) == 3
    assert sum(ref.block_count for ref in hand.match([1, 2, 3])) == 2
    (reply,) = replies(hand.acquire(*left, op=20))
    assert len(reply.grants) == 2


# -- 12: the reply of attempt 1 timed from attempt 2 --------------------------------------------


def test_12_an_old_reply_counts_from_its_own_attempt():
    cluster, reader, other = one_server(load_timeout_s=20.0, lease_cap_s=5.0, retry_s=4.0)
    reader.store(PROMPT)
    kept = []

    def first_reply_is_slow(client, reply):
        if isinstance(reply, m.AcquireReply) and reply.attempt == 0:
            kept.append(reply)
            return []
        return [reply]

    cluster.on_reply = first_reply_is_slow
    cluster.on_request = lambda server, message: (
        [] if isinstance(message, m.AcquireRequest) and message.attempt else [message]
    )
    load = reader.start_load(PROMPT, reader.match(PROMPT).refs)
    while not kept:
        load.operation.step()
    load.operation.step()  # silence until the retry, at 4 s
    to_message(load.operation, m.AcquireRequest)
    load.operation.step()
    reader.transport.replies.extend(kept)  # granted for 5 s from attempt 0
    load.operation.run_to(Unpack)
    cluster.advance(1.5)
    other.clear()
    for start in range(100, 400, 100):
        other.store(PROMPT + start)
    assert load.checked_blocks(reader.oracle) == 0


# -- 15: the same id, other content -------------------------------------------------------------


def test_15_a_held_match_never_brings_other_content():
    _, reader, other = one_server()
    reader.store(PROMPT)
    refs = reader.match(PROMPT).refs
    other.clear()
    other.store(PROMPT + 100)
    assert other.match(PROMPT + 100).refs[0].segment == refs[0].segment, "the id came back"
    load = reader.start_load(PROMPT, refs)
    assert load.checked_blocks(reader.oracle) == 0
    assert load.operation.result.reason == "gone"


def test_15_a_link_to_a_reused_id_is_refused():
    hand = Hand()
    (old,) = hand.stored([1, 2])
    hand.drop(old, op=20)
    (new,) = hand.stored([8, 9])
    assert new.segment == old.segment
    (action,) = hand.peer(peer.Link(5, old, 1 << 48))
    assert action.message == peer.LinkResult(5, False, ())
    assert statuses(hand.reserve([1, 2, 3], ancestors=(old,), op=30)) == ["gone"]
    assert hand.cache.find(new).links == {}


def test_15_unlink_and_prune_of_a_reused_id_touch_nobody_else():
    hand = Hand()
    (old,) = hand.stored([1, 2])
    serial = hand.cache.find(old).serial
    hand.drop(old, op=20)
    (new,) = hand.stored([8, 9])
    hand.stored([8, 9, 10], ancestors=(new,))
    hand.peer(peer.Unlink(5, old, 1 << 48))
    hand.peer(peer.Prune(serial, old.segment))
    assert len(hand.match([8, 9, 10])) == 2
    assert len(hand.cache.find(new).links) == 1


def test_15_an_equal_parent_on_another_path_makes_no_hole():
    """The parent came back under its id and content, but hangs on another ancestor now.

    The client matched before all that; its record would name the ancestor that is gone.
    """
    cluster = Cluster(
        small_config(placement="local"), server_nodes=(0, 1, 2), client_nodes=(0, 1, 2)
    )
    zero, one, two = (Actor(cluster, client) for client in cluster.clients)
    prompt = np.arange(24)
    zero.store(prompt[:8])
    one.store(prompt[:16])
    operation = zero.start_store(prompt)
    to_message(operation, m.ReserveRequest)
    old = operation.effect.message.ancestors
    for ref in reversed(old):
        assert one.drop(ref) is True
    two.store(prompt[:8])
    one.store(prompt[:16])
    assert one.match(prompt[:16]).refs[1] == old[1], "the same id and content"
    assert operation.finish().reason == "stored"
    check_reachable(cluster)
    depth = zero.known_blocks(prompt)
    assert zero.load(prompt) == depth, "a match skips no missing segment"


# -- 16: a late abandon -------------------------------------------------------------------------


def test_16_a_late_abandon_of_a_published_region_is_nothing():
    hand = Hand()
    hand.reserve([1, 2], op=1)
    hand.publish(op=1)
    assert hand.abandon(op=1) == []
    assert hand.abandon(op=1, low=2) == []
    assert len(hand.match([1, 2])) == 1
    assert hand.states() == {"PUBLISHED": 1}


def test_16_a_client_that_missed_the_answer_of_its_publish():
    cluster, actor, _ = one_server(store_timeout_s=1.0)
    cluster.on_reply = lambda client, reply: [] if isinstance(reply, m.WriteReply) else [reply]
    assert actor.store(PROMPT) == "late"
    assert actor.load(PROMPT) == 2, "it was published all the same"
    check_space(cluster)


# -- 17, 18: writes in flight, links over a bad channel -----------------------------------------


def test_17_a_write_that_is_still_in_flight_keeps_its_region():
    cluster = Cluster(small_config(placement="random", store_timeout_s=2.0), client_nodes=(0,))
    actor = Actor(cluster, cluster.clients[0])
    prompt = next(
        PROMPT + start
        for start in range(100)
        if int.from_bytes(actor.hashes(PROMPT + start)[0, :8].tobytes(), "little") % 2 == 1
    )
    actor.transport.hold_transfers = True
    operation = actor.start_store(prompt)
    operation.run_to(StartWrite)
    operation.step()
    operation.run_to(AwaitTokens)
    assert operation.finish().reason == "late"
    actor.flush()
    far = cluster.servers[1]
    assert far.counters()["reserved_bytes"] == 4096
    actor.known_blocks(prompt)
    assert far.counters()["reserved_bytes"] == 4096, "low must not pass a write in flight"
    actor.transport.land()
    actor.start_store(prompt + 50).finish()
    actor.transport.hold_transfers = False
    actor.leave()
    assert far.counters()["reserved_bytes"] == 0
    assert actor.cluster.servers[1].cache.published() == []


def test_17_a_stalled_writer_on_the_own_node_writes_into_its_quarantine():
    cluster, writer, other = one_server(store_timeout_s=5.0, slots=3)
    operation = writer.start_store(PROMPT)
    operation.run_to(Pack)
    cluster.advance(10.0)
    assert other.store(PROMPT + 100) == "stored"
    assert other.store(PROMPT + 200) == "stored"
    assert other.store(PROMPT + 300) == "full", "quarantined bytes are not given away"
    operation.step()
    assert operation.finish().reason in ("expired", "late")
    assert other.load(PROMPT + 100) == 2
    assert other.load(PROMPT + 200) == 2
    writer.flush()
    writer.known_blocks(PROMPT)
    assert other.store(PROMPT + 300) == "stored"


def test_18_a_doubled_unlink_does_not_free_a_parent_that_has_a_child():
    hand = Hand()
    (parent,) = hand.stored([1, 2])
    hand.peer(peer.Link(11, parent, 1 << 48), sender=1)
    hand.peer(peer.Link(12, parent, 2 << 48), sender=2)
    hand.peer(peer.Unlink(11, parent, 1 << 48), sender=1)
    hand.peer(peer.Unlink(11, parent, 1 << 48), sender=1)
    (reply,) = replies(hand.drop(parent, op=20))
    assert reply.count == 0


def test_18_link_and_unlink_of_a_given_up_child_leave_nothing():
    hand = Hand()
    parent = ref_of(1, 3, [1, 2], 2)
    link, unlink = (
        to_peers(actions)[0]
        for actions in (hand.reserve([1, 2, 3], ancestors=(parent,), op=1), hand.abandon(op=1))
    )
    owner = Hand(server=1)
    (stored,) = owner.stored([1, 2])
    owner.peer(peer.Link(link.serial, stored, link.child), sender=0)
    owner.peer(peer.Unlink(unlink.serial, stored, unlink.child), sender=0)
    assert owner.cache.find(stored).links == {}


# -- a reply of the reserve that comes again during the publish ---------------------------------


@pytest.mark.parametrize("attempt", [0, 1])
def test_an_old_reserve_reply_is_not_taken_for_that_of_the_publish(attempt):
    """A server that was asleep answers both attempts of a reserve: reserve and publish share op."""
    cluster, actor, _ = one_server()

    def doubled(client, reply):
        if isinstance(reply, m.ReserveReply):
            return [
                reply,
                m.ReserveReply(reply.server, reply.op, attempt, "reserved", reply.offsets),
            ]
        return [reply]

    cluster.on_reply = doubled
    assert actor.store(PROMPT) == "stored"
    assert actor.load(PROMPT) == 2
