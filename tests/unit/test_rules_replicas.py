"""P17 and P18 on one server, message by message, and on a cluster where a step is held."""

from __future__ import annotations

import numpy as np
import pytest
from hand import NAMESPACE, TENSOR_BYTES, Hand, hashes_of, replies

from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol.effects import AwaitTokens, Send, StartGet
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import Actor, small_config
from ptstore_mpi.types import SegmentRef, pack_segment_id

FILLER, OTHER, THIRD = 7, 8, 9


def ref_of(*blocks, slot=0, count=None):
    """Return a segment of server 1 that ends with the last of these blocks."""
    count = len(blocks) if count is None else count
    return SegmentRef(pack_segment_id(1, slot, 0), count, hashes_of(*blocks)[-1].tobytes())


def wish(hand, *refs, client=FILLER, op=1, may_fill=True, remaining_s=10.0, **key):
    """Ask for replicas; return the places."""
    asked = m.ReplicaWish(tuple(refs), NAMESPACE, TENSOR_BYTES, may_fill)
    actions = hand.send(
        m.AcquireRequest, (), remaining_s, False, asked, client=client, op=op, **key
    )
    (reply,) = replies(actions)
    return reply.places


def statuses(places):
    return [place.status for place in places]


def fill(hand, *blocks, slot=0, client=FILLER, op=1):
    """Take note that a slot is filled; return the replies that this caused."""
    ref = ref_of(*blocks, slot=slot)
    hashes = hashes_of(*blocks).tobytes()
    return replies(
        hand.send(m.FilledRequest, (ref,), hashes, bytes(4 * len(blocks)), client=client, op=op)
    )


def wait_for(hand, *refs, client=OTHER, op=1, **key):
    return replies(hand.send(m.AwaitRequest, tuple(refs), 10.0, False, client=client, op=op, **key))


def test_the_first_fills_the_second_waits_and_is_leased_in_the_step_that_publishes():
    """CE 7: a replica cannot be dropped between its publishing and its waiter's lease."""
    hand = Hand()
    ref = ref_of(1, 2)
    assert statuses(wish(hand, ref)) == ["fill"]
    assert statuses(wish(hand, ref, client=OTHER)) == ["wait"]
    assert statuses(wish(hand, ref, client=THIRD)) == ["wait"]
    assert wait_for(hand, ref) == []
    (answer,) = fill(hand, 1, 2)
    assert statuses(answer.places) == ["here"]
    (replica,) = hand.replicas
    assert set(replica.leases) == {(OTHER, 1), (THIRD, 1)}
    assert hand.replicas.victim() is None
    hand.release(op=1, client=OTHER)
    assert hand.replicas.victim() is None, "the third has not even asked yet"
    (late,) = wait_for(hand, ref, client=THIRD)
    assert statuses(late.places) == ["here"]
    hand.release(op=1, client=THIRD)
    assert hand.replicas.victim() is replica


def test_a_wish_is_handled_once_however_often_it_comes():
    """P2: the same slot again, and no second one."""
    hand = Hand()
    (first,) = wish(hand, ref_of(1, 2))
    assert wish(hand, ref_of(1, 2), attempt=1) == (first,)
    hand.tick(10.0)  # the fill is given up: a late repetition must not open another
    assert statuses(wish(hand, ref_of(1, 2), attempt=2)) == ["none"]


@pytest.mark.parametrize("end", ["release", "low", "time", "bye"])
def test_a_failed_fill_wakes_who_waits_and_keeps_its_slot_until_the_watermark(end):
    """CE 5: nobody is the filler for ever; P3: time frees nothing that may still be written."""
    hand = Hand()
    ref = ref_of(1, 2)
    (slot,) = wish(hand, ref)
    wish(hand, ref, client=OTHER)
    wait_for(hand, ref)
    actions = {
        "release": lambda: hand.release(op=1, client=FILLER),
        "low": lambda: hand.release(op=5, low=2, client=FILLER),
        "time": lambda: hand.tick(10.0),
        "bye": lambda: hand.send(m.ByeRequest, op=2, client=FILLER),
    }[end]()
    (answer,) = replies(actions)
    assert statuses(answer.places) == ["none"]
    is_free = end in ("low", "bye")
    assert (not list(hand.replicas)) == is_free
    assert fill(hand, 1, 2) == []
    assert hand.replicas.find(ref) is None, "a late fill is refused"
    (anew,) = wish(hand, ref, client=OTHER, op=2)
    assert anew.status == "fill"
    assert (anew.grant.offset == slot.grant.offset) == is_free
    hand.release(op=9, low=9, client=FILLER)
    hand.release(op=9, low=9, client=OTHER)
    assert hand.is_empty


