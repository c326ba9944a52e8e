"""The scheduler asks the connector as often as it likes: equal questions, equal answers, no traces.

It asks again while a match goes on, while its own cache is full, and after a preemption.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm_engines import BLOCK, books_kept


def ask(engine, request, have_tokens):
    """Ask until the match has ended."""
    while True:
        tokens, is_aside = engine.connector.get_num_new_matched_tokens(request, have_tokens)
        if tokens is not None:
            return tokens, is_aside


def counts(engine):
    engine.drain()
    (server,) = engine.on_thread(engine.attachment.store.server_stats)
    del server["request_count"]  # asking for it is one
    stats = engine.attachment.store.stats()
    return server, stats["tokens"], stats["calls"], dict(engine.link.counters)


def test_asking_again_changes_nothing(engine, plain, tokens):
    prompt = tokens(5 * BLOCK + 7)
    right = plain.answer_alone(prompt)
    with books_kept(engine) as counted:
        assert engine.answer_alone(prompt) == right
        engine.forget()
        name = engine.add(prompt)
        request = engine.request(name)
        first = ask(engine, request, 0)
        assert first == (5 * BLOCK, engine.mode == "async")
        before = counts(engine)
        for _ in range(50):
            assert ask(engine, request, 0) == first
        assert counts(engine) == before
        assert [answer.tokens for answer in engine.finish(name)] == right
    assert counted["asked"] == 2 * len(prompt)


def test_another_question_is_counted_once_all_the_same(engine, plain, tokens):
    """vLLM's own cache holds more of the prompt by the time it asks again."""
    prompt = tokens(5 * BLOCK + 7)
    right = plain.answer_alone(prompt)
    assert engine.answer_alone(prompt) == right
    engine.forget()
    with books_kept(engine) as counted:
        name = engine.add(prompt)
        for have_tokens in (0, BLOCK, 0, 2 * BLOCK):
            found, _ = ask(engine, engine.request(name), have_tokens)
            assert found == 5 * BLOCK - have_tokens
        assert [answer.tokens for answer in engine.finish(name)] == right
    assert counted["asked"] == len(prompt)


def test_requests_wait_for_a_full_cache(small, plain, tokens):
    prefixes = [tokens(7 * BLOCK) for _ in range(4)]
    prompts = [prefix + tokens(5) for prefix in prefixes]
    right = [plain.answer(prompt, max_tokens=40)[0].tokens for prompt in prompts]
    small.answer_alone(*prefixes)
    small.forget()
    asked = []
    scheduler = small.connector._scheduler
    matched_tokens = scheduler.matched_tokens
    scheduler.matched_tokens = lambda *given: asked.append(given) or matched_tokens(*given)
    try:
        with books_kept(small) as counted:
            answers = small.answer(*prompts, max_tokens=40)
    finally:
        del scheduler.matched_tokens
    assert [answer.tokens for answer in answers] == right
    assert len(asked) > 5 * len(prompts), "the cache was never full"
    assert counted["owned"] >= 4 * 7 * BLOCK  # more where somebody was preempted
