"""What the connector is told and refuses before anything is stored or loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import msgspec
import torch
from vllm_stand_ins import engines, request_of, stand_in_config

import ptstore_mpi as pt
import ptstore_mpi.integrations.vllm as package
from ptstore_mpi.integrations.vllm import (
    ConnectorSettings,
    UnsupportedEngineError,
    VllmVersionError,
    attach,
    prepare_process,
)
from ptstore_mpi.integrations.vllm.api import GENERATIONS
from ptstore_mpi.integrations.vllm.attachment import current_attachment
from ptstore_mpi.integrations.vllm.checks import check_engine, check_groups
from ptstore_mpi.integrations.vllm.versions import generation_of

CONFIG = pt.Config(memory_bytes=1 << 20, segment_tokens=32, copy_threads=1)


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, {}])
def test_no_settings_are_the_defaults(given):
    settings = ConnectorSettings.of(given)
    assert settings == ConnectorSettings()
    assert (settings.load, settings.fetch, settings.save) == ("auto", "cost", "prompt")


def test_settings_are_taken_by_name():
    given = {"load": "layered", "save_queue_tokens": 0, "match_wait_s": 1, "salt": "tenant"}
    settings = ConnectorSettings.of(given)
    assert {name: getattr(settings, name) for name in given} == given
    with pytest.raises(AttributeError):
        settings.load = "async"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lod": "async"}, "lod"),
        ({"load": "sync"}, "load"),
        ({"load": None}, "load"),
        ({"fetch": True}, "fetch"),
        ({"save": "decoded"}, "save"),
        ({"save_queue_tokens": -1}, "save_queue_tokens"),
        ({"save_queue_tokens": 1.5}, "save_queue_tokens"),
        ({"save_queue_tokens": "many"}, "save_queue_tokens"),
        ({"save_slice_tokens": 0}, "save_slice_tokens"),
        ({"match_wait_s": -0.1}, "match_wait_s"),
        ({"match_wait_s": "1"}, "match_wait_s"),
        ({"model_id": 7}, "model_id"),
        ({"weight_epoch": -1}, "weight_epoch"),
        ({"salt": None}, "salt"),
    ],
)
def test_impossible_settings_are_refused_by_name(given, named):
    with pytest.raises(
        pt.ConfigError, match=r"kv_connector_extra_config: .*expected some of"
    ) as told:
        ConnectorSettings.of(given)
    assert named in str(told.value)
    for name in msgspec.structs.fields(ConnectorSettings):
        assert name.name in str(told.value)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
    ],
)
def test_a_time_that_is_none_is_refused(value):
    with pytest.raises(pt.ConfigError):
        ConnectorSettings.of({"match_wait_s": value})


# -- versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_generation_is_that_of_its_first_two_numbers(name):
    assert generation_of(f"{name}.99") is GENERATIONS[name]
    assert generation_of("7.1.0", like=name) is GENERATIONS[name]


@pytest.mark.parametrize(("version", "like"), [("0.12.0", ""), ("0.32.0", "0.31"), ("", "")])
def test_a_version_that_was_not_tested_is_refused_with_those_that_were(version, like):
    with pytest.raises(VllmVersionError, match="PTSTORE_VLLM_API") as told:
        generation_of(version, like)
    text = str(told.value)
    assert like or version in text
    for api in GENERATIONS.values():
        for tested in (*api.RUN, *api.CHECKED):
            assert tested in text
    for name in GENERATIONS:
        assert name in text
    assert isinstance(told.value, pt.ConfigError)


# -- engines -----------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_of_full_attention_is_taken(tp):
    check_engine(stand_in_config(tp=tp))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism of 2, expected 1"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size of 2"),
        ({"parallel_config__prefill_context_parallel_size": 4}, "prefill_context_.*of 4"),
        ({"parallel_config__tensor_parallel_size": 2}, r"own \(uni\), expected .*'external_laun"),
        ({"speculative_config": "eagle"}, "speculative decoding"),
        ({"model_config__attention_chunk_size": 8192}, "chunked local attention"),
    ],
)
def test_engines_that_are_refused(changes, message):
    with pytest.raises(UnsupportedEngineError, match=f"cannot work with this engine: .*{message}"):
        check_engine(stand_in_config(**changes))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("backend", ["mp", "ray", "uni"])
def test_ranks_in_processes_of_vllms_own_are_refused(backend):
    config = stand_in_config(tp=2, parallel_config__distributed_executor_backend=backend)
    with pytest.raises(UnsupportedEngineError, match=backend):
        check_engine(config)


@pytest.mark.usefixtures("in_process")
def test_older_versions_have_no_prefill_context_parallelism():
    config = stand_in_config()
    del config.parallel_config.prefill_context_parallel_size
    check_engine(config)


@pytest.mark.parametrize("value", [None, "1"])
def test_an_engine_in_another_process_is_refused(monkeypatch, value):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", value)
    with pytest.raises(UnsupportedEngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        check_engine(stand_in_config())


def spec(name, **fields):
    """Return a specification of a layer's cache, by the name of its class."""
    made = type(name, (), {})()
    vars(made).update(fields)
    return made


