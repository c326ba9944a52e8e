"""Both sides of the connector, moved by hand: decisions, loads, and what is counted of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from vllm_flows import forget, stored
from vllm_stand_ins import BLOCK, busy, request_of

from ptstore_mpi import SOURCES

SAMPLES = 8


@pytest.fixture
def engine(make):
    return make()


def slow_loads(engine, load_s):
    """Let the engine have measured quick prefills, and loads that took so long."""
    for _ in range(SAMPLES):
        engine.link.fetch.note_prefill(64, 0.01)
        engine.link.fetch.note_load({"owned": 64}, load_s)


# -- serving -----------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["async", "layered", "verified"])
def test_what_one_request_computed_another_loads(make, load):
    engine = make(load=load)
    tokens = stored(engine)
    again = request_of(tokens, "again")
    assert engine.serve(again) == 64
    told = engine.end(again)
    assert told[0] is False
    facts = told[1]["ptstore"]
    assert (facts["owned_tokens"], facts["recomputed_tokens"]) == (64, 1)
    assert facts["load_reason"] == "loaded"
    assert facts["load_s"] > 0
    engine.check_counters()


@pytest.mark.parametrize("load", ["async", "layered", "verified"])
@pytest.mark.parametrize("have", [0, 16, 48, 64])
def test_only_what_vllm_has_not_is_loaded(make, load, have):
    engine = make(load=load)
    tokens = stored(engine)
    again = request_of([*tokens, 7, 8], "again")
    ids = engine.table(5)
    engine.compute(again, ids[: have // BLOCK])
    assert engine.serve(again, have, ids) == 64
    facts = engine.end(again)[1]["ptstore"]
    assert (facts["engine_tokens"], facts["owned_tokens"]) == (have, 64 - have)
    assert facts["recomputed_tokens"] == 3
    engine.check_counters()


def test_two_requests_are_loaded_at_once_each_into_its_blocks(engine):
    stored(engine)
    pair = [request_of([*range(48 + 16 * n), 900 + n], f"r{n}") for n in range(2)]
    for request in pair:
        assert engine.matched(request) == (48 + 16 * (request is pair[1]), True)
        engine.give(request, *engine.matched(request)[:1])
    assert engine.load_all().loaded == {"r0", "r1"}
    for request in pair:
        engine.check(request, engine.blocks[request.request_id], 48)


# -- decisions ---------------------------------------------------------------------------------


def test_a_request_is_matched_once_however_often_it_is_asked_about(engine):
    tokens = stored(engine)
    again, before = request_of(tokens, "again"), engine.link.store.stats()["calls"]["match"]
    assert {engine.ask(again) for _ in range(5)} == {(64, True)}
    assert engine.link.store.stats()["calls"]["match"] == before + 1
    assert engine.matched(again, 32) == (32, True)
    assert engine.matched(again) == (64, True)
    assert engine.link.store.stats()["calls"]["match"] == before + 1


def test_a_slow_match_is_asked_for_later(make):
    again = request_of(stored(make()), "again")
    engine = make(match_wait_s=0.0)
    with busy(engine.link.thread):
        assert [engine.ask(again) for _ in range(3)] == [(None, False)] * 3
    engine.finish_all()
    assert engine.ask(again) == (64, True)


def test_asking_counts_nothing(engine):
    stored(engine)
    before = engine.link.store.stats()["tokens"]
    engine.matched(request_of(65, "again"))
    engine.matched(request_of([5] * 40, "other"))
    engine.check_counters()
    assert engine.link.store.stats()["tokens"] == before


REASONS = {
    "cold": request_of([9] * 40),
    "short": request_of(9),
    "diverged": request_of([*range(32), *[9] * 30]),
    "prompt_logprobs": request_of(65, sampling_params=SimpleNamespace(prompt_logprobs=3)),
    "pooling": request_of(65, sampling_params=None),
    "skip_reading": request_of(65, skip_reading_prefix_cache=True),
    "not_wanted": request_of(65, kv_transfer_params={"ptstore_load": False}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_is_told_at_the_end(engine, reason):
    stored(engine)
    request = REASONS[reason]
    external, _ = engine.matched(request)
    assert external == (32 if reason == "diverged" else 0)
    engine.give(request, external)
    engine.load_all()
    facts = engine.end(request)[1]["ptstore"]
    assert facts["reason"] == reason
    assert facts["recomputed_tokens"] == len(request.prompt_token_ids) - external
    engine.check_counters()


def test_a_request_without_tokens_has_nothing_of_the_store(engine):
    request = request_of(40, prompt_embeds="embeddings")
    assert engine.matched(request) == (0, False)
    engine.give(request, 0)
    engine.step({request: (0, 40)})
    assert not engine.link.saves
    assert engine.end(request)[1]["ptstore"]["reason"] == "embeddings"
    none = request_of(40)
    none.prompt_token_ids = None
    assert engine.matched(none) == (0, False)
    engine.check_counters()


@pytest.mark.parametrize("params", [None, {}, "text", {"do_remote_decode": True}])
def test_parameters_of_other_connectors_change_nothing(engine, params):
    tokens = stored(engine)
    assert engine.matched(request_of(tokens, "again", kv_transfer_params=params)) == (64, True)


def test_a_request_that_does_not_want_it_is_not_saved(engine):
    request = request_of(65, kv_transfer_params={"ptstore_save": False})
    assert engine.serve(request) == 0
    assert not engine.link.saves
    assert engine.matched(request_of(65, "again")) == (0, False)


def test_a_load_that_is_slower_than_computing_is_declined_and_counted(make):
    engine = make(fetch="cost")
    tokens = stored(engine)
    slow_loads(engine, 1e3)
    again = request_of(tokens, "again")
    assert {engine.matched(again) for _ in range(3)} == {(0, False)}
    assert engine.link.counters["fetch_slower_count"] == 1
    assert engine.serve(again) == 0
    assert engine.end(again)[1]["ptstore"]["reason"] == "declined"
    engine.check_counters()
    assert engine.link.counters["save_known_count"] == 1


def test_nothing_is_declined_where_the_settings_say_so(engine):
    tokens = stored(engine)
    slow_loads(engine, 1e3)
    assert engine.matched(request_of(tokens, "again")) == (64, True)
    assert engine.link.counters["fetch_off_count"] == 1


def test_a_match_that_failed_is_computed(engine, monkeypatch, caplog):
    def fail(tokens):
        raise OSError("mine")

    request = request_of(65)
    monkeypatch.setattr(engine.link.namespace_of(request), "match", fail)
    assert engine.matched(request) == (0, False)
    assert "computed" in caplog.text
    engine.give(request, 0)
    assert engine.end(request)[1]["ptstore"]["reason"] == "error"


def test_what_was_never_asked_about_is_nobodys(engine):
    request = request_of(65)
    engine.give(request, 0)
    engine.step({request: (0, 65)})
    assert engine.end(request) == (False, None)
    assert engine.scheduler.expected_near(request, 10) == 0


def test_a_request_that_ends_before_it_has_blocks_is_forgotten(engine):
    stored(engine)
    request = request_of(65)
    engine.matched(request)
    assert engine.end(request) == (False, None)
    assert engine.plan().loads == []


def test_a_load_that_was_planned_goes_with_its_request(engine):
    stored(engine)
    request = request_of(65)
    engine.give(request, engine.matched(request)[0])
    engine.end(request)
    assert engine.plan().loads == []


def test_near_hits_are_expected_of_this_node(engine):
    stored(engine)
    request = request_of(65)
    assert engine.scheduler.expected_near(request, 64) == 0
    engine.matched(request)
    assert engine.scheduler.expected_near(request, 64) == 64
    assert engine.scheduler.expected_near(request, 32) == 32


def test_less_than_was_offered_may_be_taken(engine):
    """Where vLLM cuts a hit, only that is loaded."""
    tokens = stored(engine)
    request = request_of(tokens, "again")
    assert engine.matched(request) == (64, True)
    ids = engine.give(request, 32)
    step = engine.load_all()
    assert (step.loaded, step.errors) == ({"again"}, set())
    engine.check(request, ids, 32)
    assert not any(pages[ids[2:]].any() for pages in engine.pool.pages)
    engine.check_counters()


# -- preemption, weights, the end --------------------------------------------------------------


def test_a_preempted_request_is_asked_about_anew_for_all_its_tokens(engine):
    request = request_of(40)
    assert engine.serve(request) == 0
    engine.finish_saves()
    request.all_token_ids += range(40, 60)
    request.num_preemptions += 1
    assert engine.matched(request) == (32, True)
    assert engine.serve(request) == 32
    facts = engine.end(request)[1]["ptstore"]
    assert (facts["owned_tokens"], facts["recomputed_tokens"]) == (32, 28)
    engine.check_counters()


def test_equal_questions_get_equal_answers_after_a_preemption(engine):
    """Also where an earlier load of the request had failed."""
    tokens = stored(engine)
    request = request_of(tokens, "again")
    external, _ = engine.matched(request)
    forget(engine, request)
    engine.give(request, external)
    engine.load_all()
    assert engine.serve(request) == 0
    engine.finish_saves()
    request.num_preemptions += 1
    assert len({engine.matched(request) for _ in range(3)}) == 1


def test_new_weights_find_nothing_of_the_old(engine):
    tokens = stored(engine)
    waiting = request_of(tokens, "waiting")
    assert engine.matched(waiting) == (64, True)
    old = engine.link.namespace_of(waiting).digest
    engine.scheduler.reset()
    assert engine.link.namespace_of(waiting).digest != old
    assert engine.matched(waiting) == (0, False)
    assert engine.serve(waiting) == 0
    engine.finish_saves()
    assert engine.matched(request_of(tokens, "after")) == (64, True)


def test_what_was_computed_with_old_weights_in_part_is_not_saved(engine):
    request = request_of(65)
    engine.matched(request)
    ids = engine.give(request, 0)
    old = engine.link.namespace_of(request)
    engine.scheduler.reset()
    engine.step({request: (0, 65)}, blocks={"r": (ids, True)})
    engine.finish_saves()
    assert engine.store_does(lambda: old.match(request.all_token_ids)).tokens == 0
    engine.link.name_weights("second")
    named = engine.link.namespace_of(request).digest
    engine.link.name_weights("third")
    assert engine.link.namespace_of(request).digest != named
    engine.link.name_weights("second")
    assert engine.link.namespace_of(request).digest == named


def test_closing_ends_what_is_under_way(engine):
    tokens = stored(engine)
    request, new = request_of(tokens, "again"), request_of([3] * 65, "new")
    engine.serve(new)
    engine.give(request, engine.matched(request)[0])
    with busy(engine.link.thread):
        plan = engine.plan()
        engine.worker.begin_step(plan)
        engine.worker.start_loads()
        load = engine.link.loads["again"]
        assert not load.task.is_done
    engine.worker.close()
    assert load.task.is_done
    assert all(task.is_done for record in engine.link.saves.values() for task in record.tasks)


def test_namespaces_are_made_again_where_there_are_very_many(engine, monkeypatch):
    monkeypatch.setattr("ptstore_mpi.integrations.vllm.link._MOST_NAMESPACES", 2)
    salted = [request_of(9, cache_salt=f"tenant{n}") for n in range(5)]
    digests = [engine.link.namespace_of(request).digest for request in (*salted, *salted)]
    assert digests[:5] == digests[5:]
    assert len(set(digests)) == 5


def test_counters_are_told_once(engine):
    assert engine.link.take_counted() == {}
    stored(engine)
    told = engine.link.take_counted()
    assert (told["asked_tokens"], told["recomputed_tokens"]) == (65, 65)
    assert (told["saved_tokens"], told["save_stored_count"]) == (64, 1)
    assert engine.link.take_counted() == {}
    engine.serve(request_of(65, "again"))
    assert {f"{name}_tokens" for name in SOURCES} >= {"owned_tokens"}
    assert engine.link.take_counted()["owned_tokens"] == 64


def test_steps_of_one_prompt_are_measured(engine):
    request = request_of(65)
    engine.serve(request)
    engine.step({request: (65, 1)})  # a decoded token says nothing of prefills
    other = request_of([4] * 20, "other")
    engine.serve(other)
    engine.step({request: (66, 1), other: (20, 1)})
    assert engine.link.fetch.as_dict()["prefill"]["measured_count"] == 1, "the first is left out"


def test_requests_of_the_oldest_generation_are_served(make):
    engine = make(load="verified", keeps_orphans=False)
    request = SimpleNamespace(**vars(request_of(65)))
    del request.num_preemptions
    assert engine.matched(request) == (0, False)