def test_a_replica_answers_for_its_own_blocks_only():
    """P4: id and hash, of any block that it holds; never more blocks than that."""
    hand = Hand()
    wish(hand, ref_of(1, 2))
    fill(hand, 1, 2)
    ask = {"client": OTHER, "may_fill": False}
    assert statuses(wish(hand, ref_of(1, 2), **ask)) == ["here"]
    assert statuses(wish(hand, ref_of(1), **ask)) == ["here"], "its first block alone"
    assert statuses(wish(hand, ref_of(1, 3), **ask)) == ["none"], "the slot's later content"
    assert statuses(wish(hand, ref_of(1, 2, 3), **ask)) == ["none"], "it is longer by now"
    assert statuses(wish(hand, ref_of(1, 2, slot=1), **ask)) == ["none"]
    assert statuses(wish(hand, ref_of(1, 2, 3), client=OTHER, op=2)) == ["fill"]
    fill(hand, 1, 2, 3, client=OTHER, op=2)
    assert len(list(hand.replicas)) == 1, "the longer one takes the shorter one's place"


def test_a_holder_grants_from_complete_replicas_only():
    """CE 20: not while it fills, and leased like anything else."""
    hand = Hand()
    ref = ref_of(1, 2)
    wish(hand, ref)
    assert statuses(wish(hand, ref, client=OTHER, may_fill=False)) == ["none"]
    fill(hand, 1, 2)
    (place,) = wish(hand, ref, client=OTHER, op=2, may_fill=False)
    assert place.grant.hashes == hashes_of(1, 2).tobytes(), "for a replica of its asker"
    (replica,) = hand.replicas
    hand.clear(op=3, client=THIRD)
    assert hand.replicas.find(ref) is None
    assert list(hand.replicas) == [replica], "its bytes stay while the lease is valid"
    hand.tick(10.0)
    assert not list(hand.replicas)


def test_admission_by_second_hit():
    hand = Hand(admission="second_hit")
    assert statuses(wish(hand, ref_of(1, 2), ref_of(3, 4, slot=1))) == ["none", "none"]
    assert statuses(wish(hand, ref_of(1, 2), client=OTHER)) == ["fill"]


def test_replicas_give_way_to_owned_segments_down_to_their_lower_limit():
    hand = Hand(slots=4, least_bytes=5000)
    for slot in range(2):
        wish(hand, ref_of(slot, 9, slot=slot), op=slot + 1)
        fill(hand, slot, 9, slot=slot, op=slot + 1)
    assert hand.replicas.used_bytes > 2 * 5000
    hand.stored([1, 2, 3, 4, 5, 6])
    assert [replica.ref.segment for replica in hand.replicas] == [ref_of(9, slot=1).segment]
    (reply,) = replies(hand.reserve([7, 8], op=50))
    assert reply.status == "full", "the lower limit stays"


def test_replicas_never_pass_their_upper_limit():
    hand = Hand(slots=8, most_bytes=11_000)
    for slot in range(4):
        assert statuses(wish(hand, ref_of(slot, 9, slot=slot), op=slot + 1)) == ["fill"]
        fill(hand, slot, 9, slot=slot, op=slot + 1)
        assert hand.replicas.used_bytes <= 11_000
    assert hand.replicas.dropped_count == 2
    assert statuses(wish(hand, *[ref_of(5, s, slot=s) for s in (5, 6, 7)], op=9)) == [
        "fill", "fill", "none",
    ]  # fmt: skip


def test_a_bad_replica_goes_and_its_owner_is_left_alone():
    hand = Hand()
    wish(hand, ref_of(1, 2))
    fill(hand, 1, 2)
    hand.send(m.LostRequest, ref_of(1, 2), op=5, client=OTHER)
    assert len(list(hand.replicas)) == 1, "it looked for itself: nothing is wrong"
    (replica,) = hand.replicas
    hand.bad.add(replica.offset)
    hand.send(m.LostRequest, ref_of(1, 2), op=6, client=OTHER)
    assert not list(hand.replicas)
    assert hand.handler.removal.lost_count == 0


