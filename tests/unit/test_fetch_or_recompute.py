"""The cost model against synthetic machines, its verdicts, and what a match is expected to cost."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptstore_mpi import SOURCES
from ptstore_mpi.integrations.fetch_or_recompute import (
    LEAST_SAMPLES,
    PROBE_EVERY,
    FetchOrRecompute,
    Verdict,
    expected_sources,
)
from ptstore_mpi.types import Match, SegmentRef, pack_segment_id

SEEN = LEAST_SAMPLES + 1  # the first one is left out
LOADED = [source for source in SOURCES if source != "engine"]
PROMPT = 2000
FOUND = 1984

tokens_st = st.integers(1, 1 << 20)
seconds_st = st.floats(1e-6, 1e3)
load_st = st.dictionaries(st.sampled_from(LOADED), tokens_st, min_size=1, max_size=4)
loads_st = st.lists(st.tuples(load_st, seconds_st), max_size=30)


def prefill_s(tokens, cached=0, fixed=0.02, linear=1e-3, pair=1e-7):
    return fixed + linear * tokens + pair * tokens * (cached + tokens / 2)


def measured(load_s, *, source="owned", is_on=True, times=SEEN):
    """Return a cost model of a machine that loads `FOUND` tokens in `load_s`."""
    fetch = FetchOrRecompute(is_on=is_on)
    for _ in range(times):
        fetch.note_prefill(PROMPT, prefill_s(PROMPT))
        fetch.note_prefill(PROMPT - FOUND, prefill_s(PROMPT - FOUND, FOUND), cached_tokens=FOUND)
        fetch.note_load({source: FOUND, "engine": 0}, load_s)
    return fetch


def judge(fetch, *, expected=None, found=FOUND, have=0, prompt=PROMPT):
    expected = {"owned": found - have} if expected is None else expected
    return fetch.judge(
        prompt_tokens=prompt, have_tokens=have, found_tokens=found, expected=expected
    )


def reasons(fetch, count, **arguments):
    return [judge(fetch, **arguments).reason for _ in range(count)]


# -- verdicts ------------------------------------------------------------------------------


def test_the_faster_way_is_taken_and_both_numbers_are_told():
    quick, slow = judge(measured(0.01)), judge(measured(100.0))
    assert (quick.fetch, quick.reason) == (True, "faster")
    assert (slow.fetch, slow.reason) == (False, "slower")
    saved_s = prefill_s(PROMPT) - prefill_s(PROMPT - FOUND, FOUND)
    for verdict, load_s in ((quick, 0.01), (slow, 100.0)):
        assert verdict.load_s == pytest.approx(load_s, rel=0.001)
        assert verdict.saved_s == pytest.approx(saved_s, rel=0.1)


def test_what_the_engine_has_anyway_saves_nothing():
    fetch = measured(1.0)
    whole, rest = judge(fetch), judge(fetch, have=512)
    assert whole.reason == rest.reason == "faster"
    assert rest.saved_s < whole.saved_s * 0.8
    assert rest.load_s < whole.load_s


@pytest.mark.parametrize("have", [FOUND, FOUND + 1])
def test_nothing_found_is_nothing(have):
    assert judge(measured(100.0), have=have, expected={}) == Verdict(False, "nothing")


def test_off_fetches_and_still_says_what_it_has_measured():
    fetch = measured(100.0, is_on=False)
    verdict = judge(fetch)
    assert (verdict.fetch, verdict.reason) == (True, "off")
    assert verdict.load_s > verdict.saved_s > 0
    assert judge(FetchOrRecompute(is_on=False)) == Verdict(True, "off")
    assert set(reasons(fetch, 2 * PROBE_EVERY)) == {"off"}


def test_every_sixteenth_decline_of_the_same_sources_is_fetched():
    fetch = measured(100.0)
    for _ in range(SEEN):
        fetch.note_load({"remote": FOUND}, 100.0)
    cycle = ["slower"] * (PROBE_EVERY - 1) + ["probe"]
    assert reasons(fetch, 5) == ["slower"] * 5
    assert reasons(fetch, 2 * PROBE_EVERY, expected={"remote": FOUND}) == cycle * 2
    assert reasons(fetch, PROBE_EVERY) == (cycle * 2)[5 : 5 + PROBE_EVERY]
    assert fetch.as_dict()["verdicts"] == {"slower": 50, "probe": 3}


def test_probes_find_out_that_a_network_has_recovered():
    fetch, requests = measured(100.0, times=50), 0
    while (verdict := judge(fetch)).reason != "faster":
        requests += 1
        if verdict.fetch:
            fetch.note_load({"owned": FOUND}, 0.01)
    assert requests < 12 * PROBE_EVERY


def test_declines_find_out_that_computing_has_become_slow():
    fetch, requests = measured(100.0, times=50), 0
    while judge(fetch).reason != "faster":
        requests += 1
        fetch.note_prefill(PROMPT, 100 * prefill_s(PROMPT))
    assert requests < 2 * PROBE_EVERY


# -- what is not measured ------------------------------------------------------------------


@pytest.mark.parametrize("times", range(SEEN))
def test_too_few_samples_are_no_measurement(times):
    fetch = measured(100.0, times=times)
    loads, prefills = measured(100.0, times=0), measured(100.0, times=0)
    for _ in range(SEEN):
        loads.note_load({"owned": FOUND}, 100.0)
        prefills.note_prefill(PROMPT, prefill_s(PROMPT))
    assert judge(loads) == Verdict(True, "unmeasured", pytest.approx(100.0, rel=0.001), None)
    assert judge(prefills).reason == "unmeasured"
    assert judge(prefills).load_s is None
    assert judge(fetch).reason == ("unmeasured" if 2 * times < SEEN or times < SEEN else "slower")


def test_a_source_is_measured_by_itself():
    fetch = measured(100.0)
    assert judge(fetch).reason == "slower"
    for source in ("replica", "remote", "disk"):
        assert judge(fetch, expected={source: FOUND}).reason == "unmeasured"
        assert judge(fetch, expected={"owned": 64, source: FOUND - 64}).reason == "unmeasured"


@pytest.mark.parametrize(
    ("found", "reason"),
    [(FOUND // 2, "slower"), (FOUND // 2 - 1, "unmeasured"), (2 * FOUND + 1, "unmeasured")],
)
def test_other_sizes_are_not_measured(found, reason):
    assert judge(measured(1e6), found=found, prompt=found + 16).reason == reason


@given(loads=loads_st, prefills=st.lists(st.tuples(tokens_st, seconds_st), max_size=10),
       expected=load_st)  # fmt: skip
def test_nothing_is_declined_before_it_was_measured(loads, prefills, expected):
    fetch = FetchOrRecompute()
    for tokens, seconds in prefills:
        fetch.note_prefill(tokens, seconds)
    seen = dict.fromkeys(LOADED, 0)
    for by_source, seconds in loads:
        fetch.note_load(by_source, seconds)
        for source in by_source:
            seen[source] += 1
    found = sum(expected.values())
    verdict = judge(fetch, expected=expected, found=found, prompt=found + 1)
    assert (verdict.load_s is None or verdict.saved_s is None) == (verdict.reason == "unmeasured")
    turns_out = {"owned": ["owned", "disk"], "remote": ["remote", "replica", "disk"]}
    known = all(
        any(seen[name] >= SEEN for name in turns_out.get(source, [source])) for source in expected
    )
    if len(prefills) < SEEN or not known:
        assert verdict == Verdict(True, "unmeasured", verdict.load_s, verdict.saved_s)


# -- the fit -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_coefficients_become_those_of_the_machine(seed):
    rng = random.Random(seed)
    machine = {
        "fixed": 10 ** rng.uniform(-2, -1),
        "linear": 10 ** rng.uniform(-4, -3),
        "pair": 10 ** rng.uniform(-8, -7),
    }
    fetch = FetchOrRecompute()
    fetch.note_prefill(64, 30.0)  # imports
    for _ in range(500):
        tokens, cached = int(10 ** rng.uniform(0.5, 4)), int(10 ** rng.uniform(0, 4))
        fetch.note_prefill(tokens, prefill_s(tokens, cached, **machine), cached_tokens=cached)
    fitted = fetch.as_dict()["prefill"]
    assert fitted["fixed_s"] == pytest.approx(machine["fixed"], rel=0.1)
    assert fitted["s_per_token"] == pytest.approx(machine["linear"], rel=0.1)
    assert fitted["s_per_token_pair"] == pytest.approx(machine["pair"], rel=0.1)
    assert fitted["measured_count"] == 500


def test_sources_of_mixed_loads_are_told_apart():
    machine = {"owned": (1e-4, 1e-6), "replica": (2e-4, 2e-6), "remote": (5e-3, 1e-4),
               "disk": (1e-2, 3e-5)}  # fmt: skip
    rng, fetch = random.Random(1), FetchOrRecompute()
    for _ in range(600):
        load = {source: rng.randint(16, 4000) for source in machine if rng.random() < 0.5}
        cost = [machine[source][0] + machine[source][1] * n for source, n in load.items()]
        fetch.note_load(load, sum(cost))
    for source, (fixed_s, s_per_token) in machine.items():
        fitted = fetch.as_dict()["load"][source]
        assert fitted["fixed_s"] == pytest.approx(fixed_s, rel=0.1)
        assert fitted["s_per_token"] == pytest.approx(s_per_token, rel=0.1)


def test_long_prefills_are_remembered_through_many_short_ones():
    fetch = measured(100.0)
    for _ in range(3000):
        fetch.note_prefill(PROMPT - FOUND, prefill_s(PROMPT - FOUND, FOUND), cached_tokens=FOUND)
    saved_s = prefill_s(PROMPT) - prefill_s(PROMPT - FOUND, FOUND)
    assert judge(fetch).saved_s == pytest.approx(saved_s, rel=0.1)


def test_an_outlier_is_believed_in_part():
    fetch = measured(0.1, times=20)
    fetch.note_load({"owned": FOUND}, 1000.0)
    assert judge(fetch).load_s < 0.2
    for _ in range(3):
        fetch.note_load({"owned": FOUND}, 0.1)
    assert judge(fetch).load_s == pytest.approx(0.1, rel=0.25)


def test_a_remote_prefix_is_judged_by_what_such_turned_out_to_be():
    fetch = measured(100.0, source="remote")
    far = {"remote": FOUND}
    assert judge(fetch, expected=far).reason == "slower"
    for _ in range(40):
        fetch.note_load({"replica": FOUND}, 0.01)
    verdict = judge(fetch, expected=far)
    assert verdict.reason == "faster"
    assert verdict.load_s == pytest.approx(0.01, rel=0.01)
    fetch.note_load({"remote": FOUND}, 100.0)
    assert judge(fetch, expected=far).load_s == pytest.approx(0.01 * 7 / 8 + 100 / 8, rel=0.1)
    assert judge(fetch, expected={"replica": FOUND}).load_s == pytest.approx(0.01, rel=0.01)


@given(loads=loads_st, expected=load_st, factor=st.sampled_from([2.0, 8.0, 1024.0]))
def test_slower_loads_never_turn_a_decline_into_a_fetch(loads, expected, factor):
    fetch, slower = (FetchOrRecompute() for _ in range(2))
    for each, times in ((fetch, 1.0), (slower, factor)):
        for _ in range(SEEN):
            each.note_prefill(PROMPT, prefill_s(PROMPT))
        for by_source, seconds in loads:
            each.note_load(by_source, times * seconds)
    found = sum(expected.values())
    before, after = (
        judge(each, expected=expected, found=found, prompt=found + 1) for each in (fetch, slower)
    )
    assert before.fetch or not after.fetch
    if before.load_s is not None:
        assert after.load_s == pytest.approx(factor * before.load_s)


@given(loads=loads_st, load=load_st, seconds=seconds_st)
@settings(max_examples=200)
def test_a_sample_moves_its_like_towards_it_and_never_past(loads, load, seconds):
    fetch = FetchOrRecompute()
    for by_source, took_s in [*[(load, 1.0)] * SEEN, *loads]:
        fetch.note_load(by_source, took_s)

    def expected_s():
        loads = fetch.as_dict()["load"]
        return sum(loads[s]["fixed_s"] + loads[s]["s_per_token"] * n for s, n in load.items())

    before = expected_s()
    fetch.note_load(load, seconds)
    low, high = sorted((before, seconds))
    assert low * (1 - 1e-6) <= expected_s() <= high * (1 + 1e-6)
    for cost in fetch.as_dict()["load"].values():
        assert min(cost["fixed_s"], cost["s_per_token"]) >= 0


@given(samples=st.lists(st.tuples(tokens_st, tokens_st, seconds_st), max_size=60))
def test_what_is_saved_is_never_less_than_nothing(samples):
    fetch = FetchOrRecompute()
    for tokens, cached, seconds in samples:
        fetch.note_prefill(tokens, seconds, cached_tokens=cached)
    fitted = fetch.as_dict()["prefill"]
    assert min(fitted.values()) >= 0
    saved_s = judge(fetch).saved_s
    assert saved_s is None or saved_s >= 0


# -- arguments -----------------------------------------------------------------------------


def test_what_says_nothing_is_left_out():
    fetch = FetchOrRecompute()
    for _ in range(2 * SEEN):
        fetch.note_prefill(0, 1.0)
        fetch.note_prefill(10, 0.0)
        fetch.note_load({"engine": 512, "owned": 0}, 1.0)
        fetch.note_load({"owned": 16}, 0.0)
    assert judge(fetch) == Verdict(True, "unmeasured")
    counts = [cost["measured_count"] for cost in fetch.as_dict()["load"].values()]
    assert counts == [0] * len(LOADED)


@pytest.mark.parametrize(
    "call",
    [
        lambda fetch: fetch.note_prefill(-1, 1.0),
        lambda fetch: fetch.note_prefill(1, float("nan")),
        lambda fetch: fetch.note_prefill(1, 1.0, cached_tokens=-1),
        lambda fetch: fetch.note_load({"owned": -1}, 1.0),
        lambda fetch: fetch.note_load({"owned": 1}, float("inf")),
        lambda fetch: fetch.note_load({"ssd": 1}, 1.0),
        lambda fetch: judge(fetch, prompt=FOUND - 1),
        lambda fetch: judge(fetch, have=-1, expected={}),
    ],
)
def test_impossible_numbers_are_refused(call):
    fetch = FetchOrRecompute()
    with pytest.raises(ValueError, match="expected"):
        call(fetch)
    assert fetch.as_dict() == FetchOrRecompute().as_dict()


def test_threads_may_share_it():
    fetch = measured(100.0)

    def work(number):
        for _ in range(300):
            fetch.note_load({"owned": FOUND}, 100.0)
            fetch.note_prefill(PROMPT, prefill_s(PROMPT))
            judge(fetch)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = fetch.as_dict()
    probes = 1200 // PROBE_EVERY
    assert found["verdicts"] == {"slower": 1200 - probes, "probe": probes}
    assert found["load"]["owned"]["measured_count"] == 1200 + LEAST_SAMPLES


# -- expected sources ----------------------------------------------------------------------


def match_of(*parts):
    refs = tuple(SegmentRef(pack_segment_id(o, 1, 0), blocks, b"0" * 16) for o, blocks in parts)
    return Match(16 * sum(blocks for _, blocks in parts), 10_000, "whole", refs)


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        (0, {"owned": 80, "remote": 48}),
        (16, {"owned": 64, "remote": 48}),
        (48, {"owned": 48, "remote": 32}),
        (80, {"owned": 48}),
        (128, {}),
        (999, {}),
    ],
)
def test_who_owns_a_segment_is_where_it_will_come_from(skip, expected):
    match = match_of((1, 2), (0, 3), (2, 3))
    assert expected_sources(match, (1, 2), 16, skip) == expected


def test_an_empty_match_has_no_sources():
    assert expected_sources(Match(0, 9, "cold"), (0,), 16) == {}
