"""vLLM takes blocks away from requests while they are saved, or while another one is loaded."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm")

from vllm_engines import BLOCK, before_each, books_kept

PATIENCE_S = 5.0


def preempted(engine):
    return sum(request.num_preemptions for request in list(engine.scheduler.requests.values()))


def until_preempted(engine, fit):
    """Return what waits until somebody was preempted, as soon as no more requests fit in."""

    def wait():
        until_s = time.monotonic() + PATIENCE_S
        while len(engine.scheduler.running) >= fit and time.monotonic() < until_s:
            time.sleep(1e-3)

    return wait


@pytest.mark.parametrize("is_slow", [True, False])
def test_while_saving(small, plain, tokens, is_slow):
    prompts = [tokens(5 * BLOCK + 3) for _ in range(4)]
    right = [plain.answer(prompt, max_tokens=150)[0].tokens for prompt in prompts]
    small.attachment.take_saves()
    with books_kept(small):
        names = [small.add(prompt, max_tokens=150) for prompt in prompts]
        with before_each("store", until_preempted(small, 3) if is_slow else lambda: None):
            small.step_until(lambda: preempted(small) > 0)
        answers = small.finish(*names)
    assert [answer.tokens for answer in answers] == right
    saves = [reason for _, _, reason, _ in small.attachment.take_saves()]
    assert ("preempted" in saves) == is_slow, saves
    for prompt, answer in zip(prompts, right, strict=True):
        whole = [*prompt, *answer]
        small.check_stored(whole, (len(whole) - 1) // BLOCK * BLOCK)
    small.forget()
    with books_kept(small):
        assert [small.answer(p, max_tokens=150)[0].tokens for p in prompts] == right


def test_while_another_loads(small, plain, tokens):
    if small.mode != "async":
        pytest.skip("the request has no blocks before it is loaded, or is loaded within a step")
    prefix = tokens(6 * BLOCK)
    loading, *others = prefix + tokens(5), tokens(5 * BLOCK), tokens(5 * BLOCK)
    right = [plain.answer(prompt, max_tokens=120)[0].tokens for prompt in (loading, *others)]
    small.answer_alone(prefix)
    small.forget()
    with books_kept(small) as counted:
        names = [small.add(prompt, max_tokens=120) for prompt in others]
        small.step_until(lambda: all(small.answers[name].tokens for name in names))
        with before_each("load", until_preempted(small, 2)):
            names.insert(0, small.add(loading, max_tokens=120))
            small.step_until(lambda: preempted(small) > 0)
        answers = small.finish(*names)
    assert [answer.tokens for answer in answers] == right
    assert counted["owned"] >= 6 * BLOCK


def test_everybody_at_once(engine, plain, tokens):
    """`reset_prefix_cache` preempts all that runs and resumes it in the same step."""
    prompts = [tokens(6 * BLOCK + 3) for _ in range(3)]
    right = [plain.answer(prompt, max_tokens=20)[0].tokens for prompt in prompts]
    with books_kept(engine), before_each("store", lambda: time.sleep(0.05)):
        names = [engine.add(prompt, max_tokens=20) for prompt in prompts]
        engine.step_until(lambda: all(engine.answers[name].tokens for name in names))
        assert engine.llm.reset_prefix_cache(reset_running_requests=True)
        answers = engine.finish(*names)
    assert [answer.tokens for answer in answers] == right
    for prompt in prompts:
        engine.check_stored(prompt, 6 * BLOCK)
