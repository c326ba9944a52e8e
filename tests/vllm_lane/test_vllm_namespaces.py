"""Whose KV is whose: what differs in anything that decides its bytes misses, without an error."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import save_file
from vllm_engines import BLOCK, OFF, books_kept
from vllm_model import HEAD_DIM, HEADS, HIDDEN, LAYERS, write_model

ALWAYS = {"load": "async", "fetch": "always"}


@pytest.fixture
def first(engine_of):
    """Return the engine that stores."""
    engine = engine_of(ALWAYS)
    engine.forget()
    yield engine
    engine.check_idle()


@pytest.mark.parametrize(
    ("connector", "arguments"),
    [
        ({}, {"dtype": "bfloat16"}),
        ({}, {"block_size": 2 * BLOCK}),
        ({"model_id": "another"}, {}),
        ({"salt": "another"}, {}),
        ({"weight_epoch": 1}, {}),
    ],
    ids=["dtype", "block_size", "model_id", "salt", "weight_epoch"],
)
def test_engines_that_differ(first, engine_of, tokens, connector, arguments):
    prompt = tokens(6 * BLOCK + 3)
    first.answer_alone(prompt)
    other = engine_of({**ALWAYS, **connector}, **arguments)
    other.forget()
    right = other.answer_alone(prompt, wishes=OFF)
    other.forget()
    with books_kept(other) as counted:
        assert other.answer_alone(prompt) == right
        assert counted.get("owned", 0) == 0
    assert counted["recomputed"] == counted["asked"] == len(prompt)
    other.forget()
    with books_kept(other) as counted:
        assert other.answer_alone(prompt) == right
    assert counted["owned"] == 6 * BLOCK, "its own it finds"
    first.forget()
    with books_kept(first) as counted:
        first.answer_alone(prompt)
    assert counted["owned"] == 6 * BLOCK
    other.check_idle()


def test_weights_that_differ(first, engine_of, tokens, tmp_path_factory):
    prompt = tokens(6 * BLOCK + 3)
    first.answer_alone(prompt)
    folder = write_model(tmp_path_factory.mktemp("other"), seed=1)
    other = engine_of(ALWAYS, model=folder)
    right = other.answer_alone(prompt, wishes=OFF)
    other.forget()
    with books_kept(other) as counted:
        assert other.answer_alone(prompt) == right
    assert counted["recomputed"] == counted["asked"] == len(prompt)


def test_engines_alike_share(first, engine_of, tokens):
    prompt = tokens(6 * BLOCK + 3)
    right = first.answer_alone(prompt)
    other = engine_of({**ALWAYS, "load": "layered"}, max_num_batched_tokens=512)
    other.forget()
    with books_kept(other) as counted:
        assert other.answer_alone(prompt) == right
    assert counted["owned"] == 6 * BLOCK


def test_new_weights_make_the_old_unknown(engine, plain, tokens):
    prompt = tokens(4 * BLOCK + 3)
    right = plain.answer_alone(prompt)
    for owned in (0, 4 * BLOCK):
        with books_kept(engine) as counted:
            assert engine.answer_alone(prompt) == right
            engine.forget()
        assert counted["owned"] == owned
    assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    for owned in (0, 4 * BLOCK):
        with books_kept(engine) as counted:
            assert engine.answer_alone(prompt) == right
            engine.forget()
        assert counted["owned"] == owned


def test_a_waiting_request_learns_of_new_weights(engine, plain, tokens):
    prompt = tokens(4 * BLOCK + 3)
    right = plain.answer_alone(prompt)
    assert engine.answer_alone(prompt) == right
    engine.forget()
    with books_kept(engine):
        name = engine.add(prompt)
        while engine.connector.get_num_new_matched_tokens(engine.request(name), 0)[0] is None:
            pass
        assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        (answer,) = engine.finish(name)
    assert answer.tokens == right[0]
    assert answer.facts["recomputed_tokens"] == len(prompt)


def write_adapter(folder, *, seed):
    """Write a LoRA adapter of rank 8 for all queries and values, and return the folder."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, outer in (("q_proj", HEADS * HEAD_DIM), ("v_proj", HEADS * HEAD_DIM // 2)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (8, HIDDEN)), ("B", (outer, 8))):
                drawn = torch.randn(*shape, generator=random)
                weights[f"{prefix}.lora_{part}.weight"] = drawn
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapters_are_set_apart(engine_of, tokens, tmp_path):
    from vllm.lora.request import LoRARequest

    adapters = [None]
    for number in (1, 2):
        folder = tmp_path / f"adapter{number}"
        folder.mkdir()
        path = str(write_adapter(folder, seed=number))
        adapters.append(LoRARequest(f"adapter{number}", number, path))
    engine = engine_of(ALWAYS, enable_lora=True, max_loras=1, max_lora_rank=8)
    prompt = tokens(4 * BLOCK + 3)
    right = []
    for adapter in adapters:
        engine.forget()
        right += engine.answer_alone(prompt, lora=adapter, wishes=OFF)
    assert len(set(map(tuple, right))) == 3, "adapters that change nothing prove nothing"
    for owned in (0, 4 * BLOCK):
        for adapter, expected in zip(adapters, right, strict=True):
            engine.forget()
            with books_kept(engine) as counted:
                assert engine.answer_alone(prompt, lora=adapter) == [expected]
            assert counted["owned"] == owned
    engine.check_idle()
