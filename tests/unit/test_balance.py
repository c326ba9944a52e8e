"""The adaptive share for replicas: where it moves, where it stays, and what it says about that."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hand import NAMESPACE, SLOT_BYTES, TENSOR_BYTES, Hand, hashes_of, replies

import ptstore_mpi as pt
from ptstore_mpi.cache.balance import Balance
from ptstore_mpi.cache.ghosts import ReplicaGhosts, SegmentGhosts
from ptstore_mpi.cache.sides import Oldest
from ptstore_mpi.cache.times import GB_BYTES, LONGEST_S, Times
from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import wire
from ptstore_mpi.protocol.times import ClientTimes
from ptstore_mpi.types import SegmentRef, pack_segment_id

DEAR_REMOTE = Times(local_s=1.0, remote_s=100.0, recompute_s=101.0)
DEAR_PREFILL = Times(local_s=1.0, remote_s=2.0, recompute_s=100.0)
SLOTS = 32


def foreign(number):
    """Return a segment of server 1 and the hashes of its two blocks."""
    hashes = hashes_of(10_000 + 2 * number, 10_001 + 2 * number)
    return SegmentRef(pack_segment_id(1, number, 0), 2, hashes[-1].tobytes()), hashes


class Job(Hand):
    """A full server whose clients ask for its own prompts and for replicas of others'."""

    def __init__(self, times, *, least=0.0, most=0.75):
        capacity = -(-SLOTS * SLOT_BYTES // 4096) * 4096
        shares = {"least_bytes": int(least * capacity), "most_bytes": int(most * capacity)}
        super().__init__(
            slots=SLOTS, eviction="lru", balance_of=lambda kept: Balance(kept, times), **shares
        )

    @property
    def balance(self):
        return self.handler.balance

    def fetch(self, number):
        """Load a foreign segment as a client of this node does; return what became of its wish."""
        ref, hashes = foreign(number)
        op = self.op()
        asked = m.ReplicaWish((ref,), NAMESPACE, TENSOR_BYTES, True)
        (reply,) = replies(self.send(m.AcquireRequest, (), 10.0, False, asked, op=op))
        (place,) = reply.places
        if place.status == "fill":
            self.send(m.FilledRequest, (ref,), hashes.tobytes(), bytes(8), op=op)
        self.release(op=op)
        return place.status

    def ask(self, number):
        """Answer a prompt of two blocks: match, load, or compute and store; a second passes."""
        self.now += 1.0
        blocks = (2 * number, 2 * number + 1)
        refs = self.match(blocks)
        if refs:
            op = self.op()
            self.acquire(*refs, op=op)
            self.release(op=op)
        else:
            self.stored(blocks)
        return bool(refs)


def play(job, *, replicas, prompts, count=1500):
    """Ask for foreign segments and own prompts, both by chance: few often, many now and then."""
    rng = np.random.default_rng(3)
    for _ in range(count):
        job.fetch(int(rng.exponential(replicas)))
        job.ask(int(rng.exponential(prompts)))


def share_of(job):
    return job.replicas.least_bytes / job.cache.room.capacity_bytes


def test_the_share_rises_where_replicas_save_more():
    job = Job(DEAR_REMOTE)
    play(job, replicas=12, prompts=6)
    assert share_of(job) > 0.5
    assert job.balance.move_count >= 8
    assert job.replicas.used_bytes > SLOTS * 4096 // 2, "owned segments made room up to it"


def test_the_share_falls_where_owned_segments_save_more():
    job = Job(DEAR_PREFILL)
    job.replicas.least_bytes = job.replicas.most_bytes
    play(job, replicas=12, prompts=12)
    assert share_of(job) < 0.25
    assert job.replicas.used_bytes < SLOTS * 4096 // 3, "owned segments pushed them down to it"


@pytest.mark.parametrize(("times", "end"), [(DEAR_REMOTE, 0.5), (DEAR_PREFILL, 0.25)])
def test_the_share_never_leaves_its_limits(times, end):
    job = Job(times, least=0.25, most=0.5)
    play(job, replicas=12, prompts=12)
    assert share_of(job) == pytest.approx(end, abs=0.001)
    assert all(0.249 <= decision.share <= 0.5 for decision in job.balance.decisions)


@pytest.mark.parametrize(
    "times",
    [
        Times(),  # nothing was measured
        Times(local_s=1.0, remote_s=100.0),  # no engine said what a prefill takes
        Times(local_s=5.0, remote_s=5.0, recompute_s=5.0),  # nothing is to be gained
    ],
)
def test_the_share_stays_where_nothing_is_known_or_to_be_gained(times):
    job = Job(times)
    play(job, replicas=12, prompts=6, count=300)
    assert (job.replicas.least_bytes, job.balance.move_count) == (0, 0)
    assert job.balance.decision_count > 8


def test_the_share_does_not_move_on_noise():
    """A few that come back by chance, of hundreds that come once, are no reason."""
    job = Job(DEAR_REMOTE)
    for number in range(1500):
        job.fetch(1000 + number)
        job.ask(1000 + number)
        if number % 100 == 50:
            job.fetch(1000 + number - 2)
    assert job.balance.decision_count > 100
    assert job.balance.move_count == 0


def test_a_decision_is_logged_with_its_reasons_and_the_last_256_are_kept():
    job = Job(DEAR_REMOTE)
    play(job, replicas=40, prompts=40, count=3000)
    decisions = list(job.balance.decisions)
    assert len(decisions) == 256 < job.balance.decision_count
    (reply,) = replies(job.send(m.StatsRequest, True, op=job.op(), client=99))
    assert wire.decode_reply(wire.encode(reply)).decisions == tuple(decisions)
    (plain,) = replies(job.send(m.StatsRequest, op=job.op(), client=99))
    assert plain.decisions == ()
    assert plain.counters["balance_move_count"] == job.balance.move_count
    assert plain.counters["balance_remote_us"] == 100_000_000
    assert plain.counters["balance_share_ppm"] == round(1e6 * share_of(job))
    assert decisions[-1].share == share_of(job)
    assert decisions[-1].recompute_s == 101.0


def test_a_fixed_share_follows_nothing():
    hand = Hand(slots=SLOTS, eviction="lru")
    assert (hand.cache.watch, hand.replicas.watch, hand.handler.balance) == (None, None, None)
    assert not any(name.startswith("balance") for name in hand.handler.counters())


# -- times -----------------------------------------------------------------------------------


def test_measured_times_reach_the_server_with_a_release_and_assumed_ones_win():
    job = Job(Times(local_s=7.0))
    job.send(m.ReleaseRequest, (1.0, 2.0, 0.0, 4.0), op=job.op())
    assert job.balance.times == Times(7.0, 2.0, 0.0, 4.0)
    for _ in range(100):
        job.send(m.ReleaseRequest, (0.0, 3.0, 0.0, 0.0), op=job.op())
    assert job.balance.times == (7.0, pytest.approx(3.0, abs=1e-3), 0.0, 4.0)


@pytest.mark.parametrize(
    "times", [(1.0,), (1.0,) * 5, (-1.0, 1.0, 1.0, 1.0), (float("nan"),) * 4, (2 * LONGEST_S,) * 4]
)
def test_bent_times_are_no_message(times):
    body = msgspec.msgpack.encode(["ReleaseRequest", 7, 1, 0, 1, times])
    good = msgspec.msgpack.encode(["ReleaseRequest", 7, 1, 0, 1, (1.0,) * 4])
    assert wire.decode_request(wire._crc(good) + good).times == (1.0,) * 4
    with pytest.raises(msgspec.DecodeError):
        wire.decode_request(wire._crc(body) + body)


def test_a_client_shares_a_mixed_load_out():
    times = ClientTimes()
    times.loaded({"remote": 10, "owned": 10}, 1.0)  # which of the two it was, nobody knows
    assert times.times == Times()
    times.loaded({"owned": 5, "replica": 5}, 10 / GB_BYTES)
    times.loaded({"remote": 10, "owned": 10}, 40 / GB_BYTES)
    assert times.times == pytest.approx(Times(local_s=1.0, remote_s=3.0))
    times.loaded({"remote": 10, "owned": 100}, 1 / GB_BYTES)  # less than the rest takes: no time
    times.loaded({}, 1.0)
    assert times.times == pytest.approx(Times(local_s=1.0, remote_s=3.0))
    times.prefilled(1, 1e300)
    assert times.times.recompute_s == LONGEST_S


LAYOUT = pt.KVLayout((pt.TensorSpec("kv", 64),), 16)
ADAPTIVE = pt.Config(memory_bytes=1 << 20, replica_share="adaptive")


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_client_measures_its_loads_and_hears_of_prefills(adaptive):
    config = ADAPTIVE if adaptive else pt.Config(memory_bytes=1 << 20)

    def main(store):
        space = store.namespace("m", LAYOUT)
        space.store(range(32), [np.arange(128, dtype=np.uint8)])
        space.note_prefill(32, 0.25)
        space.load(space.match(range(33)), [np.zeros(128, np.uint8)])
        return store.stats(), store.server_stats()[0], store.balance()

    stats, server, decisions = pt.run(main, config)
    assert decisions == {0: []}
    if not adaptive:
        assert "times_per_gb" not in stats
        return
    times = Times(**stats["times_per_gb"])
    assert times.recompute_s == min(0.25 / 128 * GB_BYTES, LONGEST_S)
    assert times.local_s > 0 == times.remote_s
    assert server["balance_local_us"] == pytest.approx(1e6 * times.local_s, abs=1)


@pytest.mark.parametrize(
    ("tokens", "seconds", "error"),
    [
        (1.5, 1.0, TypeError),
        (1, "much", TypeError),
        (-1, 1.0, ValueError),
        (1 << 60, 1.0, ValueError),
        (1, float("nan"), ValueError),
        (1, -1.0, ValueError),
    ],
)
def test_a_prefill_that_is_none_is_refused(tokens, seconds, error):
    def main(store):
        with pytest.raises(error, match="got"):
            store.namespace("m", LAYOUT).note_prefill(tokens, seconds)

    pt.run(main, ADAPTIVE)


# -- lists -----------------------------------------------------------------------------------


def test_ghosts_hold_a_step_and_are_counted_once():
    ghosts = ReplicaGhosts(100)
    refs = [foreign(number)[0] for number in range(3)]
    for ref in refs:
        ghosts.add(ref, 40)
    assert [ghosts.take(ref) for ref in refs] == [False, True, True]
    assert len(ghosts) == 0
    segments = SegmentGhosts(100)
    hashes = hashes_of(1, 2, 3, 4, 5, 6)
    for serial in (3, 2, 1):  # what continues a segment leaves before it
        part = hashes[2 * serial - 2 : 2 * serial]
        segments.add(serial, part, 40, block_bytes=20, on_disk=serial == 1)
    assert segments.take(hashes[:3], 0) == (20, 40), "a block of the second, the first on disk"
    assert segments.take(hashes, 0) == (0, 0)
    segments.add(4, hashes[:2], 40, block_bytes=20, on_disk=False)
    assert segments.take(hashes, 2) == (0, 0), "another copy is here"


def test_the_oldest_are_those_used_least_lately():
    oldest = Oldest(20)
    for key in range(5):
        oldest.touch(key, 10)
    assert oldest.take(0)
    assert not oldest.take(0), "once"
    oldest.touch(0, 10)
    assert [oldest.take(key) for key in range(5)] == [False, True, True, False, False]
    oldest.leave(1)
    assert oldest.take(3), "the next oldest moves up"


def test_a_prompt_is_judged_before_what_it_uses_becomes_the_latest():
    """Otherwise nothing that is used would ever have been among the oldest."""
    hand = Hand(eviction="lru")
    hand.stored([1, 2])
    heard = []

    class Hears:
        def asked(self, *prompt):
            heard.append("asked")

        def used(self, copies):
            heard.append("used")

    hand.handler.balance = hand.handler.cache.watch = Hears()
    hand.match([1, 2])
    assert heard == ["asked", "used"]
