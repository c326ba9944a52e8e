"""P14 and P15 over a file tier: what leaves memory, what comes back, what is dropped."""

from __future__ import annotations

import errno
import logging

import pytest
from hand import replies, statuses, to_peers
from tiered_hand import SEGMENT_BYTES, TieredHand

from ptstore_mpi.cache.segment import SegmentState
from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import peer_messages as peer
from ptstore_mpi.testing.tier_faults import Fault


@pytest.fixture
def make(tmp_path):
    made = []

    def make(**options):
        made.append(TieredHand(tmp_path, **options))
        return made[-1]

    yield make
    for hand in made:
        hand.handler.close_tier()
    assert not list(tmp_path.iterdir()), "files were left"


def acquired(actions):
    (reply,) = [r for r in replies(actions) if isinstance(r, m.AcquireReply)]
    return reply


# -- demotion ------------------------------------------------------------------------------------


def test_everything_is_found_that_memory_has_no_room_for(make):
    hand = make()
    prompts = [(i, i + 1) for i in range(0, 40, 2)]
    for prompt in prompts:
        hand.stored(prompt)
    assert all(hand.match(prompt) for prompt in prompts)
    assert hand.counter("evicted_count") == 0
    assert hand.counter("ssd_demoted_count") >= 12
    for prompt in prompts:
        (ref,) = hand.match(prompt)
        op = hand.op()
        actions = hand.acquire(ref, op=op) + hand.work()
        assert len(acquired(actions).grants) == 1
        assert hand.is_right(ref)
        hand.release(op=op)


def test_memory_is_freed_only_when_the_write_has_ended_and_nobody_reads(make):
    """P14, CE 14: leases are looked at when the memory is freed, not when the write begins."""
    hand = make(slots=3)
    refs = [hand.stored((i, i), works=False)[0] for i in (1, 2)]
    assert statuses(hand.reserve((3, 3, 4, 4), op=hand.op())) == []
    assert hand.writes, "nothing is being written"
    ref = next(ref for ref in refs if hand.segment(ref).move == "write")
    lent = hand.segment(ref)
    hand.acquire(ref, op=hand.op(), remaining_s=5.0)
    hand.work()
    assert lent.in_memory
    assert lent.slot is not None
    assert hand.is_right(ref)


def test_a_reserve_waits_for_writes_and_is_answered_once_there_is_room(make):
    hand = make(slots=3)
    for i in (1, 2):
        hand.stored((i, i), works=False)
    op = hand.op()
    assert statuses(hand.reserve((3, 3, 4, 4), op=op)) == []
    assert statuses(hand.work()) == ["reserved"]
    assert statuses(hand.reserve((3, 3, 4, 4), op=op, attempt=1)) == ["reserved"]


def test_a_reserve_that_waits_too_long_is_full(make):
    hand = make(slots=3)
    for i in (1, 2):
        hand.stored((i, i), works=False)
    op = hand.op()
    assert statuses(hand.reserve((3, 3, 4, 4), op=op, remaining_s=2.0)) == []
    assert statuses(hand.tick(0.9)) == []
    assert statuses(hand.tick(0.2)) == ["full"]
    assert statuses(hand.reserve((3, 3, 4, 4), op=op, attempt=1)) == ["full"]


def test_a_linked_segment_leaves_memory_and_is_not_dropped(make):
    hand = make(slots=4)
    (parent,) = hand.stored((1, 2))
    hand.peer(peer.Link(5 << 48 | 1, parent, 1 << 48))
    for i in range(10, 30, 2):
        hand.stored((i, i + 1))
    assert not hand.segment(parent).in_memory
    assert hand.match((1, 2)) == (parent,)


def test_what_came_back_is_written_only_once(make):
    hand = make(slots=4)
    (ref,) = hand.demoted(1, 2)
    op = hand.op()
    hand.acquire(ref, op=op)
    hand.work()
    hand.release(op=op)
    written = hand.counter("ssd_write_done_count")
    others = hand.counter("ssd_demoted_count")
    filler = 50
    while hand.segment(ref).in_memory:
        filler += 2
        hand.stored((filler, filler + 1))
    stored_count = (filler - 50) // 2
    assert hand.counter("ssd_write_done_count") - written <= stored_count
    assert hand.counter("ssd_demoted_count") > others


