"""Requests that are aborted at every step: nothing stays lent, tracked or held."""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("vllm")

from vllm_engines import BLOCK, before_each, books_kept

STEPS = 7
ABORTS = 334  # in each mode


@pytest.mark.parametrize("slow", ["none", "load", "store"])
def test_after_every_step(engine, plain, tokens, slow):
    prefix = tokens(9 * BLOCK)
    engine.answer_alone(prefix)
    last = prefix + tokens(3)
    (right,) = plain.answer_alone(last)
    for count in range(STEPS):
        prompts = {"loads": prefix + tokens(2 * BLOCK + 3), "saves": tokens(9 * BLOCK + 3)}
        for what, prompt in prompts.items():
            engine.forget()
            act = (lambda: None) if slow == "none" else (lambda: time.sleep(0.02))
            with books_kept(engine), before_each("load" if slow == "none" else slow, act):
                name = engine.add(prompt, max_tokens=STEPS)
                for _ in range(count):
                    engine.step()
                engine.abort(name)
                engine.settle()
            engine.check_idle()
            assert engine.link.thread is not None, what
    engine.forget()
    assert engine.answer_alone(last) == [right]
    engine.check_stored(last, 9 * BLOCK)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand(engine, plain, tokens):
    """Several at a time, loading, saving and decoding, with conversations that grow."""
    rng = random.Random(1)
    prefixes = [tokens(length * BLOCK) for length in (1, 4, 9, 14)]
    engine.answer_alone(*prefixes)
    slow = before_each("load", lambda: time.sleep(rng.choice((0, 0, 0, 4e-3))))
    with books_kept(engine), slow:
        alive, aborted = [], 0
        while aborted < ABORTS:
            while len(alive) < 4:
                prompt = rng.choice(prefixes) + tokens(rng.randrange(1, 4 * BLOCK))
                alive.append(engine.add(prompt, max_tokens=8))
            for _ in range(rng.randrange(3)):
                engine.step()
            alive = [name for name in alive if not engine.answers[name].reason]
            if alive:
                aborted += 1
                engine.abort(alive.pop(rng.randrange(len(alive))))
            if rng.random() < 0.02:
                engine.abort(*alive)
                engine.forget()
                alive = []
        engine.abort(*alive)
        engine.settle()
    engine.check_idle()
    engine.forget()
    prompts = [prefix + tokens(3) for prefix in prefixes]
    assert [answer.tokens for answer in engine.answer(*prompts)] == plain.answer_alone(*prompts)
    for prompt in prompts:
        engine.check_stored(prompt, len(prompt) // BLOCK * BLOCK)