@pytest.mark.parametrize("how", ["low", "bye"])
def test_who_waited_and_has_left_is_not_leased_to(how):
    hand = Hand()
    ref = ref_of(1, 2)
    wish(hand, ref)
    wish(hand, ref, client=OTHER)
    if how == "low":
        hand.release(op=9, low=9, client=OTHER)
    else:
        hand.send(m.ByeRequest, op=2, client=OTHER)
    fill(hand, 1, 2)
    (replica,) = hand.replicas
    assert not replica.leases


def test_a_wish_that_cannot_fit_drops_nothing():
    hand = Hand()
    for slot in range(2):
        wish(hand, ref_of(slot, 9, slot=slot), op=slot + 1)
        fill(hand, slot, 9, slot=slot, op=slot + 1)
    hand.stored(list(range(100, 112)))
    assert statuses(wish(hand, ref_of(*range(200, 210), slot=7), op=20)) == ["none"]
    assert len(list(hand.replicas)) == 2


def test_a_wish_below_the_lower_limit_evicts_nothing_in_vain():
    hand = Hand(eviction="lru", least_bytes=8 * 5300)
    for blocks in ([1, 2], [3, 4], [5, 6]):
        hand.stored(blocks)
    hand.reserve(list(range(100, 110)), op=50, client=3)  # under way: it cannot go
    assert statuses(wish(hand, ref_of(*range(200, 210), slot=7), op=60)) == ["none"]
    assert len(hand.cache.published()) == 3


def test_a_clear_reaches_what_is_being_filled():
    hand = Hand()
    wish(hand, ref_of(1, 2))
    hand.clear(op=3, client=THIRD)
    fill(hand, 1, 2)
    assert hand.replicas.find(ref_of(1, 2)) is None


# -- fan-out ---------------------------------------------------------------------------------------


def acquire(hand, ref, *, client, keeper=-1, may_redirect=True, stale=(), **key):
    """Ask for a segment; return the replies to anybody."""
    keepers = (keeper,) if keeper >= 0 else ()
    actions = hand.send(
        m.AcquireRequest, (ref,), 10.0, False, None, keepers, may_redirect, stale,
        client=client, op=1, **key,
    )  # fmt: skip
    return replies(actions)


def test_readers_of_a_busy_owner_are_sent_to_the_copy_that_is_least_busy():
    """P18: a hot segment spreads like a tree; who comes back is served (CE 19)."""
    hand = Hand(redirect_bytes=4096)
    (ref,) = hand.stored([1, 2])
    assert acquire(hand, ref, client=1, keeper=5)[0].redirects == ()
    assert acquire(hand, ref, client=2, keeper=6) == [], "busy, and a copy is on its way"
    assert acquire(hand, ref, client=3, keeper=7) == []
    to_second, to_third = replies(hand.release(op=1, client=1))
    assert to_second.redirects == (), "the owner is idle again"
    assert to_third.redirects == ((0, 5),)
    assert acquire(hand, ref, client=4) == [], "both are busy, more copies come"
    (back,) = acquire(hand, ref, client=3, attempt=1, may_redirect=False, stale=(5,))
    assert (back.redirects, back.grants[0].segment_blocks) == ((), 2)
    fan_out = hand.handler.reads.fan_out
    assert fan_out.stale_hint_count == 1
    lent_bytes = fan_out.lent_bytes
    acquire(hand, ref, client=3, attempt=2, may_redirect=False, stale=(5,))
    assert fan_out.lent_bytes == lent_bytes, "the same, asked again"
    (late,) = replies(hand.tick(2.5))
    assert late.redirects == (), "nobody is kept waiting for long"
    for client in (2, 3, 4):
        hand.release(op=3, low=3, client=client)
    assert hand.handler.reads.fan_out.reading_bytes == 0
    assert acquire(hand, ref, client=8)[0].redirects == ()


def test_without_a_copy_on_its_way_nobody_waits():
    hand = Hand(redirect_bytes=4096)
    (ref,) = hand.stored([1, 2])
    for client in range(4):
        assert acquire(hand, ref, client=client)[0].redirects == ()


def test_a_reader_that_vanished_is_forgotten_with_its_lease():
    hand = Hand(redirect_bytes=4096)
    (ref,) = hand.stored([1, 2])
    acquire(hand, ref, client=1, keeper=5)
    hand.release(op=1, client=1)
    acquire(hand, ref, client=2)
    acquire(hand, ref, client=3)  # at the holder
    hand.tick(10.0)
    assert acquire(hand, ref, client=4)[0].redirects == ()
    assert acquire(hand, ref, client=6)[0].redirects == ((0, 5),)