def test_a_removed_segment_keeps_its_memory_until_its_write_has_ended(make):
    hand = make(slots=3)
    for i in (1, 2):
        hand.stored((i, i), works=False)
    hand.reserve((3, 3, 4, 4), op=hand.op())
    assert hand.writes
    hand.clear(op=hand.op())
    assert hand.states().get("ZOMBIE") == len(hand.writes)
    hand.work()
    assert "ZOMBIE" not in hand.states()
    assert hand.counter("ssd_slot_count") == 0


def test_only_what_was_read_is_written_where_that_is_asked_for(make):
    hand = make(reused_only=True)
    (used,) = hand.stored((1, 2))
    op = hand.op()
    hand.acquire(used, op=op)
    hand.release(op=op)
    for i in range(10, 60, 2):
        hand.stored((i, i + 1))
    assert hand.match((1, 2)) == (used,)
    assert not hand.segment(used).in_memory
    assert hand.counter("ssd_write_done_count") == 1
    assert hand.counter("evicted_count") > 10


# -- promotion -----------------------------------------------------------------------------------


def test_an_acquire_waits_for_the_read_and_its_lease_counts_from_then(make):
    """P11, CE 8: the time of a promotion does not eat the lease."""
    hand = make()
    (ref,) = hand.demoted(1, 2)
    op = hand.op()
    assert hand.acquire(ref, op=op, remaining_s=10.0) == []
    hand.now += 6.0
    reply = acquired(hand.work())
    assert reply.granted_s == 10.0
    (grant,) = reply.grants
    assert grant.from_disk
    segment = hand.segment(ref)
    assert grant.offset == segment.offset
    assert segment.leases[7, op] == hand.now + 10.0
    assert hand.is_right(ref)
    again = acquired(hand.acquire(ref, op=hand.op()))
    assert not again.grants[0].from_disk
    assert hand.counter("ssd_useful_bytes") == SEGMENT_BYTES
    assert hand.counter("ssd_promoted_count") == 1


def test_a_repeated_acquire_is_answered_once_with_its_newest_attempt(make):
    hand = make()
    (ref,) = hand.demoted(1, 2)
    op = hand.op()
    for attempt in (0, 2, 1):
        assert hand.acquire(ref, op=op, attempt=attempt) == []
    assert len(hand.reads) == 1
    assert acquired(hand.work()).attempt == 2


def test_two_acquires_share_a_read(make):
    hand = make()
    (ref,) = hand.demoted(1, 2)
    ops = [hand.op(), hand.op()]
    for op in ops:
        hand.acquire(ref, op=op, client=op)
    assert len(hand.reads) == 1
    answers = replies(hand.work())
    assert [reply.op for reply in answers] == ops
    assert all(reply.grants[0].from_disk for reply in answers)
    assert hand.counter("ssd_useful_bytes") == SEGMENT_BYTES


def test_the_watermark_ends_a_waiting_acquire(make):
    hand = make()
    (ref,) = hand.demoted(1, 2)
    op = hand.op()
    hand.acquire(ref, op=op)
    later = hand.op()
    hand.release(op=later)
    assert replies(hand.work()) == []
    assert hand.handler.lower.promotion.pending_count == 0
    assert hand.counter("leased_bytes") == 0


def test_no_room_gives_the_prefix_so_far(make):
    """P14, CE 22: nobody waits for room who holds leases."""
    hand = make(slots=4)
    (first,) = hand.demoted(1, 2, crowded=True)
    (second,) = hand.demoted(3, 4, crowded=True)
    held = [s for s in hand.cache.published() if s.in_memory]
    for segment in held:
        hand.cache.lease(segment, (9, 1), hand.now + 99.0)
    actions = hand.acquire(first, second, op=hand.op())
    reply = acquired(actions + hand.work())
    assert len(reply.grants) == hand.cache.room.free_bytes // SEGMENT_BYTES == 0


