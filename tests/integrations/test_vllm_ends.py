"""Saves at a request's end, and who has its blocks meanwhile."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from vllm_flows import known, reasons, saving
from vllm_stand_ins import busy, request_of


@pytest.fixture
def engine(make):
    return make()


# -- decoded tokens ----------------------------------------------------------------------------


def decoded(engine, request, count):
    """Compute so many tokens behind a prompt, the last of which is only known."""
    request.all_token_ids += [100 + n for n in range(count)]
    request.num_computed_tokens = len(request.all_token_ids) - 1
    ids = engine.blocks[request.request_id]
    engine.compute(request, ids)
    return ids


@pytest.mark.parametrize(("count", "kept"), [(10, 48), (15, 48), (16, 64), (40, 80)])
def test_decoded_tokens_are_saved_at_the_end(make, count, kept):
    engine = make(save="all")
    request = request_of(49)
    engine.matched(request)
    engine.give(request, 0, engine.table(8))
    engine.step({request: (0, 49)}, blocks={"r": (engine.blocks["r"], True)})
    engine.finish_saves()
    decoded(engine, request, count)
    is_delayed, _ = engine.end(request)
    assert engine.link.counters["saved_tokens"] <= kept
    engine.finish_all()
    step = engine.step(ended={"r"})
    assert step.saved == ({"r"} if is_delayed else set())
    assert known(engine, request.all_token_ids) == kept
    again = request_of(request.all_token_ids, "again")
    assert engine.serve(again) == kept
    engine.check_counters()


def test_decoded_tokens_are_not_saved_by_default(engine):
    request = request_of(49)
    engine.serve(request, ids=engine.table(8))
    engine.finish_saves()
    decoded(engine, request, 40)
    assert engine.end(request)[0] is False
    assert known(engine, request.all_token_ids) == 48


def test_decoded_tokens_of_who_does_not_want_it_are_not_saved(make):
    engine = make(save="all")
    for request in (
        request_of(49, "r1", kv_transfer_params={"ptstore_save": False}),
        request_of(49, "r2", prompt_embeds="embeddings"),
    ):
        engine.matched(request)
        engine.give(request, 0, engine.table(8))
        decoded(engine, request, 40) if request.prompt_embeds is None else None
        assert engine.end(request)[0] is False
    assert not engine.link.saves


def test_decoded_tokens_that_find_no_room_are_dropped(make):
    engine = make(save="all", save_queue_tokens=60)
    request = request_of(49)
    engine.serve(request, ids=engine.table(8))
    engine.finish_saves()
    decoded(engine, request, 40)
    assert engine.end(request)[0] is False
    assert reasons(engine) == [("r", "stored"), ("r", "queue_full")]


def test_what_is_loaded_when_its_request_ends_is_not_saved(make):
    engine = make(save="all")
    engine.serve(request_of(65))
    engine.finish_saves()
    request = request_of(65, "orphan")
    engine.give(request, engine.matched(request)[0])
    with busy(engine.link.thread):
        engine.step()
        engine.end(request)
    assert "orphan" not in engine.link.saves


# -- who has the blocks ------------------------------------------------------------------------


def test_blocks_are_given_back_after_their_request_was_announced(engine):
    request = request_of(65)
    for task in saving(engine, request):
        assert not task.is_done
        assert engine.end(request)[0] is True
        assert engine.step().saved == set(), "not announced"
        assert engine.step(ended={"r", "stranger"}).saved == set(), "not saved"
    engine.finish_saves()
    assert engine.link.delayed == {"r"}
    assert engine.step().saved == {"r"}
    assert engine.step().saved == set()
    assert not engine.link.delayed
    assert not engine.link.saves


def test_a_request_that_is_saved_before_it_is_announced_waits_for_that(engine):
    """vLLM knows only what it has announced."""
    request = request_of(65)
    for _ in saving(engine, request):
        assert engine.end(request)[0] is True
    engine.finish_saves()
    assert engine.step().saved == set()
    assert engine.step(ended={"r"}).saved == {"r"}


def test_a_save_that_ends_first_delays_nobody(engine):
    request = request_of(65)
    engine.serve(request)
    engine.finish_saves()
    assert engine.end(request)[0] is False
    assert engine.step(ended={"r"}).saved == set()
    assert not engine.link.saves


def test_a_preempted_request_is_not_read_any_more(engine):
    request = request_of(65)
    for task in saving(engine, request):
        request.num_preemptions += 1
        plan = engine.plan()
        assert plan.preempted == ["r"]
        assert not task.is_done
    engine.worker.begin_step(plan)
    assert task.is_done


def test_a_cancelled_save_is_told_and_done_again(engine, held):
    request = request_of(65)
    engine.matched(request)
    ids = engine.give(request, 0)
    plan = engine.plan({request: (0, 65)}, {"r": (ids, True)})
    engine.worker.begin_step(plan)
    engine.worker.end_step()
    engine.worker.finished(())
    request.num_preemptions += 1
    assert engine.matched(request) == (0, False)
    plan = engine.plan()
    assert plan.preempted == ["r"]
    engine.worker.begin_step(plan)
    assert [(each.request_id, each.reason) for each in engine.link.reports] == [("r", "preempted")]
    engine.serve(request)
    assert reasons(engine) == [("r", "preempted"), ("r", "stored")]
    assert known(engine, list(range(65))) == 64
    engine.check_counters()


def test_what_a_cancelled_save_had_stored_counts(make):
    """Its first slices are visible to all."""
    engine = make(save_slice_tokens=16)
    request = request_of(65)
    namespace = engine.link.namespace_of(request)
    honest = namespace.store

    def store(tokens, kv, **options):
        result = honest(tokens, kv, **options)
        if len(tokens) == 32:
            for task in engine.link.saves["r"].tasks:
                task.is_unwanted = True  # as `cancel` does, which waits
        return result

    namespace.store = store
    engine.serve(request)
    engine.finish_saves()
    engine.link.end_saves("r", "preempted")
    del namespace.store
    assert known(engine, list(range(65))) == 32
    assert engine.link.counters["saved_tokens"] == 32
    engine.check_counters()


def test_a_request_that_ends_after_it_was_preempted_is_not_read_any_more(engine):
    """As after vLLM's ``reset_prefix_cache(reset_running_requests=True)``, outside of a step."""
    request = request_of(65)
    for task in saving(engine, request):
        request.num_preemptions += 1  # its blocks are free
        engine.end(request, [])
        plan = engine.plan()
        assert not task.is_done
    engine.worker.begin_step(plan)
    assert task.is_cancelled
