"""What is reused of a prompt, and by whom: chunks, lengths, tenants, wishes."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm_engines import BATCH, BLOCK, books_kept


def test_a_prompt_in_chunks(engine, plain, tokens):
    prefix = tokens(4 * BATCH + BLOCK)
    prompts = [prefix + tokens(BATCH + 9), prefix + tokens(7)]
    right = plain.answer_alone(*prompts)
    with books_kept(engine):
        assert engine.answer_alone(prompts[0]) == right[:1]
    engine.check_stored(prompts[0], 5 * BATCH + BLOCK)
    engine.forget()
    with books_kept(engine) as counted:
        (answer,) = engine.answer(prompts[1])
    assert answer.tokens == right[1]
    assert counted["owned"] == len(prefix)
    assert answer.facts["owned_tokens"] == len(prefix)
    assert answer.facts["recomputed_tokens"] == 7


@pytest.mark.parametrize("is_stored", [False, True])
def test_several_with_one_prefix(engine, plain, tokens, is_stored):
    prefix = tokens(6 * BLOCK)
    prompts = [prefix + tokens(length) for length in (1, 9, 17, BLOCK)]
    right = plain.answer_alone(*prompts)
    if is_stored:
        engine.answer_alone(prefix)
    engine.forget()
    with books_kept(engine) as counted:
        answers = engine.answer(*prompts)
    assert [answer.tokens for answer in answers] == right
    assert counted["asked"] == sum(map(len, prompts))
    if is_stored:
        assert counted["owned"] + counted["engine"] == 4 * len(prefix)
    engine.check_stored(prompts[-1], 6 * BLOCK)


@pytest.mark.parametrize(
    ("length", "known"),
    [(4 * BLOCK, 3 * BLOCK), (4 * BLOCK + 1, 4 * BLOCK), (4 * BLOCK - 1, 3 * BLOCK),
     (BLOCK + 1, BLOCK), (BLOCK, 0), (BLOCK - 1, 0), (1, 0)],
)  # fmt: skip
def test_the_same_prompt_again(engine, plain, tokens, length, known):
    """Its last token is always computed."""
    prompt = tokens(length)
    right = plain.answer_alone(prompt)
    with books_kept(engine) as counted:
        assert engine.answer_alone(prompt) == right
        engine.forget()
        (answer,) = engine.answer(prompt)
    assert answer.tokens == right[0]
    assert (counted["owned"], counted["recomputed"]) == (known, 2 * length - known)
    assert answer.facts["recomputed_tokens"] == length - known


def test_salts_set_tenants_apart(engine, plain, tokens):
    prompt = tokens(4 * BLOCK + 3)
    right = plain.answer_alone(prompt)
    for salt in ("one", "other", None):
        engine.forget()
        with books_kept(engine) as counted:
            assert engine.answer_alone(prompt, salt=salt) == right
        assert counted["owned"] == 0
    for salt in ("one", "other", None):
        engine.forget()
        with books_kept(engine) as counted:
            assert engine.answer_alone(prompt, salt=salt) == right
        assert counted["owned"] == 4 * BLOCK


def test_logprobs_of_the_prompt_are_computed(engine, plain, tokens):
    prompt = tokens(4 * BLOCK + 3)
    (right,) = plain.answer(prompt, prompt_logprobs=1)
    engine.answer(prompt)
    engine.forget()
    with books_kept(engine) as counted:
        (answer,) = engine.answer(prompt, prompt_logprobs=1)
    assert answer.tokens == right.tokens
    assert counted["recomputed"] == counted["asked"] == len(prompt)
    assert answer.facts["reason"] == "prompt_logprobs"
    for found, expected in zip(answer.prompt_logprobs[1:], right.prompt_logprobs[1:], strict=True):
        assert found.keys() == expected.keys()
        for token, logprob in found.items():
            assert abs(logprob.logprob - expected[token].logprob) < 1e-3


def test_skip_reading_is_obeyed(engine, plain, tokens):
    prompt = tokens(4 * BLOCK + 3)
    engine.answer(prompt)
    engine.forget()
    with books_kept(engine) as counted:
        (answer,) = engine.answer(prompt, skip_reading_prefix_cache=True)
    assert [answer.tokens] == plain.answer_alone(prompt)
    assert counted["recomputed"] == counted["asked"] == len(prompt)
    assert answer.facts["reason"] == "skip_reading"


def test_a_request_may_opt_out(engine, plain, tokens):
    prompt = tokens(4 * BLOCK + 3)
    right = plain.answer_alone(prompt)
    with books_kept(engine) as counted:
        assert engine.answer_alone(prompt, wishes={"ptstore_save": False}) == right
        engine.forget()
        assert engine.known_tokens(prompt) == 0
        assert engine.answer_alone(prompt) == right
        engine.forget()
        (answer,) = engine.answer(prompt, wishes={"ptstore_load": False})
    assert answer.tokens == right[0]
    assert answer.facts["reason"] == "not_wanted"
    assert counted["recomputed"] == counted["asked"] == 3 * len(prompt)
