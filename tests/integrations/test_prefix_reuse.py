from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from tiny_model import VOCABULARY, tiny_llama

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, LayoutMismatchError
from ptstore_mpi.integrations.model_facts import cache_argument
from ptstore_mpi.integrations.transformers import PrefixReuse, TransformersEngine

CONFIG = Config(memory_bytes=16 << 20, segment_tokens=32, copy_threads=1)


def with_reuse(engine, work, salt=""):
    """Run `work(reuse, store)` in a job of one process."""
    return ptstore_mpi.run(
        lambda store: work(PrefixReuse(engine, engine.namespace(store, salt)), store), CONFIG
    )


def split_recompute(engine, prompt, prefix_tokens):
    buffers = engine.allocate(len(prompt))
    if prefix_tokens:
        engine.prefill(prompt[:prefix_tokens], buffers)
    return engine.prefill(prompt, buffers, prefix_tokens)


def test_second_question_reuses_the_document(engine, tokens):
    document, questions = tokens(100), [tokens(9, seed=2), tokens(13, seed=3)]

    def work(reuse, store):
        answers = []
        for question in questions:
            answers.append(reuse.first_token(document + question))
            answers.append(reuse.keep(answers[-1]))
        return *answers, store.stats()

    cold, kept, warm, kept_more, stats = with_reuse(engine, work)
    assert (cold.loaded_tokens, cold.reason, cold.recomputed_tokens) == (0, "cold", 109)
    assert (kept.reason, kept.tokens) == ("stored", 96)
    assert (warm.loaded_tokens, warm.reason, warm.prompt_tokens) == (96, "diverged", 113)
    assert {source: n for source, n in warm.by_source.items() if n} == {"owned": 96}
    assert (kept_more.reason, kept_more.tokens) == ("stored", 16)
    assert stats["tokens"]["asked"] == 109 + 113

    expected = split_recompute(engine, document + questions[1], 96)
    assert np.array_equal(warm.logits, expected.logits)
    assert warm.token == expected.token
    for got, want in zip(warm.kv.keys + warm.kv.values, expected.kv.keys + expected.kv.values,
                         strict=True):  # fmt: skip
        assert torch.equal(got[:, :113], want[:, :113])


def test_loaded_bytes_are_the_computed_ones(engine, tokens):
    prompt = tokens(65)

    def work(reuse, _):
        first = reuse.first_token(prompt)
        reuse.keep(first)
        out = engine.allocate(65)
        for tensor in out.keys + out.values:
            tensor.fill_(7)
        got = reuse.namespace.load(reuse.namespace.match(prompt), out.views(16))
        return first.kv, out, got.tokens

    kv, out, loaded = with_reuse(engine, work)
    assert loaded == 64
    for source, target in zip(kv.keys + kv.values, out.keys + out.values, strict=True):
        assert torch.equal(source[:, :64], target[:, :64])
        assert torch.equal(target[:, 64:], torch.full_like(target[:, 64:], 7))


def test_kept_blocks_serve_a_prompt_that_ends_inside_a_block(engine, tokens):
    prompt = tokens(80)

    def work(reuse, _):
        reuse.keep(reuse.first_token(prompt))
        return [reuse.first_token(prompt[:n]) for n in (80, 50, 17, 16, 5)]

    answers = with_reuse(engine, work)
    assert [answer.loaded_tokens for answer in answers] == [64, 48, 16, 0, 0]
    assert [answer.reason for answer in answers] == ["whole"] * 3 + ["short"] * 2
    for answer in answers:
        prompt_part = prompt[: answer.prompt_tokens]
        expected = split_recompute(engine, prompt_part, answer.loaded_tokens)
        assert np.array_equal(answer.logits, expected.logits)


def test_a_prompt_without_a_whole_block_is_kept_as_nothing(engine, tokens):
    kept = with_reuse(engine, lambda reuse, _: reuse.keep(reuse.first_token(tokens(15))))
    assert (kept.tokens, kept.reason) == (0, "short")


def test_float32_equals_one_prefill_of_the_whole_prompt(tokens):
    engine = TransformersEngine(tiny_llama("float32"), model_id="tiny")
    prompt = tokens(120)

    def work(reuse, _):
        reuse.keep(reuse.first_token(prompt[:70]))
        return reuse.first_token(prompt)

    warm, whole = with_reuse(engine, work), engine.prefill(prompt)
    assert warm.loaded_tokens == 64
    assert warm.token == whole.token
    assert np.abs(warm.logits - whole.logits).max() <= 1e-4


def test_keep_names_the_kv_by_the_tokens_it_was_computed_from(engine, tokens):
    prompt = np.array(tokens(40))

    def work(reuse, _):
        answer = reuse.first_token(prompt)
        prompt[:] = 1  # the caller reuses its memory
        reuse.keep(answer)
        return reuse.first_token(tokens(40)), reuse.first_token(prompt)

    right, wrong = with_reuse(engine, work)
    assert (right.loaded_tokens, wrong.loaded_tokens) == (32, 0)


def test_decoding_after_the_first_token_does_not_disturb_what_is_kept(engine, tokens):
    prompt = tokens(35)

    def work(reuse, _):
        answer = reuse.first_token(prompt)
        with torch.inference_mode():
            cache = {cache_argument(engine.model): answer.cache}
            engine.model(torch.tensor([[answer.token]]), **cache, use_cache=True)
        reuse.keep(answer)
        return reuse.first_token(prompt)

    warm = with_reuse(engine, work)
    assert warm.loaded_tokens == 32
    assert np.array_equal(warm.logits, split_recompute(engine, prompt, 32).logits)


def test_tenants_and_models_do_not_share(engine, tokens):
    other = TransformersEngine(engine.model, model_id="other")
    prompt = tokens(40)

    def work(reuse, store):
        reuse.keep(reuse.first_token(prompt))
        strangers = [engine.namespace(store, "tenant"), other.namespace(store)]
        return [PrefixReuse(engine, ns).first_token(prompt).loaded_tokens for ns in strangers]

    assert with_reuse(engine, work) == [0, 0]


def test_times_add_up_to_the_time_to_first_token(engine, tokens):
    answer = with_reuse(engine, lambda reuse, _: reuse.first_token(tokens(40)))
    parts = (answer.match_s, answer.load_s, answer.prefill_s)
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(answer.ttft_s)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], ValueError),
        ([1.5], TypeError),
        ([-1] * 20, ValueError),
        ([VOCABULARY] * 20, ValueError),
    ],
)
def test_prompts_that_are_none_are_refused(engine, prompt, error):
    with pytest.raises(error, match="expected"):
        with_reuse(engine, lambda reuse, _: reuse.first_token(prompt))


def test_a_namespace_of_another_layout_is_refused(engine):
    layout = KVLayout.for_attention(layers=1, kv_heads=1, head_dim=8, dtype="float32")

    def work(store):
        return PrefixReuse(engine, store.namespace("model", layout))

    with pytest.raises(
        LayoutMismatchError, match=r"4 tensors, blocks of 16 tokens .* got one of 2"
    ):
        ptstore_mpi.run(work, CONFIG)
