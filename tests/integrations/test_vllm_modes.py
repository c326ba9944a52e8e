"""Loads layer by layer, and loads that end before they are claimed."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from vllm_flows import stored
from vllm_stand_ins import BLOCK, LIMIT_S, busy, engines, request_of

import ptstore_mpi as pt
from ptstore_mpi.integrations.vllm.store_thread import MATCH, at_once
from ptstore_mpi.protocol import plan


def begun(engine, request, have=0):
    """Begin the step in which a request is loaded, up to its forward pass."""
    external, is_async = engine.matched(request, have)
    assert not is_async
    ids = engine.give(request, external)
    total = len(request.all_token_ids)
    before = have + external
    step = engine.plan({request: (before, total - before)}, {request.request_id: (ids, True)})
    engine.worker.begin_step(step)
    engine.worker.start_clock()
    engine.worker.start_loads()
    return ids


# -- layered -----------------------------------------------------------------------------------


def test_each_layer_waits_for_its_own_tensors_only(make, monkeypatch):
    """The load stops after two of three tensors: two layers go on, the third waits."""
    monkeypatch.setattr(plan, "BAND_BYTES", 1)
    monkeypatch.setattr(plan, "COPY_BYTES", 1)
    engine = make(load="layered")
    tokens = stored(engine)
    request = request_of(tokens, "again")
    first, go_on = threading.Event(), threading.Event()
    namespace = engine.link.namespace_of(request)
    honest = namespace.load

    def load(match, out, *, skip_tokens, progress):
        def told(tensors):
            progress(tensors)
            if tensors == 2:
                first.set()
                assert go_on.wait(LIMIT_S)

        return honest(match, out, skip_tokens=skip_tokens, progress=told)

    namespace.load = load
    ids = begun(engine, request)
    under_way = engine.link.loads["again"]
    layers = list(engine.pool.layer_ends)
    assert first.wait(LIMIT_S)
    for layer in layers[:2]:
        engine.worker.wait_for_layer(layer)
    assert (under_way.ready_tensors, under_way.task.is_done) == (2, False)
    waiter = threading.Thread(target=engine.worker.wait_for_layer, args=(layers[2],))
    waiter.start()
    assert waiter.is_alive()
    go_on.set()
    waiter.join(LIMIT_S)
    assert under_way.ready_tensors == 3
    engine.worker.end_step()
    assert under_way.task.is_done
    engine.check(request, ids, 64)
    assert engine.worker.finished(()) == (set(), set()), "nobody waits for it outside the step"
    assert engine.worker.take_load_errors() == set()
    engine.check_counters()


def test_a_layer_that_is_not_known_waits_for_all(make):
    engine = make(load="layered")
    request = request_of(stored(engine), "again")
    begun(engine, request)
    engine.worker.wait_for_layer("a layer that shares nothing")
    assert engine.link.loads["again"].ready_tensors == 3


def test_layers_wait_for_nothing_where_nothing_is_loaded(make):
    engine = make(load="layered")
    engine.worker.wait_for_layer("layer.0")
    request = request_of(stored(engine), "again")
    aside = make(load="async")
    aside.give(request, aside.matched(request)[0])
    with busy(aside.link.thread):
        aside.step()
        aside.worker.wait_for_layer("layer.0")


def test_a_layered_load_that_falls_short_is_told_in_its_step(make):
    engine = make(load="layered")
    tokens = stored(engine)
    request = request_of(tokens, "again")
    engine.matched(request)
    namespace = engine.link.namespace_of(request)
    engine.store_does(lambda: namespace.drop_tail(namespace.match(tokens)))
    ids = begun(engine, request)
    for layer in engine.pool.layer_ends:
        engine.worker.wait_for_layer(layer)
    engine.worker.end_step()
    assert engine.worker.finished(()) == (set(), set())
    assert engine.worker.take_load_errors() == set(ids[2:4])
    assert engine.worker.take_load_errors() == set()
    engine.check(request, ids, 32)


def test_what_was_computed_upon_a_layered_load_that_fell_short_is_not_saved(make):
    """The step was computed with what its blocks held before: vLLM throws it away, so must we."""
    engine = make(load="layered")
    tokens = stored(engine)
    request = request_of([*tokens, *range(30)], "again")
    engine.matched(request)
    namespace = engine.link.namespace_of(request)
    engine.store_does(lambda: namespace.drop_tail(namespace.match(tokens)))
    ids = begun(engine, request)
    for layer in engine.pool.layer_ends:
        engine.worker.wait_for_layer(layer)
    for pages in engine.pool.pages:
        pages[ids[2:]] = 7.0  # what a forward pass makes of it
    engine.worker.end_step()
    engine.worker.finished(())
    assert engine.worker.take_load_errors() == set(ids[2:4])
    engine.finish_saves()
    third = make(load="async")
    again = request_of(request.all_token_ids, "third")
    assert third.serve(again) == 32, "nobody may find it"


def test_nor_is_what_another_request_computed_upon_the_same_blocks(make):
    """vLLM lets a second request of the same step share the blocks that the first one loads."""
    engine = make(load="layered")
    tokens = stored(engine)
    first = request_of([*tokens, *range(30)], "again")
    second = request_of([*tokens[:64], *[5] * 20], "second")
    assert engine.matched(first) == (64, False)
    namespace = engine.link.namespace_of(first)
    engine.store_does(lambda: namespace.drop_tail(namespace.match(tokens)))
    ids = engine.give(first, 64)
    assert engine.matched(second, 64) == (0, False)
    shared = engine.give(second, 0, [*ids[:4], *engine.table(2)])
    step = engine.step(
        {first: (64, 31), second: (64, 20)},
        blocks={"again": (ids, True), "second": (shared, True)},
    )
    assert step.errors == set(ids[2:4])
    engine.finish_saves()
    third = request_of([*second.all_token_ids, 1], "third")
    assert make(load="async").serve(third) == 32


def test_it_is_saved_when_it_was_computed_again(make):
    engine = make(load="layered")
    tokens = stored(engine)
    request = request_of([*tokens, *range(30)], "again")
    engine.matched(request)
    namespace = engine.link.namespace_of(request)
    engine.store_does(lambda: namespace.drop_tail(namespace.match(tokens)))
    ids = begun(engine, request)
    engine.worker.end_step()
    engine.worker.finished(())
    engine.finish_saves()
    engine.step({request: (32, 63)})
    engine.check(request, ids, 80)
    engine.finish_saves()
    assert make(load="async").serve(request_of(request.all_token_ids, "third")) == 80


def test_the_time_that_layers_waited_is_no_prefill(make, monkeypatch):
    engine = make(load="layered")
    noted = []
    monkeypatch.setattr(
        engine.link.fetch, "note_prefill", lambda *args, **named: noted.append((args, named))
    )
    stored(engine)
    request = request_of([*range(65), *range(30)], "again")
    engine.serve(request)
    ((first, _), (second, named)) = noted
    assert first[0] == 65
    assert (second[0], named["cached_tokens"]) == (31, 64)
    assert second[1] >= 0


def test_a_load_that_is_later_than_anybody_waits_is_told_as_wrong(monkeypatch):
    """What is not there by the end of its step was computed upon: it must be computed again."""
    config = pt.Config(
        memory_bytes=8 << 20, segment_tokens=2 * BLOCK, copy_threads=1, load_timeout_s=0.05
    )
    with engines(monkeypatch, config) as make:
        engine = make(load="layered")
        request = request_of(stored(engine), "again")
        engine.matched(request)
        go_on = threading.Event()
        engine.link.thread.submit(at_once(lambda: go_on.wait(LIMIT_S)), MATCH)
        timer = threading.Timer(2.0, go_on.set)
        timer.start()
        ids = begun(engine, request)
        for layer in engine.pool.layer_ends:
            engine.worker.wait_for_layer(layer)
        engine.worker.end_step()
        engine.worker.finished(())
        if not engine.worker.take_load_errors() >= set(ids[:4]):
            engine.check(request, ids, 64)
        timer.join()


# -- verified ----------------------------------------------------------------------------------


def test_a_verified_load_is_there_before_it_is_claimed(make):
    engine = make(load="verified", match_wait_s=0.0)
    tokens = stored(make(load="verified"))
    request = request_of(tokens, "again")
    assert engine.ask(request) == (None, False)  # the match
    engine.finish_all()
    with busy(engine.link.thread):
        assert [engine.ask(request) for _ in range(3)] == [(None, False)] * 3  # the load
    engine.finish_all()
    assert engine.ask(request) == (64, False)
    ids = engine.give(request, 64)
    step = engine.step({request: (64, 1)}, blocks={"again": (ids, True)})
    engine.check(request, ids, 64)
    assert (step.loaded, step.errors) == (set(), set())
    facts = engine.end(request)[1]["ptstore"]
    assert (facts["owned_tokens"], facts["load_reason"]) == (64, "loaded")


def test_verified_requests_are_counted_once(make):
    engine = make(load="verified")
    tokens = stored(engine)
    request = request_of(tokens, "again")
    assert {engine.matched(request) for _ in range(3)} == {(64, False)}
    assert engine.serve(request) == 64
    engine.check_counters()


@pytest.mark.parametrize("have", [16, 64])
def test_verified_requests_are_counted_once_though_vllm_has_more_by_now(make, have):
    engine = make(load="verified")
    tokens = stored(engine)
    request = request_of([*tokens, 5], "again")
    assert engine.matched(request) == (64, False)
    assert engine.matched(request, have) == (64 - have, False)
    ids = engine.table(5)
    engine.compute(request, ids[: have // BLOCK])
    assert engine.serve(request, have, ids) == 64
    engine.check_counters()


def test_a_verified_load_begins_again_where_vllm_has_less_by_now(make):
    engine = make(load="verified")
    request = request_of(stored(engine), "again")
    assert engine.matched(request, 32) == (32, False)
    assert engine.matched(request) == (64, False)
    assert engine.serve(request) == 64


def test_a_verified_load_that_brings_less_claims_less(make):
    """And what did not come is stored anew, not built upon."""
    engine = make(load="verified", match_wait_s=0.0)
    tokens = stored(make())
    request = request_of(tokens, "again")
    namespace = engine.link.namespace_of(request)
    assert engine.ask(request) == (None, False)
    engine.finish_all()
    engine.store_does(lambda: namespace.drop_tail(namespace.match(tokens)))
    engine.ask(request)
    engine.finish_all()
    assert engine.ask(request) == (32, False)
    ids = engine.give(request, 32)
    engine.step({request: (32, 33)}, blocks={"again": (ids, True)})
    engine.check(request, ids, 64)
    engine.finish_saves()
    assert engine.link.saves["again"].planned_count == 1
    assert make().serve(request_of(tokens, "third")) == 64


def test_memory_of_loads_that_brought_nothing_is_given_back(make):
    """Else two such requests keep all others waiting until they end."""
    engine = make(load="verified", match_wait_s=0.0)
    others = make()
    for name in ("r1", "r2", "r3"):
        tokens = stored(others)
        request = request_of(tokens, name)
        namespace = engine.link.namespace_of(request)
        assert engine.ask(request) == (None, False)
        engine.finish_all()
        engine.store_does(namespace.clear)
        engine.ask(request)
        engine.finish_all()
        assert engine.ask(request) == (0, False)
        engine.give(request, 0)


def test_buffers_that_are_being_filled_are_not_handed_over(make):
    """vLLM has less of the prompt, then as much as at first: the first answer is void."""
    engine = make(load="verified")
    request = request_of(stored(engine), "again")
    assert engine.matched(request, BLOCK) == (64 - BLOCK, False)
    with busy(engine.link.thread):
        assert engine.ask(request, 0) == (None, False)
        assert engine.ask(request, BLOCK) == (None, False)
    engine.finish_all()
    assert engine.ask(request, BLOCK) == (64 - BLOCK, False)
    ids = engine.table(5)
    engine.compute(request, ids[:1])
    assert engine.serve(request, BLOCK, ids) == 64
    engine.check_counters()


def test_few_loads_are_in_host_memory_at_a_time(make):
    engine = make(load="verified", match_wait_s=0.0)
    tokens = stored(make())
    requests = [request_of(tokens, f"r{n}") for n in range(3)]
    for _ in range(3):
        answers = [engine.ask(request)[0] for request in requests]
        engine.finish_all()
    assert answers == [64, 64, None]
    engine.give(requests[0], 64)
    engine.ask(requests[2])
    engine.finish_all()
    assert engine.ask(requests[2]) == (64, False)


@pytest.mark.parametrize("is_done", [True, False])
def test_a_verified_load_of_who_ends_first_is_dropped_and_counted(make, is_done):
    engine = make(load="verified", match_wait_s=0.0)
    request = request_of(stored(make(load="verified")), "again")
    before = engine.link.store.stats()["tokens"]["asked"]
    engine.ask(request)
    engine.finish_all()
    with busy(engine.link.thread):
        engine.ask(request)
        if not is_done:
            tracked = engine.scheduler._tracked["again"]
            engine.link.thread.abandon([tracked.host_task])
    engine.finish_all()
    engine.end(request)
    engine.finish_all()
    asked = engine.link.store.stats()["tokens"]["asked"] - before
    assert asked == engine.link.counters["asked_tokens"] == (65 if is_done else 0)


def test_a_verified_load_that_fails_is_computed(make, caplog):
    engine = make(load="verified")
    request = request_of(stored(engine), "again")

    def fail(*args, **options):
        raise OSError("mine")

    engine.link.namespace_of(request).load = fail
    assert engine.matched(request) == (0, False)
    assert "mine" in caplog.text
    del engine.link.namespace_of(request).load
    engine.give(request, 0)
    assert engine.end(request)[1]["ptstore"]["load_reason"] == "error"


def test_a_verified_request_that_is_preempted_loads_anew(make):
    engine = make(load="verified")
    tokens = stored(engine)
    request = request_of(tokens, "again")
    assert engine.serve(request) == 64
    request.num_preemptions += 1
    assert engine.serve(request) == 64
    engine.check_counters()
    request.num_preemptions += 1
    engine.matched(request)
    request.num_preemptions += 1
    assert engine.serve(request) == 64
    engine.check_counters()


def test_a_verified_load_less_of_which_is_taken(make):
    engine = make(load="verified")
    request = request_of(stored(engine), "again")
    assert engine.matched(request) == (64, False)
    ids = engine.give(request, 32)
    engine.step({request: (32, 33)}, blocks={"again": (ids, True)})
    engine.check(request, ids, 64)
