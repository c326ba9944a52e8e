"""Rules P1-P4: keys, idempotence, the watermark, and content identity."""

from __future__ import annotations

import math

import pytest
from hand import Hand, cancelled, hashes_of, posted, replies, statuses

from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import peer_messages as peer
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import Actor, small_config
from ptstore_mpi.types import SegmentRef

# -- P1: every request carries (client, op, attempt, low) ---------------------------------------


def test_p1_a_retry_keeps_its_operation_and_raises_the_attempt():
    cluster = Cluster(small_config(retry_s=0.5, match_timeout_s=2.0))
    actor = Actor(cluster, cluster.clients[0])
    seen = []
    cluster.on_request = lambda server, message: seen.append((server, message)) or []
    found = actor.match([1, 2, 3, 4])
    assert found.partial
    for server in (0, 1):
        mine = [message for to, message in seen if to == server]
        assert [message.attempt for message in mine] == [0, 1, 2, 3]
        assert len({message.op for message in mine}) == 1
        assert {message.client for message in mine} == {actor.client}
    actor.match([1, 2, 3, 4])
    operations = [message.op for _, message in seen]
    assert operations == sorted(operations)
    assert operations[-1] > operations[0], "another operation has another number"


def test_p1_only_servers_that_are_silent_are_asked_again():
    cluster = Cluster(small_config(retry_s=0.5))
    actor = Actor(cluster, cluster.clients[0])
    seen = []

    def lose_first_to_server_1(server, message):
        seen.append((server, message.attempt))
        return [] if (server, message.attempt) == (1, 0) else [message]

    cluster.on_request = lose_first_to_server_1
    assert not actor.match([1, 2, 3, 4]).partial
    assert seen == [(0, 0), (1, 0), (1, 1)]


# -- P2: one result per key ---------------------------------------------------------------------


def test_p2_reserve_is_answered_again_but_not_done_again():
    hand = Hand()
    first = hand.reserve([1, 2, 3], op=1, mapped=False)
    assert statuses(first) == ["reserved"]
    assert len(posted(first)) == 1
    again = hand.reserve([1, 2, 3], op=1, attempt=1, mapped=False)
    assert posted(again) == [], "the receives are posted once"
    (one,), (two,) = replies(first), replies(again)
    assert (one.offsets, one.attempt, two.attempt) == (two.offsets, 0, 1)
    assert hand.states() == {"RESERVED": 2}


@pytest.mark.parametrize("outcome", ["published", "dedup", "full", "gone", "expired", "abandoned"])
def test_p2_every_outcome_is_kept_until_low_passes_it(outcome):
    hand = Hand(slots=2)
    if outcome == "dedup":
        hand.stored([1, 2], client=8)
    op = 1
    ancestors = (SegmentRef(0, 1, b"x" * 16),) if outcome == "gone" else ()
    blocks = [1, 2, 3, 4, 5, 6, 7, 8] if outcome == "full" else [1, 2]
    hand.reserve(blocks, ancestors=ancestors, own=len(blocks), op=op)
    if outcome == "expired":
        hand.tick(31)
    if outcome == "abandoned":
        hand.abandon(op=op)
    assert statuses(hand.publish(op=op)) == [outcome]
    counts = dict(hand.handler.counters())
    for attempt in (1, 2):
        assert statuses(hand.publish(op=op, attempt=attempt)) == [outcome]
    after = hand.handler.counters()
    assert {k: v for k, v in after.items() if k != "request_count"} == {
        k: v for k, v in counts.items() if k != "request_count"
    }
    hand.release(op=op + 1)  # low passes
    assert hand.publish(op=op) == [], "late duplicates of a finished operation are ignored"
    assert hand.reserve(blocks, op=op) == []


