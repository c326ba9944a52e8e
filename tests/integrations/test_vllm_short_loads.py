"""Loads that fall short, fail or outlive their request: what vLLM is told, and what is computed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from vllm_flows import drop_tail, forget, stored
from vllm_stand_ins import busy, request_of

from ptstore_mpi import LoadResult

SAMPLES = 8


@pytest.fixture
def engine(make):
    return make()


# -- loads that fall short ---------------------------------------------------------------------


def test_blocks_that_did_not_come_are_told_and_computed(engine):
    tokens = stored(engine)
    request = request_of(tokens, "again")
    external, _ = engine.matched(request)
    drop_tail(engine, request)
    ids = engine.give(request, external)
    step = engine.load_all()
    assert step.loaded == {"again"}
    assert step.errors == set(ids[2:4])
    engine.check(request, ids, 32)
    engine.give(request, 0, ids)  # vLLM goes on behind what is there
    engine.step({request: (32, 33)}, blocks={"again": (ids, True)})
    engine.finish_saves()
    assert engine.step().errors == set()
    facts = engine.end(request)[1]["ptstore"]
    assert (facts["load_reason"], facts["owned_tokens"]) == ("gone", 32)
    assert engine.serve(request_of(tokens, "third")) == 64
    engine.check_counters()


def test_a_load_that_brought_nothing_is_not_tried_again(engine):
    """vLLM frees the blocks and asks anew."""
    tokens = stored(engine)
    request = request_of(tokens, "again")
    external, _ = engine.matched(request)
    forget(engine, request)
    ids = engine.give(request, external)
    step = engine.load_all()
    assert (step.loaded, step.errors) == ({"again"}, set(ids[:4]))
    assert {engine.matched(request) for _ in range(2)} == {(0, False)}
    engine.check_counters()
    assert engine.serve(request) == 0
    assert engine.end(request)[1]["ptstore"]["owned_tokens"] == 0
    engine.check_counters()
    assert engine.serve(request_of(tokens, "third")) == 64


def test_what_vllm_had_is_not_wrong_where_a_load_brought_nothing(engine):
    tokens = stored(engine)
    request = request_of(tokens, "again")
    ids = engine.table(5)
    external, _ = engine.matched(request, 32)
    forget(engine, request)
    engine.give(request, external, ids)
    assert engine.load_all().errors == set(ids[2:4])
    facts = engine.end(request)[1]["ptstore"]
    assert (facts["engine_tokens"], facts["recomputed_tokens"]) == (32, 33)
    engine.check_counters()


def test_an_error_of_a_load_is_told_as_blocks(engine, monkeypatch, caplog):
    tokens = stored(engine)
    request = request_of(tokens, "again")
    external, _ = engine.matched(request)

    def fail(*args, **kwargs):
        raise OSError("mine")

    monkeypatch.setattr(engine.link.namespace_of(request), "load", fail)
    ids = engine.give(request, external)
    step = engine.load_all()
    assert (step.loaded, step.errors) == ({"again"}, set(ids[:4]))
    assert "mine" in caplog.text
    assert engine.end(request)[1]["ptstore"]["load_reason"] == "error"


def test_a_load_that_ran_out_of_time_counts_as_slow(make):
    engine = make(fetch="cost")
    tokens = stored(engine)
    namespace = engine.link.namespace_of(request_of(1))
    namespace.load = lambda *args, **options: LoadResult(0, {}, {}, "late", 100.0)
    for _ in range(SAMPLES):
        engine.link.fetch.note_prefill(64, 0.01)
    answers = []
    for n in range(6):
        request = request_of(tokens, f"late{n}")
        answers.append(engine.matched(request)[0])
        engine.give(request, answers[-1])
        engine.load_all()
        engine.end(request)
    assert answers[0] == 64
    assert answers[-1] == 0
    assert engine.link.counters["load_late_count"] == sum(map(bool, answers))


def test_a_load_under_way_is_not_reported(engine):
    stored(engine)
    request = request_of(65, "again")
    engine.give(request, engine.matched(request)[0])
    with busy(engine.link.thread):
        steps = [engine.step() for _ in range(3)]
    assert [(step.loaded, step.errors) for step in steps] == [(set(), set())] * 3
    engine.finish_loads()
    assert engine.step().loaded == {"again"}


# -- requests that end in a load ---------------------------------------------------------------


@pytest.mark.parametrize(
    "keeps",
    [
        True,
        False,
    ],
)
def test_a_request_that_ends_in_a_load_keeps_its_blocks(make, keeps):
    """Where vLLM keeps them by itself it hears of the load, else of a save."""
    engine = make(keeps_orphans=keeps)
    tokens = stored(engine)
    request = request_of(tokens, "orphan")
    engine.give(request, engine.matched(request)[0])
    with busy(engine.link.thread):
        engine.step()
        assert engine.end(request)[0] is not keeps
        step = engine.step(ended={"orphan"})
        assert (step.saved, step.loaded) == (set(), set())
    engine.finish_loads()
    step = engine.step()
    assert (step.loaded, step.saved)[not keeps] == {"orphan"}
    assert (step.loaded, step.saved)[keeps] == set()
    assert step.errors == set()
    assert engine.step().saved == set()
    engine.check_counters()


def test_wrong_blocks_of_an_orphan_are_nobodys(make):
    engine = make(keeps_orphans=True)
    tokens = stored(engine)
    request = request_of(tokens, "orphan")
    external, _ = engine.matched(request)
    forget(engine, request)
    engine.give(request, external)
    with busy(engine.link.thread):
        engine.step()
        engine.end(request)
    engine.finish_loads()
    step = engine.step(ended={"orphan"})
    assert (step.loaded, step.errors) == ({"orphan"}, set())
    assert not engine.link.failed
    assert not engine.link.results
    engine.check_counters()
