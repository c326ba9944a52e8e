"""What the connector saves, when, and when vLLM has its blocks back."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import numpy as np
from vllm_flows import known, reasons
from vllm_stand_ins import BLOCK, CONFIG, engines, request_of

import ptstore_mpi as pt
from ptstore_mpi.integrations.vllm import link as link_module
from ptstore_mpi.integrations.vllm import store_thread


@pytest.fixture
def engine(make):
    return make()


def computed(engine, request, counts, ids=None):
    """Serve a request that the store knows nothing of, in chunks of so many tokens."""
    assert engine.matched(request) == (0, False)
    ids = engine.give(request, 0, ids)
    before = 0
    for count in counts:
        blocks = {request.request_id: (ids, True)} if not before else {}
        engine.step({request: (before, count)}, blocks=blocks)
        before += count
    return ids


@pytest.mark.parametrize(("tokens", "kept"), [(15, 0), (16, 16), (17, 16), (64, 64), (65, 64)])
def test_the_whole_blocks_of_a_prompt_are_saved(engine, tokens, kept):
    engine.serve(request_of(tokens))
    assert reasons(engine) == ([("r", "stored")] if kept else [])
    assert known(engine, [*range(tokens), 1]) == kept
    engine.check_counters()


def test_a_prompt_in_chunks_is_saved_with_the_last_of_its_blocks(engine):
    request = request_of(66)
    computed(engine, request, [20, 20])
    assert not engine.link.saves
    engine.step({request: (40, 24)})  # two tokens are left, and no block
    assert reasons(engine) == [("r", "stored")]
    engine.step({request: (64, 2)})
    engine.step({request: (66, 1)})
    assert reasons(engine) == [("r", "stored")]


def test_blocks_that_come_later_are_saved_with_the_others(engine):
    request = request_of(65)
    ids = engine.table(5)
    engine.matched(request)
    engine.give(request, 0, ids)
    engine.scheduler.blocks_given(request, ids[:2], 0)
    engine.step({request: (0, 32)}, blocks={"r": (ids[:2], True), "nobody": ([1], True)})
    engine.step({request: (32, 33)}, blocks={"r": (ids[2:], False)})
    assert reasons(engine) == [("r", "stored")]
    engine.serve(request_of(65, "again"))


def test_nothing_is_saved_where_all_of_it_came_from_the_store(engine):
    engine.serve(request_of(65))
    assert reasons(engine) == [("r", "stored")]
    engine.serve(request_of(65, "again"))
    assert reasons(engine) == [("r", "stored")]
    engine.serve(request_of([*range(65), *range(20)], "longer"))
    assert reasons(engine)[1:] == [("longer", "stored")]


def test_saves_begin_when_the_step_is_over(engine, held):
    request = request_of(65)
    engine.matched(request)
    ids = engine.give(request, 0)
    plan = engine.plan({request: (0, 65)}, {"r": (ids, True)})
    engine.worker.begin_step(plan)
    engine.worker.start_loads()
    engine.worker.end_step()
    engine.worker.finished(())
    assert engine.store_does(lambda: True, store_thread.NOTE), "the thread is idle"
    (task,) = engine.link.saves["r"].tasks
    assert not task.is_done
    engine.worker.finished(())
    engine.finish_saves()
    assert task.is_done


def test_a_long_prompt_is_saved_in_slices_between_which_others_match(make):
    engine = make(save_slice_tokens=32)
    request = request_of(160)
    matches = []
    namespace = engine.link.namespace_of(request)
    honest = namespace.store

    def store(tokens, kv, **options):
        matches.append(len(tokens))
        task = engine.link.thread.submit(
            store_thread.at_once(lambda: matches.append("match")), store_thread.MATCH
        )
        matches.append(task.is_done)
        return honest(tokens, kv, **options)

    namespace.store = store
    engine.serve(request)
    assert reasons(engine) == [("r", "stored")]
    assert matches == [each for end in range(32, 161, 32) for each in (end, False, "match")]
    assert engine.link.counters["saved_tokens"] == 160
    engine.check_counters()
    del namespace.store
    assert engine.serve(request_of([*range(160), 1], "again")) == 160


def test_a_slice_is_at_least_a_block(make):
    engine = make(save_slice_tokens=1)
    engine.serve(request_of(50))
    engine.finish_saves()
    assert engine.link.store.stats()["calls"]["store"] == 3


def test_saves_that_do_not_fit_the_queue_are_dropped_and_counted(make, held):
    engine = make(save_queue_tokens=100)
    requests = [request_of([n] * 64, f"r{n}") for n in range(3)]
    for request in requests:
        engine.matched(request)
        engine.give(request, 0)
    blocks = {each.request_id: (engine.blocks[each.request_id], True) for each in requests}
    plan = engine.plan(dict.fromkeys(requests, (0, 64)), blocks)
    assert [save.request_id for save in plan.saves] == ["r0"]
    assert [(each.request_id, each.reason) for each in engine.link.reports] == [
        ("r1", "queue_full"),
        ("r2", "queue_full"),
    ]
    assert engine.link.counters["save_queue_full_count"] == 2
    engine.worker.begin_step(plan)
    engine.worker.end_step()
    engine.worker.finished(())
    assert engine.link.queued_save_tokens == 64
    engine.finish_saves()
    assert engine.link.queued_save_tokens == 0
    engine.serve(request_of([7] * 64, "r7"))
    assert reasons(engine)[-1] == ("r7", "stored")


def test_a_queue_of_nothing_saves_nothing(make):
    engine = make(save_queue_tokens=0)
    engine.serve(request_of(64))
    assert reasons(engine) == [("r", "queue_full")]


def test_nothing_is_saved_where_the_settings_say_so(make):
    engine = make(save="none")
    engine.serve(request_of(64))
    assert reasons(engine) == []


def test_what_can_never_fit_is_told_once(monkeypatch):
    config = pt.Config(memory_bytes=1 << 17, segment_tokens=2 * BLOCK, copy_threads=1)
    with engines(monkeypatch, config) as make:
        engine = make()
        request = request_of(900)
        ids = [n % 63 + 1 for n in range(57)]
        computed(engine, request, [900], ids)
        ((_, reason),) = reasons(engine)
        assert reason == "too_large"
        engine.check_counters()


def test_an_error_of_a_save_is_told(engine, caplog):
    request = request_of(64)

    def fail(*args, **options):
        raise OSError("mine")

    engine.link.namespace_of(request).store = fail
    engine.serve(request)
    assert reasons(engine) == [("r", "error")]
    assert "mine" in caplog.text
    assert engine.end(request)[0] is False


def test_a_save_that_stops_half_way_says_why(make, monkeypatch):
    engine = make(save_slice_tokens=16)
    namespace = engine.link.namespace_of(request_of(1))
    honest, calls = namespace.store, []

    def store(tokens, kv, **options):
        calls.append(len(tokens))
        if len(calls) == 3:
            return pt.StoreResult(0, 0, "full")
        return honest(tokens, kv, **options)

    namespace.store = store
    engine.serve(request_of(64))
    assert reasons(engine) == [("r", "full")]
    assert calls == [16, 32, 48]
    assert engine.link.reports[0].tokens == 32
    assert engine.link.reports[0].bytes == 32 * engine.pool.layout.bytes_per_token


def test_what_a_short_load_did_not_bring_is_stored_anew(engine):
    """Not built upon: the load has shown that the prefix cannot be read."""
    engine.serve(request_of(65))
    engine.finish_saves()
    request = request_of([*range(65), *range(20)], "again")
    external, _ = engine.matched(request)
    namespace = engine.link.namespace_of(request)
    engine.store_does(lambda: namespace.drop_tail(namespace.match(request.all_token_ids)))
    ids = engine.give(request, external)
    engine.load_all()
    given = []
    honest = namespace.store

    def store(tokens, kv, *, verified_tokens):
        given.append((len(tokens), verified_tokens))
        return honest(tokens, kv, verified_tokens=verified_tokens)

    namespace.store = store
    engine.give(request, 0, ids)
    engine.step({request: (32, 53)}, blocks={"again": (ids, True)})
    engine.finish_saves()
    assert given == [(80, 32)]
    assert engine.link.reports[-1].tokens == 48
    engine.check_counters()


def test_later_slices_build_upon_earlier_ones_after_a_short_load(make):
    engine = make(save_slice_tokens=16)
    engine.serve(request_of(65))
    engine.finish_saves()
    request = request_of(65, "again")
    external, _ = engine.matched(request)
    namespace = engine.link.namespace_of(request)
    engine.store_does(namespace.clear)
    ids = engine.give(request, external)
    engine.load_all()
    given = []
    honest = namespace.store

    def store(tokens, kv, *, verified_tokens):
        given.append((len(tokens), verified_tokens))
        return honest(tokens, kv, verified_tokens=verified_tokens)

    namespace.store = store
    assert engine.matched(request) == (0, False)
    engine.give(request, 0, ids)
    engine.step({request: (0, 65)}, blocks={"again": (ids, True)})
    engine.finish_saves()
    assert given == [(16, 0), (32, 16), (48, 32), (64, 48)]
    del namespace.store
    assert engine.serve(request_of(65, "third")) == 64


def test_saves_of_nobody_end_at_once(engine):
    engine.link.end_saves("nobody", "preempted")
    assert engine.link.release_saves("nobody")
    assert not engine.link.reports


def test_reports_that_nobody_takes_are_bounded(make, monkeypatch):
    monkeypatch.setattr(link_module, "_MOST_REPORTS", 2)
    engine = make()
    for n in range(4):
        engine.serve(request_of([n] * 16, f"r{n}"))
    engine.finish_saves()
    assert len(engine.link.reports) == 2
    assert engine.link.counters["save_stored_count"] == 4


def test_a_store_of_other_segments_is_refused(monkeypatch):
    config = pt.Config(memory_bytes=1 << 20, segment_tokens=24, copy_threads=1)
    with (
        engines(monkeypatch, config) as make,
        pytest.raises(pt.ConfigError, match=r"multiple of vLLM's block_size \(16\), got 24"),
    ):
        make()


def test_tables_become_arrays():
    assert CONFIG.segment_tokens == 2 * BLOCK
    array = link_module.block_array([3, 1, 2], 35, 16)
    assert (array.tolist(), array.dtype) == ([3, 1], np.int64)
    assert link_module.whole_blocks(35, 16) == 32
