"""Rules P10-P13: leases, the clock, and memory that outlives a deadline."""

from __future__ import annotations

import numpy as np
import pytest
from hand import Hand, replies

from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol.effects import AwaitTokens, Send, StartGet, Unpack
from ptstore_mpi.protocol.load import LEASE_MARGIN
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import Actor, small_config
from ptstore_mpi.testing.oracle import BLANK

PROMPT = np.arange(32)


def pair(**settings):
    """Return a cluster where the first client has stored `PROMPT` on its own node."""
    cluster = Cluster(small_config(placement="local", **settings))
    near, far = (Actor(cluster, client) for client in cluster.clients)
    assert near.store(PROMPT) == "stored"
    return cluster, near, far


# -- P10: leases are a set ----------------------------------------------------------------------


def test_p10_two_operations_hold_two_leases():
    hand = Hand()
    (ref,) = hand.stored([1, 2], client=8)
    hand.acquire(ref, op=20)
    hand.acquire(ref, op=21, low=20)
    hand.acquire(ref, op=20, client=9)
    segment = hand.cache.find(ref)
    assert set(segment.leases) == {(7, 20), (7, 21), (9, 20)}
    hand.release(op=20)
    assert set(segment.leases) == {(7, 21), (9, 20)}


def test_p10_a_repeated_acquire_takes_the_later_expiry():
    hand = Hand()
    (ref,) = hand.stored([1, 2], client=8)
    hand.acquire(ref, op=20, remaining_s=10.0)
    hand.acquire(ref, op=20, attempt=1, remaining_s=4.0)
    segment = hand.cache.find(ref)
    assert segment.leases == {(7, 20): 110.0}
    hand.now += 1
    hand.acquire(ref, op=20, attempt=2, remaining_s=10.0)
    assert segment.leases == {(7, 20): 111.0}


def test_p10_releasing_twice_or_without_a_lease_is_nothing():
    hand = Hand()
    (ref,) = hand.stored([1, 2], client=8)
    hand.release(op=20)
    hand.acquire(ref, op=20)
    hand.acquire(ref, op=20, client=9)
    hand.release(op=20)
    hand.release(op=20)
    assert set(hand.cache.find(ref).leases) == {(9, 20)}


# -- P11: the remaining deadline, capped --------------------------------------------------------


def test_p11_a_lease_lasts_from_its_grant_and_the_cap_is_told():
    hand = Hand(lease_cap_s=5.0)
    (ref,) = hand.stored([1, 2], client=8)
    (short,) = replies(hand.acquire(ref, op=20, remaining_s=2.0))
    (capped,) = replies(hand.acquire(ref, op=21, remaining_s=60.0, low=20))
    assert (short.granted_s, capped.granted_s) == (2.0, 5.0)
    assert hand.cache.find(ref).leases == {(7, 20): 102.0, (7, 21): 105.0}


def test_p11_acquire_carries_what_is_left_of_the_deadline():
    cluster, near, _ = pair(load_timeout_s=8.0)
    seen = []
    cluster.on_request = lambda server, message: seen.append(message) or [message]
    refs = near.match(PROMPT).refs
    load = near.start_load(PROMPT, refs)
    cluster.advance(3.0)
    assert load.checked_blocks(near.oracle) == 8
    (acquire,) = [message for message in seen if isinstance(message, m.AcquireRequest)]
    assert acquire.remaining_s == pytest.approx(5.0)


# -- P12: the clock is checked after the last byte was copied -----------------------------------


@pytest.mark.parametrize(("share", "blocks"), [(1 - 2 * LEASE_MARGIN, 8), (1.0, 6)])
def test_p12_the_margin_of_the_lease_is_not_used(share, blocks):
    cluster, near, _ = pair(load_timeout_s=8.0)
    load = near.start_load(PROMPT, near.match(PROMPT).refs)
    for _ in range(4):
        load.operation.run_to(Unpack)
        load.operation.step()
    cluster.advance(8.0 * share - LEASE_MARGIN)
    assert load.checked_blocks(near.oracle) == blocks


def test_p12_the_base_is_the_attempt_that_was_answered():
    """The first attempt is lost; the second is granted in full from its own sending."""
    cluster, near, _ = pair(load_timeout_s=10.0, retry_s=4.0, lease_cap_s=5.0)
    cluster.on_request = lambda server, message: (
        [] if isinstance(message, m.AcquireRequest) and message.attempt == 0 else [message]
    )
    load = near.start_load(PROMPT, near.match(PROMPT).refs)
    assert load.checked_blocks(near.oracle) == 8
    assert load.operation.result.reason == "loaded"


def test_p12_no_answer_is_late():
    cluster, near, _ = pair(load_timeout_s=3.0)
    refs = near.match(PROMPT).refs
    cluster.on_request = lambda server, message: []
    before = cluster.now
    load = near.start_load(PROMPT, refs)
    assert load.checked_blocks(near.oracle) == 0
    assert load.operation.result.reason == "late"
    assert cluster.now == pytest.approx(before + 3.0)


