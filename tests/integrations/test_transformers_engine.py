from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from tiny_model import VOCABULARY, tiny_llama
from transformers import DynamicCache

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.integrations.model_facts import cache_argument
from ptstore_mpi.integrations.transformers import (
    TransformersEngine,
    UnsupportedModelError,
    default_thread_count,
)


def library_split(model, tokens, prefix_tokens):
    """Prefill prefix, then suffix, by the library's own cache; return cache and logits."""
    cache = DynamicCache(config=model.config)
    options = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    inputs = torch.tensor([tokens])
    with torch.inference_mode():
        if prefix_tokens:
            model(inputs[:, :prefix_tokens], **options)
        output = model(inputs[:, prefix_tokens:], **options)
    return cache, output.logits[0, -1].float().numpy()


def test_layout_is_what_the_model_keeps(engine):
    width = {"float32": 4, "bfloat16": 2}[str(engine.model.dtype).removeprefix("torch.")]
    assert len(engine.layout.tensors) == 4
    assert engine.layout.block_bytes == 4 * 2 * 16 * 16 * width


@pytest.mark.parametrize(("total", "prefix"), [(1, 0), (75, 0), (75, 48), (75, 74), (64, 48)])
def test_prefill_equals_the_library_bit_for_bit(engine, tokens, total, prefix):
    prompt = tokens(total)
    cache, logits = library_split(engine.model, prompt, prefix)
    buffers = engine.allocate(total)
    if prefix:
        assert engine.prefill(prompt[:prefix], buffers).kv is buffers
    result = engine.prefill(prompt, buffers, prefix)
    assert np.array_equal(result.logits, logits)
    assert result.token == int(logits.argmax())
    for layer, keys, values in zip(cache.layers, buffers.keys, buffers.values, strict=True):
        assert torch.equal(keys[:, :total], layer.keys[0])
        assert torch.equal(values[:, :total], layer.values[0])


def test_prefill_reads_the_prefix_from_the_buffers(engine, tokens):
    prompt = tokens(40)
    buffers = engine.prefill(prompt).kv
    right = engine.prefill(prompt, buffers, 32).logits
    buffers.values[1][:, :16].zero_()
    assert not np.array_equal(engine.prefill(prompt, buffers, 32).logits, right)


def test_decoding_goes_on_from_the_cache(engine, tokens):
    prompt = tokens(30)
    result = engine.prefill(prompt)
    follow = []
    token, name = result.token, cache_argument(engine.model)
    for _ in range(6):  # over the room of 32 tokens
        follow.append(token)
        with torch.inference_mode():
            output = engine.model(torch.tensor([[token]]), **{name: result.cache}, use_cache=True)
        token = int(output.logits[0, -1].argmax())
    generated = engine.model.generate(
        torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert follow == generated[0, 30:].tolist()


def test_capacity_is_whole_blocks(engine):
    assert [engine.allocate(n).tokens for n in (1, 16, 17)] == [16, 16, 32]


@pytest.mark.parametrize(
    ("count", "cached", "message"),
    [
        (0, 0, "at least 1 token"),
        (16, 16, "expected 0 to 15"),
        (17, -1, "expected 0 to 16"),
        (40, 16, "buffers for 40 tokens, got 32"),
    ],
)
def test_prefill_refuses_by_name(engine, tokens, count, cached, message):
    with pytest.raises(ValueError, match=message):
        engine.prefill(tokens(count), engine.allocate(32), cached)


def test_prefill_without_buffers_has_no_prefix(engine, tokens):
    with pytest.raises(ValueError, match="expected 0 to 0 for a prompt of 20 tokens"):
        engine.prefill(tokens(20), None, 16)


def test_prefill_refuses_tokens_that_are_no_integers(engine):
    with pytest.raises(TypeError, match="expected integer tokens, got float64"):
        engine.prefill([3.0, 4.0])


def test_prefill_refuses_prompts_beyond_the_context(engine, tokens):
    with pytest.raises(ValueError, match="expected at most 512 tokens, got 513"):
        engine.prefill(tokens(513))


def test_prefill_refuses_tokens_outside_the_vocabulary(engine):
    with pytest.raises(ValueError, match="expected tokens 0 to 210, got 3 to 211"):
        engine.prefill([3, VOCABULARY])


def test_sliding_windows_are_refused():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=16,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="found DynamicSlidingWindowLayer"):
        TransformersEngine(MistralForCausalLM(config), model_id="sliding")
    config.sliding_window = None
    model = MistralForCausalLM(config)
    assert len(TransformersEngine(model, model_id="full").layout.tensors) == 2


