"""What sets the KV of engines and of requests apart."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import vllm_stand_ins
from vllm_stand_ins import StandInRequest, engines, install_vllm, request_of, stand_in_config

from ptstore_mpi import ConfigError
from ptstore_mpi.integrations.vllm.identity import (
    engine_identity,
    folder_digest,
    instruction_set,
    request_identity,
)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    install_vllm(monkeypatch)


def identity(*, version="0.32.0", model_id="", shape="kv[2]", **changes):
    """Return the identity of an engine."""
    config = stand_in_config(**changes)
    return engine_identity(config, version=version, model_id=model_id, tensor_shape=shape)


@pytest.fixture
def weights(tmp_path):
    """Return a folder with the files of a model."""
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "more.bin").write_bytes(b"more")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


# -- engines -----------------------------------------------------------------------------------


def test_an_engine_is_equal_to_its_like():
    assert identity() == identity()


class Attention:
    """A layer with a backend."""

    attn_backend = type("FlashAttention", (), {})


def hf(**values):
    """Return a model's configuration."""
    config = stand_in_config().model_config.hf_config
    return type(config)(**{**vars(config), **values})


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0.32.1"},
        {"model_id": "mine@1"},
        {"shape": "kv[3]"},
        {"model_config__model": "other/model"},
        {"model_config__revision": "def"},
        {"model_config__dtype": torch.bfloat16},
        {"model_config__quantization": "awq"},
        {"model_config__hf_config": hf(hidden_size=65)},
        {"model_config__hf_config": hf(_commit_hash="0123")},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__block_size": 32},
        {"load_config__load_format": "dummy"},
        {"device_config__device_type": "cuda"},
        {"compilation_config__static_forward_context": {"layer.0": Attention()}},
        {"tp": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_may_change_a_byte_sets_engines_apart(change):
    assert identity(**change) != identity()


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__max_model_len": 4096},
        {"model_config__hf_config": hf(_name_or_path="elsewhere", transformers_version="5")},
        {"kv_transfer_config__engine_id": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_no_byte_does_not(change):
    assert identity(**change) == identity()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_longest_prompt_counts_where_it_decides_the_rotation(kind):
    config = hf(rope_scaling={"type": kind})
    one, other = (
        identity(model_config__hf_config=config, model_config__max_model_len=length)
        for length in (512, 1024)
    )
    assert one != other


def test_each_rank_has_its_own_shard(monkeypatch):
    first = identity(tp=2)
    monkeypatch.setattr(vllm_stand_ins.rank, "number", 1)
    assert identity(tp=2) != first
    assert identity(tp=2)[1]["tensor_parallel"] == "2:1"


def test_backends_of_all_layers_are_named():
    layers = {"a": Attention(), "b": SimpleNamespace(backend="other"), "c": SimpleNamespace()}
    facts = identity(compilation_config__static_forward_context=layers)[1]
    assert facts["backend"] == "cpu/FlashAttention,other"
    assert identity()[1]["backend"] == "cpu/default"


def test_the_model_is_its_files_or_its_revision(weights):
    assert identity(model_config__model=str(weights))[0] == f"files-{folder_digest(weights)}"
    assert identity()[0] == "some/model@abc"
    assert identity(model_id="mine@1", model_config__model=str(weights))[0] == "mine@1"
    assert identity(load_config__load_format="dummy", model_config__seed=3)[0] == "dummy-3"
    assert identity(model_config__hf_config=hf(_commit_hash="0123"))[0] == "some/model@0123"


def test_a_model_without_revision_is_refused():
    with pytest.raises(ConfigError, match="got 'some/model'; set model_id in"):
        identity(model_config__revision=None)


def test_the_packing_of_the_cpu_counts(monkeypatch):
    plain = instruction_set(torch.float32, 16)
    assert plain.endswith("/plain")
    module = ModuleType("vllm.v1.attention.backends.cpu_attn")
    module._get_attn_isa = lambda dtype, block: f"{dtype}-{block}"
    for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert instruction_set(torch.float32, 16).endswith("/torch.float32-16")


def test_a_device_counts_instead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert instruction_set(torch.float32, 16) == "cuda-9.0"


# -- files of models ---------------------------------------------------------------------------


def test_one_changed_byte_changes_the_digest(weights):
    before = folder_digest(weights)
    assert folder_digest(weights) == before
    assert len(before) == 32
    file = weights / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[12_345] ^= 1
    file.write_bytes(content)
    assert folder_digest(weights) != before


@pytest.mark.parametrize("name", ["new.safetensors", "new.bin", "new.pt", "new.gguf"])
def test_another_file_of_weights_changes_the_digest(weights, name):
    before = folder_digest(weights)
    (weights / name).write_bytes(b"")
    assert folder_digest(weights) != before


def test_names_of_files_and_their_border_count(weights):
    before = folder_digest(weights)
    (weights / "more.bin").rename(weights / "most.bin")
    assert folder_digest(weights) != before


def test_files_without_weights_do_not_count(weights):
    before = folder_digest(weights)
    (weights / "config.json").write_text("{} ")
    (weights / "README").write_text("x")
    assert folder_digest(weights) == before


def test_the_place_of_a_folder_does_not_count(weights, tmp_path_factory):
    other = tmp_path_factory.mktemp("copy")
    for file in weights.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert folder_digest(other) == folder_digest(weights)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"expected weights \(\*.safetensors.*set model_id"):
        folder_digest(tmp_path)


# -- requests ----------------------------------------------------------------------------------


def lora(name="adapter", number=1, path="somewhere"):
    """Return an adapter."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path))


def image(identifier="hash", offset=3, length=16):
    """Return an image in a prompt."""
    return SimpleNamespace(
        identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def test_an_ordinary_request_has_nothing_of_its_own():
    assert request_identity(request_of(9)) == {}
    assert request_identity(request_of(9, cache_salt="", mm_features=[])) == {}


APART = [
    {"cache_salt": "one"},
    {"cache_salt": "two"},
    {"lora_request": lora()},
    {"lora_request": lora(name="other")},
    {"lora_request": lora(path="elsewhere")},
    {"mm_features": [image()]},
    {"mm_features": [image("other")]},
    {"mm_features": [image(offset=4)]},
    {"mm_features": [image(length=17)]},
    {"mm_features": [image(), image(offset=30)]},
    {"mm_features": [image()], "cache_salt": "one"},
    {"mm_features": [image()], "lora_request": lora()},
    {},
]


def test_salt_adapters_and_images_set_requests_apart():
    facts = [request_identity(StandInRequest("r", [1], **changes)) for changes in APART]
    assert len({str(sorted(each.items())) for each in facts}) == len(APART)


def test_what_is_set_apart_finds_nothing_of_the_other(monkeypatch):
    """In the store, with equal tokens."""
    with engines(monkeypatch) as make:
        engine = make()
        for n, changes in enumerate(APART):
            assert engine.serve(request_of(17, f"first{n}", **changes)) == 0, changes
            engine.finish_saves()
        for n, changes in enumerate(APART):
            assert engine.serve(request_of(17, f"again{n}", **changes)) == 16, changes


def test_settings_set_engines_apart(monkeypatch):
    with engines(monkeypatch) as make:
        options = [{}, {"salt": "tenant"}, {"weight_epoch": 1}, {"model_id": "mine"}]
        digests = [make(**each).link.namespace_of(request_of(1)).digest for each in options]
        assert len(set(digests)) == len(options)
        assert make().link.namespace_of(request_of(1)).digest == digests[0]


def test_an_adapter_is_its_files(weights):
    one = request_identity(request_of(1, lora_request=lora(path=weights)))
    assert one["lora"].startswith(folder_digest(weights))
    (weights / "adapter_config.json").write_text('{"lora_alpha": 8}')
    assert request_identity(request_of(1, lora_request=lora(path=weights))) != one
    (weights / "more.bin").write_bytes(b"changed")
    loaded_again = request_identity(request_of(1, lora_request=lora(number=2, path=weights)))
    assert loaded_again != one


def test_an_adapter_that_was_reloaded_in_place_is_another(weights):
    """`LoRARequest.load_inplace`, from 0.15 on, keeps the number."""
    one = request_identity(request_of(1, lora_request=lora(path=weights)))
    (weights / "more.bin").write_bytes(b"changed")
    assert request_identity(request_of(1, lora_request=lora(path=weights))) != one


def test_processes_agree(weights):
    """Whatever seed their hashes of text have."""
    text = (
        "from vllm_stand_ins import *; from pytest import MonkeyPatch;"
        "from ptstore_mpi.integrations.vllm.identity import engine_identity;"
        "install_vllm(MonkeyPatch());"
        f"c = stand_in_config(model_config__model={str(weights)!r});"
        "print(engine_identity(c, version='0.32.0', model_id='', tensor_shape='s'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    ).stdout
    expected = identity(model_config__model=str(weights), shape="s")
    assert told == f"{expected}\n"