def test_p12_a_late_part_ends_the_prefix_and_the_work():
    """What follows an untrusted part is worth nothing: the load stops at its deadline."""
    cluster, near, _ = pair(load_timeout_s=2.0)
    load = near.start_load(PROMPT, near.match(PROMPT).refs)
    copied = 0
    while load.operation.effect is not None:
        is_copy = isinstance(load.operation.effect, Unpack)
        load.operation.step()
        if is_copy:
            copied += 1
            cluster.advance(1.5)
    assert load.checked_blocks(near.oracle) == 2
    assert copied == 2, "one past the deadline, where its clock was checked"
    assert load.operation.result.reason == "late"


def test_p12_a_late_fetch_ends_the_work_too():
    cluster, near, far = pair(load_timeout_s=2.0, gets_in_flight_count=1)
    load = far.start_load(PROMPT, far.match(PROMPT).refs)
    started = 0
    while load.operation.effect is not None:
        is_get = isinstance(load.operation.effect, StartGet)
        load.operation.step()
        if is_get:
            started += 1
            cluster.advance(1.5)
    assert load.checked_blocks(far.oracle) <= 2
    assert started <= 3
    assert near.known_blocks(PROMPT) == 8


def test_a_store_past_its_deadline_stops_writing():
    cluster = Cluster(small_config(placement="local", store_timeout_s=2.0))
    actor = Actor(cluster, cluster.clients[0])
    operation = actor.start_store(PROMPT)
    packed = 0
    while operation.effect is not None:
        is_pack = type(operation.effect).__name__ == "Pack"
        operation.step()
        if is_pack:
            packed += 1
            cluster.advance(1.5)
    assert operation.result.block_count == 0
    assert operation.result.reason in ("late", "expired")
    assert packed <= 2, "the deadline had passed"


# -- P13: Gets land only in memory that the store owns ------------------------------------------


def test_p13_a_get_that_outlives_the_deadline_lands_in_staging_that_stays_lent():
    """Counterexample 2: the engine refills its buffer; the late Get must not land there."""
    _, _, far = pair(load_timeout_s=2.0)
    far.transport.hold_transfers = True
    load = far.start_load(PROMPT, far.match(PROMPT).refs)
    assert load.checked_blocks(far.oracle) == 0
    assert load.operation.result.reason == "late"
    in_flight = far.transport.in_flight_count
    assert in_flight == far.context.ledger.transfer_count > 0
    for array in load.out:
        array[:] = BLANK  # the engine computes into it again
    free = far.context.ledger._staging.free_bytes
    assert free < far.context.ledger.staging_bytes
    far.transport.land()
    assert all((array == BLANK).all() for array in load.out)
    far.transport.hold_transfers = False
    assert far.load(PROMPT) == 8, "the left-over transfers are taken note of"
    assert far.context.ledger.transfer_count == 0
    assert far.context.ledger._staging.free_bytes == far.context.ledger.staging_bytes


def test_p13_staging_in_use_is_not_lent_to_the_next_load():
    _, _, far = pair(load_timeout_s=2.0, staging_bytes=8192, get_bytes=4096)
    far.transport.hold_transfers = True
    far.start_load(PROMPT, far.match(PROMPT).refs).checked_blocks(far.oracle)
    assert far.context.ledger._staging.free_bytes == 0
    second = far.start_load(PROMPT, far.match(PROMPT).refs)
    second.operation.run_to(AwaitTokens)
    assert far.transport.in_flight_count == 2, "no Get could be started"
    far.transport.hold_transfers = False
    far.transport.land()
    assert second.checked_blocks(far.oracle) == 8


def test_p13_a_stopped_load_keeps_its_gets_and_its_operation():
    cluster, _, far = pair()
    far.transport.hold_transfers = True
    load = far.start_load(PROMPT, far.match(PROMPT).refs)
    load.operation.run_to(AwaitTokens)
    op = next(iter(far.context.ledger._open))
    load.operation.stop()
    seen = []
    cluster.on_request = lambda server, message: seen.append((server, message.low)) or [message]
    far.match(PROMPT)
    assert dict(seen)[0] == op, "a Get into server 0 is still in flight"
    assert dict(seen)[1] > op
    assert cluster.servers[0].cache.leased_bytes > 0
    far.transport.land()
    far.transport.hold_transfers = False
    assert far.load(PROMPT) == 8
    far.match(PROMPT)
    assert cluster.servers[0].cache.leased_bytes == 0


def test_counters_of_a_stopped_load_are_discarded_bytes():
    _, _, far = pair()
    load = far.start_load(PROMPT, far.match(PROMPT).refs)
    load.operation.run_to(StartGet)
    load.operation.step()
    load.operation.run_to(Send)
    load.operation.stop()
    counters = far.context.counters
    assert counters["rma_bytes"] == 8 * 88
    assert counters["discarded_bytes"] == 8 * 88
    far.load(PROMPT)
    assert counters["rma_bytes"] - counters["discarded_bytes"] == 8 * 88