def test_an_acquire_waits_for_room_while_it_holds_nothing(make):
    hand = make(slots=4)
    refs = hand.demoted(1, 2, 3, 4, 5, 6, crowded=True)
    op = hand.op()
    assert hand.acquire(*refs, op=op) == []
    assert hand.writes
    assert hand.counter("leased_bytes") == 0
    assert hand.acquire(*refs, op=op, attempt=1) == []
    reply = acquired(hand.work())
    assert (len(reply.grants), reply.attempt) == (3, 1)


def test_an_acquire_that_waited_for_room_in_vain_gives_the_prefix_so_far(make):
    hand = make(slots=4)
    refs = hand.demoted(1, 2, 3, 4, 5, 6, crowded=True)
    op = hand.op()
    assert hand.acquire(*refs, op=op, remaining_s=4.0) == []
    assert hand.tick(1.9) == []
    actions = hand.tick(0.2)
    while hand.reads:
        hand.workers.run_one(hand.workers.waiting.index(hand.reads[0]))
        actions += hand.poll()
    assert 0 < len(acquired(actions).grants) < 3
    assert hand.writes, "the test is about writes that take long"


def test_a_promotion_never_takes_the_room_of_what_it_needs_itself(make):
    hand = make(slots=4)
    refs = hand.demoted(1, 2, 3, 4, 5, 6, crowded=True)
    op = hand.op()
    reply = acquired(hand.acquire(*refs, op=op) + hand.work())
    assert len(reply.grants) == 3
    for ref, grant in zip(refs, reply.grants, strict=False):
        assert hand.segment(ref).offset == grant.offset
        assert hand.is_right(ref)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("bent", 4096), "corrupt"),
        (Fault("bent", 3), "corrupt"),
        (Fault("error", errno.EIO), "io_error"),
        (Fault("stuck"), "short"),
    ],
)
def test_what_cannot_be_read_is_lost_with_all_that_hangs_on_it(make, fault, reason):
    """P15, CE 9: or a later match would find what no load can bring."""
    hand = make(slots=4)
    first, second = hand.demoted(1, 2, 3, 4)
    child = (5 << 48) + 1
    hand.peer(peer.Link(child, second, 1 << 48))
    hand.files.planned["read"].append(fault)
    actions = hand.acquire(first, second, op=hand.op()) + hand.work()
    assert acquired(actions).grants == ()
    assert peer.Prune(child, 1 << 48) in to_peers(actions)
    assert hand.match((1, 2, 3, 4)) == ()
    assert hand.counter(f"ssd_read_{reason}_count") == 1
    assert hand.counter("lost_count") == 1
    assert hand.counter("pruned_count") == 1


def test_a_failed_read_gives_the_prefix_before_it(make):
    hand = make(slots=4)
    first, second = hand.demoted(1, 2, 3, 4)
    hand.files.planned["read"] += [None, Fault("bent", 5000)]
    reply = acquired(hand.acquire(first, second, op=hand.op()) + hand.work())
    assert len(reply.grants) == 1
    assert hand.match((1, 2, 3, 4)) == (first,)


def test_reads_beyond_the_queue_of_the_tier_come_in_turn(make):
    hand = make(slots=8, queue_depth=1)
    refs = hand.demoted(1, 2, 3, 4, 5, 6)
    hand.acquire(*refs, op=hand.op())
    assert len(hand.reads) == 1
    reply = acquired(hand.work())
    assert [grant.from_disk for grant in reply.grants] == [True] * 3


def test_what_is_cleared_while_it_waits_for_its_read_ends_the_prefix(make):
    hand = make(slots=8, queue_depth=1)
    refs = hand.demoted(1, 2, 3, 4)
    op = hand.op()
    hand.acquire(*refs, op=op, client=8)
    hand.clear(op=hand.op())
    assert acquired(hand.work()).grants == ()
    hand.release(op=op, client=8)
    assert hand.states() == {}
    assert hand.counter("metadata_bytes") == 0


