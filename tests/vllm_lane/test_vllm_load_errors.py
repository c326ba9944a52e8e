"""Loads that bring less than was matched: vLLM computes the rest, and only right KV is stored."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_engines import BLOCK, before_each, books_kept, once

SEGMENT = 128
GARBAGE = 3.0


def dirty(engine):
    """Fill all blocks of vLLM with what no model computes."""
    for pages in engine.link.pool.pages:
        pages.fill_(GARBAGE)


def drop_tail(engine, prompt):
    namespace = engine.namespace()
    assert namespace.drop_tail(namespace.match(np.array(prompt, np.uint32)))


@pytest.mark.parametrize("suffix_tokens", [5, SEGMENT + 5, 3 * SEGMENT + 5])
def test_nothing_is_there_any_more(engine, plain, tokens, suffix_tokens):
    prefix = tokens(2 * SEGMENT)
    prompt = prefix + tokens(suffix_tokens)
    right = plain.answer_alone(prefix, prompt)
    assert engine.answer_alone(prefix) == right[:1]
    engine.forget()
    dirty(engine)
    clear = engine.namespace().clear
    with books_kept(engine) as counted, before_each("load", once(clear)):
        assert engine.answer_alone(prompt) == right[1:]
    assert counted["owned"] == 0
    assert counted["asked"] == counted["recomputed"] == len(prompt)
    engine.check_stored(prompt, len(prompt) // BLOCK * BLOCK)


def test_a_part_is_there(engine, plain, tokens):
    prefix = tokens(3 * SEGMENT)
    prompt = prefix + tokens(BLOCK + 5)
    right = plain.answer_alone(prefix, prompt)
    for end in (SEGMENT, 2 * SEGMENT, 3 * SEGMENT):  # an increment each
        engine.answer_alone(prefix[:end])
    engine.forget()
    dirty(engine)
    lose = once(lambda: drop_tail(engine, [*prefix, 1]))
    with books_kept(engine) as counted, before_each("load", lose):
        assert engine.answer_alone(prompt) == right[1:]
    assert counted["owned"] == 2 * SEGMENT
    assert counted["recomputed"] == SEGMENT + BLOCK + 5
    engine.check_stored(prompt, len(prompt) // BLOCK * BLOCK)


def test_several_share_what_is_lost(engine, plain, tokens):
    """They find it in vLLM's own cache, where it was entered before it was there."""
    prefix = tokens(4 * SEGMENT)
    prompts = [prefix + tokens(9) for _ in range(4)]
    right = plain.answer_alone(*prompts)
    engine.answer_alone(prefix)
    engine.forget()
    dirty(engine)
    with books_kept(engine), before_each("load", once(engine.namespace().clear)):
        answers = engine.answer(*prompts)
    assert [answer.tokens for answer in answers] == right
    engine.check_stored(prompts[0], 4 * SEGMENT)


def test_a_load_waits_longer_than_its_deadline(engine, plain, tokens, monkeypatch):
    """The store's thread is busy with something else meanwhile: a store may take far longer."""
    prefix = tokens(SEGMENT)
    prompt = prefix + tokens(20)
    right = plain.answer_alone(prefix, prompt)
    assert engine.answer_alone(prefix) == right[:1]
    engine.forget()
    dirty(engine)
    store = engine.attachment.store
    short = msgspec.structs.replace(store.config, load_timeout_s=0.1)
    monkeypatch.setattr(store, "config", short)
    with books_kept(engine), before_each("load", lambda: time.sleep(0.5)):
        assert engine.answer_alone(prompt) == right[1:]


def test_a_failed_load_gives_its_memory_back(engine, plain, tokens):
    """A request that goes on without what it was to load leaves room for others' loads."""
    prefixes = [tokens(SEGMENT) for _ in range(4)]
    engine.answer_alone(*prefixes)
    engine.forget()
    clear = engine.namespace().clear
    names = [engine.add([*prefix, 5], max_tokens=100) for prefix in prefixes[:3]]
    with before_each("load", clear):
        engine.step_until(lambda: all(engine.answers[name].tokens for name in names))
    held = [tracked.host for tracked in engine.tracked.values()]
    engine.abort(*names)
    assert held == [None] * 3


def test_what_vllm_entered_before_it_was_there_is_forgotten(engine, plain, tokens):
    """The request that would compute it again is aborted first."""
    prefix = tokens(2 * SEGMENT)
    prompt, other = prefix + tokens(BLOCK + 5), prefix + tokens(9)
    right = plain.answer_alone(prefix, other)
    assert engine.answer_alone(prefix) == right[:1]
    engine.forget()
    dirty(engine)
    with before_each("load", once(engine.namespace().clear)):
        name = engine.add(prompt)
        engine.step_until(lambda: engine.link.failed or engine.answers[name].tokens)
        engine.abort(name)
    assert engine.answer_alone(other) == right[1:]
    engine.check_stored(other, 2 * SEGMENT)
