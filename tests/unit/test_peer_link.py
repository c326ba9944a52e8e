"""The resend layer between two servers, over a carrier that loses, doubles and reorders (P7)."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from ptstore_mpi.protocol.peer_link import PeerLink
from ptstore_mpi.protocol.peer_messages import PeerFrame, Prune

RESEND_S = 1.0


def numbers(messages):
    return [message.serial for message in messages]


def test_a_perfect_carrier_sends_nothing_twice():
    one, two = PeerLink(RESEND_S), PeerLink(RESEND_S)
    for serial in range(5):
        assert numbers(two.receive(one.send(Prune(serial, 1), 0.0))) == [serial]
    (word,) = two.tick(0.02)
    assert word == PeerFrame(0, 5, None)
    assert one.receive(word) == []
    assert one.is_quiet
    assert two.is_quiet
    assert one.tick(100.0) == two.tick(100.0) == []


def test_what_goes_back_confirms_what_came():
    one, two = PeerLink(RESEND_S), PeerLink(RESEND_S)
    two.receive(one.send(Prune(1, 1), 0.0))
    one.receive(two.send(Prune(2, 1), 0.0))
    assert one.unconfirmed_count == 0
    assert two.tick(0.02) == [], "no bare word is owed"


def test_a_lost_message_is_sent_again_ever_more_seldom():
    one = PeerLink(RESEND_S)
    one.send(Prune(1, 1), 0.0)
    sent = [now for now in range(1000) if one.tick(float(now))]
    gaps = [b - a for a, b in itertools.pairwise(sent)]
    assert sent[0] == 1
    assert gaps == [2, 4, 8, 16, 32] + [64] * (len(gaps) - 5)


def test_an_early_one_waits_for_those_before_it():
    one, two = PeerLink(RESEND_S), PeerLink(RESEND_S)
    frames = [one.send(Prune(serial, 1), 0.0) for serial in range(4)]
    assert two.receive(frames[2]) == []
    assert two.receive(frames[2]) == []
    assert numbers(two.receive(frames[0])) == [0]
    assert numbers(two.receive(frames[1])) == [1, 2]
    assert two.receive(frames[1]) == []
    assert numbers(two.receive(frames[3])) == [3]
    assert two.duplicate_count == 2


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from(["send", "tick"]), st.integers(0, 2)),
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_fifo_and_exactly_once_over_anything(steps, rng):
    """Whatever the carrier does, each side gets a prefix of what the other sent, and then all."""
    ends = PeerLink(RESEND_S), PeerLink(RESEND_S)
    sent: tuple[list[int], list[int]] = ([], [])
    got: tuple[list[int], list[int]] = ([], [])
    under_way: list[tuple[int, PeerFrame]] = []
    now = 0.0

    def put(side, frames, copies):
        under_way.extend((side, frame) for frame in frames for _ in range(copies))

    def arrive():
        side, frame = under_way.pop(rng.randrange(len(under_way)))
        got[1 - side].extend(numbers(ends[1 - side].receive(frame)))

    for left, what, copies in steps:
        side = 0 if left else 1
        now += rng.random() * 3
        if what == "send":
            sent[side].append(len(sent[side]))
            put(side, [ends[side].send(Prune(sent[side][-1], 1), now)], copies)
        else:
            put(side, ends[side].tick(now), copies)
        if under_way and rng.random() < 0.7:
            arrive()
        assert got[0] == sent[1][: len(got[0])]
        assert got[1] == sent[0][: len(got[1])]
    for _ in range(200):  # the carrier behaves from now on
        now += 100.0
        for side in (0, 1):
            put(side, ends[side].tick(now), 1)
        while under_way:
            arrive()
        if ends[0].is_quiet and ends[1].is_quiet:
            break
    assert got == (sent[1], sent[0])
    assert ends[0].is_quiet
    assert ends[1].is_quiet