def test_recurrent_models_are_refused():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="found LinearAttentionLayer"):
        TransformersEngine(Lfm2ForCausalLM(config), model_id="hybrid")


def test_encoder_decoders_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="found an encoder-decoder"):
        TransformersEngine(T5ForConditionalGeneration(config), model_id="t5")


def test_attention_in_both_directions_is_refused():
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(vocab_size=64, num_hidden_layers=3, initializer_range=0.5, **sizes)
    with pytest.raises(UnsupportedModelError, match="KV of layer 1 that depends on later tokens"):
        TransformersEngine(BertLMHeadModel(config), model_id="bert")
    config.is_decoder = True
    TransformersEngine(BertLMHeadModel(config), model_id="bert")


def test_latent_attention_has_keys_and_values_of_unequal_width(tokens):
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    engine = TransformersEngine(DeepseekV2ForCausalLM(config), model_id="latent")
    key, value = engine.layout.tensors
    assert key.block_bytes != value.block_bytes
    prompt = tokens(50)
    buffers = engine.prefill(prompt[:32], engine.allocate(50)).kv
    _, logits = library_split(engine.model, prompt, 32)
    assert np.array_equal(engine.prefill(prompt, buffers, 32).logits, logits)


def test_models_without_rotary_embeddings_or_grouped_queries_work(tokens):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4))
    engine = TransformersEngine(model, model_id="gpt2")
    prompt = tokens(50)
    buffers = engine.prefill(prompt[:32], engine.allocate(50)).kv
    _, logits = library_split(model, prompt, 32)
    assert np.array_equal(engine.prefill(prompt, buffers, 32).logits, logits)


def test_positions_that_depend_on_the_whole_length_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="rotary embeddings of type dynamic"):
        TransformersEngine(tiny_llama(rope_parameters=rope), model_id="dynamic")


def test_other_devices_are_refused():
    with pytest.raises(UnsupportedModelError, match="expected cpu, found parameters on meta"):
        TransformersEngine(tiny_llama().to("meta"), model_id="meta")


def test_identity_tells_apart_what_is_not_interchangeable(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "a")
    tiny_llama().save_pretrained(tmp_path / "copy")
    tiny_llama(seed=1).save_pretrained(tmp_path / "weights")
    tiny_llama(rms_norm_eps=1e-4).save_pretrained(tmp_path / "config")

    def identity(folder, **options):
        return TransformersEngine.from_pretrained(tmp_path / folder, threads=1, **options).identity

    assert identity("a") == identity("copy")
    others = {identity("a"), identity("weights"), identity("config")}
    assert len(others | {identity("a", dtype="bfloat16")}) == 4


def test_identity_sees_a_single_changed_weight(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        model.model.embed_tokens.weight[17, 3] += 1e-3
    model.save_pretrained(tmp_path / "b")
    ids = {TransformersEngine.from_pretrained(tmp_path / name, threads=1).model_id for name in "ab"}
    assert len(ids) == 2


def test_from_pretrained_sets_threads_and_stays_quiet(tmp_path, capfd):
    tiny_llama().save_pretrained(tmp_path)
    capfd.readouterr()
    before = torch.get_num_threads()
    try:
        engine = TransformersEngine.from_pretrained(tmp_path, dtype="bfloat16", threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert engine.model.dtype == torch.bfloat16
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("wrong", [{"dtype": "int32"}, {"dtype": "half_float"}, {"threads": 0}])
def test_from_pretrained_refuses_by_name(tmp_path, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TransformersEngine.from_pretrained(tmp_path, **wrong)


def test_threads_are_shared_by_the_ranks_that_compute(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [default_thread_count(n) for n in (1, 3, 8, 20)] == [8, 2, 1, 1]
    with pytest.raises(ConfigError, match="computing_rank_count"):
        default_thread_count(0)