# -- loads -----------------------------------------------------------------------------------------


TOKENS = np.arange(1, 34)


def cluster_of(**settings):
    config = small_config(slots=16, placement="local", replica_admission="always", **settings)
    return Cluster(config, server_nodes=(0, 1, 2, 3), client_nodes=(0, 1, 1, 2, 3))


def test_two_clients_of_a_node_fetch_once():
    """Single flight: the second has the first one's bytes, without a Get of its own."""
    cluster = cluster_of()
    owner, first, second, *_ = (Actor(cluster, client) for client in cluster.clients)
    assert owner.store(TOKENS) == "stored"
    fetching = first.start_load(TOKENS, first.match(TOKENS).refs)
    first.transport.hold_transfers = True
    fetching.operation.run_to(AwaitTokens)
    waiting = second.start_load(TOKENS, second.match(TOKENS).refs)
    sent = waiting.operation.run_to(Send)
    while not isinstance(sent.message, m.AwaitRequest):
        waiting.operation.step()
        sent = waiting.operation.run_to(Send)
    waiting.operation.step()
    first.transport.hold_transfers = False
    first.transport.land()
    assert fetching.checked_blocks(first.oracle) == 8
    assert waiting.checked_blocks(second.oracle) == 8
    assert waiting.operation.result.blocks["replica"] == 8
    assert second.transport.started_count == 0


def test_who_waits_in_vain_fetches_by_itself():
    cluster = cluster_of()
    owner, first, second, *_ = (Actor(cluster, client) for client in cluster.clients)
    owner.store(TOKENS)
    stalled = first.start_load(TOKENS, first.match(TOKENS).refs)
    first.transport.hold_transfers = True
    stalled.operation.run_to(AwaitTokens)
    load = second.start_load(TOKENS, second.match(TOKENS).refs)
    began_s = cluster.now
    assert load.checked_blocks(second.oracle) == 8
    assert load.operation.result.blocks["remote"] == 8
    assert cluster.now - began_s <= cluster.config.load_timeout_s / 2 + 0.1
    stalled.operation.stop()
    first.leave()
    assert all(r.state.name == "COMPLETE" for r in cluster.servers[1].replicas.replicas)


def test_a_stalled_filler_does_not_publish():
    """CE 21: bytes read past the lease never become a replica."""
    cluster = cluster_of()
    owner, first, *_ = (Actor(cluster, client) for client in cluster.clients)
    owner.store(TOKENS)
    load = first.start_load(TOKENS, first.match(TOKENS).refs)
    load.operation.run_to(StartGet)
    cluster.advance(cluster.config.lease_cap_s)
    assert load.operation.finish().block_count == 0
    assert cluster.servers[1].replicas.replicas.filled_count == 0


def test_a_redirected_load_reads_from_the_holder():
    """The owner has lent more than the holder."""
    cluster = cluster_of(redirect_bytes=1)
    owner, first, *_, far = (Actor(cluster, client) for client in cluster.clients)
    owner.store(TOKENS)
    assert first.load(TOKENS) == 8
    for segment in cluster.servers[0].cache.published():
        assert list(segment.holders) == [1]
    load = far.start_load(TOKENS, far.match(TOKENS).refs)
    assert load.operation.run_to(StartGet).server == 1
    assert load.checked_blocks(far.oracle) == 8
    assert load.operation.result.blocks["remote"] == 8
    assert cluster.servers[0].reads.fan_out.redirect_count > 0
    assert cluster.servers[3].replicas.replicas.filled_count > 0, "and keeps one itself"


def test_a_redirect_in_vain_falls_back_to_the_owner():
    cluster = cluster_of(redirect_bytes=1)
    owner, first, *_, far = (Actor(cluster, client) for client in cluster.clients)
    owner.store(TOKENS)
    assert first.load(TOKENS) == 8
    holder = cluster.servers[1].replicas
    for replica in list(holder.replicas):
        holder.replicas.drop(replica, cluster.now)
    load = far.start_load(TOKENS, far.match(TOKENS).refs)
    assert load.operation.run_to(StartGet).server == 0
    assert load.checked_blocks(far.oracle) == 8
    assert cluster.servers[0].reads.fan_out.stale_hint_count > 0