def test_p2_at_most_k_unconfirmed_regions():
    hand = Hand(unconfirmed_count=2)
    for op, expected in [(1, "reserved"), (2, "reserved"), (3, "unconfirmed")]:
        assert statuses(hand.reserve([op], op=op, low=1)) == [expected]
    assert statuses(hand.reserve([9], op=1, client=8)) == ["reserved"], "K is per client"
    hand.publish(op=1, low=1)
    assert statuses(hand.reserve([4], op=4, low=1)) == ["reserved"], "published is confirmed"
    hand.tick(31)
    assert statuses(hand.reserve([5], op=5, low=1)) == ["unconfirmed"], "quarantined is not"
    assert statuses(hand.reserve([5], op=6, low=5)) == ["reserved"], "low confirms"


def test_p2_drop_and_clear_answer_a_repetition_without_acting_again():
    hand = Hand()
    (ref,) = hand.stored([1, 2])
    (first,) = replies(hand.drop(ref, op=5))
    hand.stored([1, 2], client=8)
    (again,) = replies(hand.drop(ref, op=5, attempt=1))
    assert (first.count, again.count) == (1, 1)
    assert hand.states() == {"PUBLISHED": 1}, "what was stored meanwhile is another segment"
    (first,) = replies(hand.clear(op=6))
    hand.stored([1, 2], client=8)
    (again,) = replies(hand.clear(op=6, attempt=1))
    assert (first.count, again.count, again.attempt) == (1, 1, 1)
    assert hand.states() == {"PUBLISHED": 1}


# -- P3: only the watermark (or goodbye) frees what a client may still write --------------------


def test_p3_low_frees_reserved_and_quarantined_regions_and_leases():
    hand = Hand()
    (ref,) = hand.stored([1, 2], client=8)
    hand.reserve([3, 4], op=1)
    hand.reserve([5, 6], op=2, low=1)
    hand.abandon(op=2, low=1)
    hand.acquire(ref, op=3, low=1)
    assert hand.states() == {"PUBLISHED": 1, "RESERVED": 2}
    assert hand.cache.leased_bytes == 4096
    hand.release(op=9, low=3)
    assert hand.states() == {"PUBLISHED": 1}
    assert hand.cache.leased_bytes == 4096, "op 3 is not below low"
    hand.release(op=9, low=4)
    assert hand.cache.leased_bytes == 0


def test_p3_low_never_frees_what_is_published():
    hand = Hand()
    hand.stored([1, 2], client=7)
    hand.release(op=99)
    hand.send(m.ByeRequest, op=100)
    assert hand.states() == {"PUBLISHED": 1}
    assert len(hand.match([1, 2])) == 1


def test_p3_low_never_goes_down():
    hand = Hand()
    hand.release(op=5, low=5)
    hand.reserve([1], op=5, low=2)
    assert hand.states() == {"RESERVED": 1}
    assert hand.reserve([2], op=4, low=1) == []
    assert hand.states() == {"RESERVED": 1}


def test_p3_time_frees_nothing_that_may_still_be_written():
    hand = Hand()
    hand.reserve([1, 2], op=1)
    hand.reserve([3, 4], op=2, low=1, mapped=False)
    hand.tick(1e9)
    assert hand.states() == {"RESERVED": 2}
    assert hand.cache.reserved_bytes == 2 * 4096
    assert statuses(hand.publish(op=1, low=1)) == ["expired"]


def test_p3_open_receives_are_cancelled_and_the_region_freed_only_when_they_have_ended():
    hand = Hand()
    hand.reserve([1, 2], op=1, mapped=False)
    assert cancelled(hand.release(op=2)) == [(7, 1)]
    assert hand.states() == {"RESERVED": 1}, "MPI may still write into it"
    assert cancelled(hand.release(op=3)) == [], "cancelled once"
    hand.handler.settled(7, 1)
    assert hand.is_empty


def test_p3_a_receive_that_completes_while_it_is_cancelled_frees_too():
    hand = Hand()
    hand.reserve([1, 2], op=1, mapped=False)
    hand.release(op=2)
    hand.handler.received(7, 1, hand.now)
    assert hand.is_empty
    assert hand.match([1, 2]) == ()