def groups(*specs):
    """Return a configuration of caches with one group for each specification."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=each) for each in specs])


FULL, LATENT = spec("FullAttentionSpec"), spec("MLAAttentionSpec")


@pytest.mark.parametrize(
    "taken", [FULL, LATENT, spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": FULL, "b": FULL})]
)
def test_one_group_of_full_attention_is_taken(taken):
    check_groups(groups(taken))


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        ([spec("SlidingWindowSpec")], r"1 group\(s\) of SlidingWindowSpec"),
        ([spec("MambaSpec")], "MambaSpec"),
        ([spec("ChunkedLocalAttentionSpec")], "ChunkedLocalAttentionSpec"),
        ([FULL, FULL], r"2 group\(s\) of FullAttentionSpec"),
        ([FULL, spec("SlidingWindowSpec")], "FullAttentionSpec, SlidingWindowSpec"),
        ([], r"0 group\(s\)"),
        (
            [spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": FULL, "b": spec("MambaSpec")})],
            "FullAttentionSpec, MambaSpec",
        ),
    ],
)
def test_other_caches_are_refused(specs, found):
    with pytest.raises(UnsupportedEngineError, match=found):
        check_groups(groups(*specs))


# -- attachments -------------------------------------------------------------------------------


@pytest.fixture
def store():
    job = pt.launch(CONFIG)
    yield job.client
    job.close()


def test_without_a_store_there_is_no_engine():
    with pytest.raises(pt.ConfigError, match=r"attach\(store\).*VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        current_attachment()


def test_a_store_is_attached_until_the_block_is_left(store):
    with attach(store) as attachment:
        assert current_attachment() is attachment
        assert attachment.store is store
        with pytest.raises(pt.ConfigError, match="expected no store"), attach(store):
            pass
        assert current_attachment() is attachment
    with pytest.raises(pt.ConfigError):
        current_attachment()
    with attach(store) as again:
        assert again is not attachment


def test_a_store_is_detached_after_an_exception(store):
    with pytest.raises(KeyError), attach(store):
        raise KeyError("mine")
    with pytest.raises(pt.ConfigError):
        current_attachment()


def test_both_sides_of_an_engine_share_what_engines_do_not(store):
    with attach(store) as attachment:
        settings = ConnectorSettings()
        one, other = stand_in_config(), stand_in_config(kv_transfer_config__engine_id="other")
        link = attachment.link_of(one, settings)
        assert attachment.link_of(stand_in_config(), settings) is link
        assert attachment.link_of(other, settings) is not link
        assert attachment.link_of(other, settings).thread is link.thread


def test_an_attachment_counts_all_its_engines(monkeypatch):
    with engines(monkeypatch) as make:
        links = [make(model_id=f"m{n}").link for n in range(2)]
        with attach(links[0].store) as attachment:
            attachment._links = dict(enumerate(links))
            assert attachment.wait_for_saves()
            assert attachment.take_saves() == []
            assert attachment.stats() == {"costs": [link.fetch.as_dict() for link in links]}
            for n, link in enumerate(links):
                link.count_tokens({"engine": 16}, 20 + n)
            told = attachment.stats()
            assert (told["asked_tokens"], told["engine_tokens"]) == (41, 32)
            assert told["recomputed_tokens"] == 9


def test_what_was_saved_is_told_once(monkeypatch):
    with engines(monkeypatch) as make:
        engine = make()
        with attach(engine.link.store) as attachment:
            attachment._links = {"engine": engine.link}
            engine.serve(request_of(65))
            engine.finish_saves()
            assert attachment.wait_for_saves()
            ((name, nbytes, reason, seconds),) = attachment.take_saves()
            assert (name, reason) == ("r", "stored")
            assert nbytes == 64 * engine.pool.layout.bytes_per_token
            assert seconds > 0
            assert attachment.take_saves() == []


# -- the process -------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    changed = dict(os.environ)
    for name in [name for name in changed if name.startswith(("VLLM_", "HF_", "OMP_"))]:
        del changed[name]
    monkeypatch.setattr(os, "environ", changed)
    set_threads = []
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    return SimpleNamespace(variables=changed, threads=set_threads)


def test_a_process_is_prepared(environment):
    prepare_process(3)
    assert environment.threads == [3], "torch has been imported: it looks no more"
    environment = environment.variables
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


def test_what_is_set_already_stays_but_for_the_one(environment):
    environment = environment.variables
    environment |= {"OMP_NUM_THREADS": "7", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    prepare_process()
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused_and_nothing_is_set(environment, threads):
    before = dict(environment.variables)
    with pytest.raises(pt.ConfigError, match=f"at least 1, got {threads}"):
        prepare_process(threads)
    assert (environment.variables, environment.threads) == (before, [])


def test_a_process_that_has_not_imported_torch_does_not_for_this(environment, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    prepare_process(2)
    assert environment.threads == []
    assert "torch" not in sys.modules


def test_importing_the_package_imports_no_vllm():
    """Nor transformers: whoever looks at an experiment's options must not wait for them."""
    text = (
        "import sys, ptstore_mpi.integrations.vllm as p; assert p.attach and p.register;"
        "print([n for n in sys.modules if n.split('.')[0] in ('vllm', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_public_is_there():
    assert all(hasattr(package, name) for name in package.__all__)