# -- full tiers ----------------------------------------------------------------------------------


def test_a_full_tier_drops_its_coldest_leaf(make):
    hand = make(slots=4, slabs=1)
    prompts = [(i, i + 1) for i in range(0, 60, 2)]
    for prompt in prompts:
        hand.stored(prompt)
    known = [bool(hand.match(prompt)) for prompt in prompts]
    assert known == sorted(known), "not the oldest were dropped"
    assert sum(known) > 8, "the tier is not used"
    assert hand.counter("ssd_file_bytes") <= hand.counter("ssd_capacity_bytes")
    assert hand.counter("evicted_count") == known.count(False)


def test_a_failing_disk_stops_demotion_and_drops_leaves_with_one_warning(make, caplog):
    hand = make(slots=4)
    (kept,) = hand.demoted(1, 2)
    hand.files.planned["write"].extend(Fault("error", errno.ENOSPC) for _ in range(9))
    with caplog.at_level(logging.WARNING):
        for i in range(2000, 2040, 2):
            hand.stored((i, i + 1))
    assert len(caplog.records) == 1
    assert hand.counter("evicted_count") > 10
    assert hand.match((1, 2)) == (kept,), "what the tier has is not worth less for that"
    reply = acquired(hand.acquire(kept, op=hand.op()) + hand.work())
    assert len(reply.grants) == 1


def test_without_eviction_a_full_tier_refuses(make):
    hand = make(slots=4, slabs=1, eviction=None)
    stored = []
    for i in range(0, 60, 2):
        op = hand.op()
        (status,) = statuses(hand.reserve((i, i + 1), op=op) + hand.work())
        if status == "full":
            break
        hand.publish(op=op)
        stored.append((i, i + 1))
    else:
        raise AssertionError("never full")
    assert len(stored) > 8
    assert all(hand.match(prompt) for prompt in stored)


def test_states_of_a_segment(make):
    """What is demoted stays published, and is dropped like any other."""
    hand = make(slots=4)
    (ref,) = hand.demoted(1, 2)
    segment = hand.segment(ref)
    assert segment.state is SegmentState.PUBLISHED
    (reply,) = replies(hand.drop(ref, op=hand.op()))
    assert reply.count == 1
    assert hand.match((1, 2)) == ()
    assert hand.segment(ref) is None


@pytest.mark.parametrize(("slabs", "length"), [(1, 2), (3, 6)])
def test_what_is_in_a_full_tier_comes_back(make, slabs, length):
    """An acquire waits while memory is being freed, as a store does, and is whole then."""
    hand = make(slots=4, slabs=slabs)
    prompts = [tuple(range(block, block + length)) for block in range(0, 60, length)]
    for prompt in prompts:
        hand.stored(prompt)
        hand.work()
    granted = []
    for prompt in reversed(prompts):
        refs = hand.match(prompt)
        if refs and not hand.segment(refs[0]).in_memory:
            op = hand.op()
            actions = hand.acquire(*refs, op=op) + hand.work() + hand.tick(1.0) + hand.work()
            granted += [len(reply.grants) for reply in replies(actions)]
            hand.release(op=op)
            hand.work()
    assert len(granted) >= 3
    assert set(granted) == {length // 2}


def test_a_deferred_acquire_that_meets_a_demotion_is_answered_once(make):
    hand = make(slots=4, redirect_bytes=4096)
    (ref,) = hand.stored((1, 2))

    def acquire(client, keeper):
        wishes = (ref,), 10.0, False, None, (keeper,), True
        return replies(hand.send(m.AcquireRequest, *wishes, op=1, client=client))

    assert len(acquire(1, 5)) == 1
    assert acquire(2, 6) == [], "a copy is on its way"
    hand.handler.cache.release((1, 1), hand.now)
    number = 1000
    while hand.segment(ref).in_memory:
        hand.stored((number, number + 1))
        hand.work()
        number += 2
    answers = []
    for seconds in (0.1, 0.1, 0.1, 5.0):
        answers += replies(hand.tick(seconds)) + replies(hand.work())
    assert len(answers) == 1