def test_p3_goodbye_is_low_infinity():
    hand = Hand()
    (ref,) = hand.stored([1, 2], client=8)
    hand.reserve([3, 4], op=1)
    hand.reserve([5, 6], op=2, low=1)
    hand.acquire(ref, op=3, low=1)
    hand.send(m.ByeRequest, op=4, low=1)
    assert hand.states() == {"PUBLISHED": 1}
    assert hand.cache.leased_bytes == 0
    assert hand.handler.gone_clients == {7}
    assert hand.reserve([3, 4], op=10**9) == []
    assert math.isinf(hand.handler._low[7])


# -- P4: id and content -------------------------------------------------------------------------


def wrong_refs(ref):
    return [
        SegmentRef(ref.segment, ref.block_count, b"x" * 16),
        SegmentRef(ref.segment, ref.block_count - 1, ref.last_hash),
        SegmentRef(ref.segment, ref.block_count + 1, ref.last_hash),
        SegmentRef(ref.segment, 0, ref.last_hash),
        SegmentRef(ref.segment + (1 << 20), ref.block_count, ref.last_hash),
        SegmentRef(ref.segment | (1 << 48), ref.block_count, ref.last_hash),
    ]


def test_p4_acquire_drop_and_link_compare_both():
    hand = Hand()
    (ref,) = hand.stored([1, 2])
    for number, wrong in enumerate(wrong_refs(ref)):
        (acquired,) = replies(hand.acquire(wrong, op=10 + 2 * number))
        assert acquired.grants == (), wrong
        (dropped,) = replies(hand.drop(wrong, op=11 + 2 * number))
        assert dropped.count == 0, wrong
        (action,) = hand.peer(peer.Link(5, wrong, 1 << 48))
        assert action.message.linked is False, wrong
    assert hand.states() == {"PUBLISHED": 1}
    part = SegmentRef(ref.segment, 1, bytes(hashes_of(1)[0]))
    (acquired,) = replies(hand.acquire(part, op=900))
    assert len(acquired.grants) == 1, "a prefix of a segment is named by its own last hash"


def test_p4_a_parent_of_other_content_is_gone():
    hand = Hand()
    (ref,) = hand.stored([1, 2])
    for op, wrong in enumerate(wrong_refs(ref)[:4], 10):
        assert statuses(hand.reserve([1, 2, 3], ancestors=(wrong,), own=1, op=op)) == ["gone"]


def test_p4_grants_stop_at_the_first_that_is_gone():
    hand = Hand()
    first, second, third = hand.stored([1, 2, 3, 4, 5])
    bad = SegmentRef(second.segment, 2, b"x" * 16)
    (reply,) = replies(hand.acquire(first, bad, third, op=50))
    assert len(reply.grants) == 1


def far_writer(**settings):
    """Return a client whose prompts all go to the server of another node."""
    cluster = Cluster(
        small_config(slots=30, placement="random", store_timeout_s=2.0, **settings),
        server_nodes=(0, 1),
        client_nodes=(0,),
    )
    actor = Actor(cluster, cluster.clients[0])
    prompts = [[start, 1, 2, 3] for start in range(200)]
    far = [p for p in prompts if actor.hashes(p)[0, 0] % 2 == 1]
    return cluster, actor, far


def test_p3_a_write_that_ended_late_is_settled_by_whatever_the_client_does_next():
    cluster, actor, prompts = far_writer()
    actor.transport.hold_transfers = True
    assert actor.store(prompts[0]) == "late"
    assert cluster.servers[1].cache.reserved_bytes == 4096
    actor.transport.land()
    for _ in range(2):
        actor.known_blocks(prompts[1])
    assert cluster.servers[1].cache.reserved_bytes == 0


def test_p3_late_writes_do_not_make_every_later_store_unconfirmed():
    """A client that never hits anything, and therefore never loads, must recover too."""
    _, actor, prompts = far_writer(unconfirmed_count=3)
    actor.transport.hold_transfers = True
    for prompt in prompts[:3]:
        assert actor.store(prompt) == "late"
    actor.transport.hold_transfers = False
    actor.transport.land()
    reasons = [actor.store(prompt) for prompt in prompts[3:6]]
    assert reasons[-1] == "stored", reasons
