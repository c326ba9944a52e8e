"""The driver on vLLM: with a stand-in for it, and with vLLM itself where it is installed."""

from __future__ import annotations

import importlib.util
import json

import h5py
import numpy as np
import pytest
from stand_in_vllm import StandIn

from experiments import exp_qa_replay, report
from experiments.baselines.vllm_base import EngineFacts, VllmSystem
from experiments.common.model_presets import MODELS, GroupedAttention
from experiments.common.options import UsageError, parse_options
from experiments.engines import find_engine
from experiments.engines.vllm_engine import (
    CACHE_VARIABLE,
    NOT_INSTALLED,
    VllmEngine,
    working_bytes,
)
from ptstore_mpi.testing.launching import find_mpiexec, run_ranks

SYSTEMS = ["vanilla", "prefix", "prefix_node", "evostore", "ptstore"]
TOY = [
    "--engine", "vllm", "--dataset", "embedded", "--context-tokens", "300", "--documents", "2",
    "--requests", "8", "--memory-bytes-per-node", "16MiB", "--batch", "3", "--threads", "1",
]  # fmt: skip
MISTRAL = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "model_type": "mistral",
}  # fmt: skip


def is_installed():
    try:
        VllmEngine.require()
    except UsageError:
        return False
    return True


@pytest.fixture(autouse=True)
def no_size_of_the_environment(monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)


@pytest.fixture
def stand_in(monkeypatch):
    standing = StandIn()
    standing.install(monkeypatch)
    return standing


@pytest.fixture
def run_driver(stand_in, model_folder, tmp_path):
    """Return a function that runs the driver in this process: (result file, summaries)."""

    def run(*arguments):
        argv = [*TOY, "--model", str(model_folder), "--output", str(tmp_path), *arguments]
        assert exp_qa_replay.main(argv) == 0
        path = report.find_file(tmp_path)
        with report.open_results(path) as file:
            return path, {row["system"]: row for row in report.summarise(file)}

    return run


def test_systems_answer_one_after_the_other_each_on_an_engine_of_its_own(run_driver, stand_in):
    path, rows = run_driver("--systems", ",".join(SYSTEMS))
    assert list(rows) == SYSTEMS
    assert stand_in.live is None
    assert stand_in.attached is None
    one = [("generate", 127)] + [("generate",)] * 8 + [("release",)]
    events = stand_in.events
    assert events[0] == ("prepare", 1)
    assert [event[:1] for event in events[1:]] == [event[:1] for event in one * 5]
    assert [event for event in events if event == ("generate", 127)] == one[:1] * 5  # warm-ups
    with h5py.File(path) as file:
        assert (file.attrs["engine"], file.attrs["order"]) == ("vllm", "one after the other")
        assert file.attrs["compared"] == "tokens"
        assert (file.attrs["block_tokens"], file.attrs["model_id"][:6]) == (128, "llama-")
        for name in SYSTEMS:
            assert file[f"samples/{name}/batch"][:].tolist() == [0] * 3 + [1] * 3 + [2] * 2
            assert file[f"batches/{name}/batch"][:].tolist() == [0, 1, 2]
            assert set(file[f"samples/{name}/ttft_s"][:]) == {0.25}  # vLLM's own clock
            assert np.isnan(file[f"samples/{name}/max_abs_logit_diff"][:]).all()
            assert set(file[f"samples/{name}/same_token"][:].tolist()) == {1}
        reasons = set(file["samples/prefix/store_reason"].asstr()[:])
        own = file["samples/ptstore"]
        assert np.allclose(own["match_s"][:] + own["load_s"][:] + own["prefill_s"][:], 0.25)
        blocks = own["stored_bytes"][:] // 1_000
        assert blocks.sum() > 0
        assert own["store_s"][:].tolist() == [0.5 * (count > 0) for count in blocks]
        assert own["store_reason"].asstr()[:].tolist() == [
            "stored" if count else "none" for count in blocks
        ]
    assert reasons == {"engine"}
    for name, row in rows.items():
        assert row["outputs_equal"] is True, name
    assert rows["vanilla"]["tokens"]["recomputed"] == rows["vanilla"]["tokens"]["asked"]
    # Two documents of 300 tokens: two blocks of each are found by all requests but the first.
    assert rows["prefix"]["tokens"]["engine"] >= 6 * 256
    for name in SYSTEMS[2:]:
        assert rows[name]["tokens"]["owned"] == rows["prefix"]["tokens"]["engine"]


def test_every_engine_has_room_for_a_prompt_and_prefix_its_budget_on_top(run_driver, stand_in):
    path, _ = run_driver("--systems", ",".join(SYSTEMS))
    with h5py.File(path) as file:
        settings = json.loads(file.attrs["config"])["engine"]
        per_token = file.attrs["bytes_per_token"]
        longest = max(file["samples/vanilla/asked_tokens"][:])
    assert [settings[name] | {"use_tqdm_on_load": False} for name in SYSTEMS] == stand_in.built
    assert {each["max_model_len"] for each in settings.values()} == {longest + 1}
    sizes = {name: each["kv_cache_bytes"] for name, each in settings.items()}
    room = working_bytes(int(longest) + 1, 128, int(per_token))
    assert sizes == dict.fromkeys(SYSTEMS, room) | {"prefix": room + (16 << 20)}
    caching = [name for name, each in settings.items() if not each["prefix_caching"]]
    assert caching == ["vanilla"]
    connected = {name for name, each in settings.items() if each["connector"] is not None}
    assert connected == set(SYSTEMS[2:])


@pytest.mark.parametrize(
    ("max_model_len", "block_tokens", "blocks"), [(128, 128, 2), (129, 128, 3), (2049, 16, 130)]
)
def test_working_memory_is_whole_blocks_and_the_one_vllm_keeps(max_model_len, block_tokens, blocks):
    assert working_bytes(max_model_len, block_tokens, 10) == blocks * block_tokens * 10


def test_a_wrong_token_is_seen_without_logits(run_driver, stand_in, capsys):
    honest = stand_in.first_token

    def first_token(token_ids):
        wrong = stand_in.attached is not None and len(stand_in.events) % 8 == 0
        return honest(token_ids) + wrong

    stand_in.first_token = first_token
    _, rows = run_driver()
    assert [row["outputs_equal"] for row in rows.values()] == [True, True, False]
    shown = capsys.readouterr().out
    assert "systems answered one after the other" in shown
    assert "there are no logits" in shown


def test_an_error_ends_the_engine_before_its_store(run_driver, stand_in):
    def first_token(token_ids):
        if stand_in.attached is not None and len(token_ids) > 127:
            raise RuntimeError("no token")
        return 0

    stand_in.first_token = first_token
    with pytest.raises(RuntimeError, match="no token"):
        run_driver()
    assert stand_in.live is None
    assert stand_in.attached is None


def test_an_output_without_times_is_no_sample(run_driver, stand_in, monkeypatch):
    monkeypatch.setattr("stand_in_vllm.Metrics", lambda: None)
    with pytest.raises(RuntimeError, match="vLLM measured nothing"):
        run_driver()


def test_a_system_may_bring_a_connector_of_its_own(stand_in, tmp_path):
    class Other(VllmSystem):
        name = "other"

        def surround(self, stack):
            stack.callback(stand_in.events.append, ("its server ends",))

        def arguments(self):
            return {**super().arguments(), "kv_transfer_config": {"kv_connector": "Other"}}

    facts = EngineFacts(
        model=tmp_path, dtype="float32", max_model_len=100, block_tokens=128, working_bytes=1
    )
    system = Other(facts)
    system.open()
    system.close()
    assert stand_in.built[0]["kv_transfer_config"] == {"kv_connector": "Other"}
    assert stand_in.events == [("generate", 99), ("release",), ("its server ends",)]


@pytest.mark.parametrize(
    ("arguments", "variables", "complaint"),
    [
        ([], {"PTSTORE_SEGMENT_TOKENS": "192"}, "a multiple of the 128 tokens of a block of vLLM"),
        ([], {CACHE_VARIABLE: "2"}, "VLLM_CPU_KVCACHE_SPACE not to be set"),
        (["--context-tokens", "1000"], {}, "this model takes 1024"),
    ],
)
def test_what_vllm_cannot_do_is_said_before_an_engine_is_built(
    stand_in, model_folder, tmp_path, monkeypatch, capsys, arguments, variables, complaint
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    argv = [*TOY, "--model", str(model_folder), "--output", str(tmp_path), *arguments]
    assert exp_qa_replay.main(argv) == 2
    assert complaint in capsys.readouterr().err
    assert stand_in.built == []


def test_a_prompt_as_long_as_the_model_leaves_no_room_for_its_token(tmp_path):
    config = MISTRAL | {"max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = parse_options(["--engine", "vllm", "--dtype", "bfloat16"])
    engine = VllmEngine(tmp_path, options, longest_prompt=2047, block_tokens=16)
    assert engine.bytes_per_token == MODELS["mistral-7b"].bytes_per_token
    assert engine.facts.working_bytes == 129 * 16 * 131_072
    with pytest.raises(UsageError, match="up to 2049 tokens, this model takes 2048"):
        VllmEngine(tmp_path, options, longest_prompt=2048, block_tokens=16)


@pytest.mark.parametrize(
    "change", [{"hidden_size": None}, {"num_hidden_layers": 0}, {"kv_lora_rank": 512}]
)
def test_a_model_whose_kv_is_not_understood_is_refused(tmp_path, change):
    config = {k: v for k, v in (MISTRAL | change).items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="describes no attention with"):
        VllmEngine(tmp_path, parse_options([]), longest_prompt=10, block_tokens=16)


def test_heads_may_be_sized_apart_from_the_width():
    config = MISTRAL | {"head_dim": 256, "num_key_value_heads": None}
    assert GroupedAttention.from_config(config, "float16") == GroupedAttention(
        layers=32, kv_heads=32, head_dim=256, dtype="float16"
    )


def test_transformers_take_turns_and_vllm_does_not():
    systems = ["a", "b"]
    assert find_engine("transformers").rounds(find_engine("transformers"), systems) == [systems]
    assert find_engine("vllm").rounds(find_engine("vllm"), systems) == [["a"], ["b"]]


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("1", 0)])
def test_without_vllm_rank_0_says_what_to_do(monkeypatch, capsys, tmp_path, rank, said):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "vllm" else found(name, *rest),
    )
    monkeypatch.setenv("PMI_RANK", rank)
    assert exp_qa_replay.main([*TOY, "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count(NOT_INSTALLED) == said


def test_an_unknown_engine_is_refused():
    assert parse_options([]).engine == "transformers"
    with pytest.raises(UsageError, match="--engine: invalid choice: 'tgi'"):
        parse_options(["--engine", "tgi"])


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not is_installed(), reason="vLLM is not installed")
@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec beside this Python or on the PATH")
def test_vllm_itself_on_two_nodes_finds_what_the_other_node_computed(
    repository, wide_model_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(repository)
    arguments = [
        "--engine", "vllm", "--dataset", "embedded", "--context-tokens", "512",
        "--documents", "3", "--popularity", "uniform", "--requests", "8", "--batch", "1",
        "--routing", "round_robin", "--memory-bytes-per-node", "16MiB", "--threads", "1",
        "--fetch", "always", "--model", str(wide_model_folder), "--output", str(tmp_path),
    ]  # fmt: skip
    done = run_ranks(
        ["-m", "experiments.exp_qa_replay", *arguments], ranks=4, nodes=2, timeout_s=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path = report.find_file(tmp_path)
    with report.open_results(path) as file:  # the tokens of every request add up
        rows = {row["system"]: row for row in report.summarise(file)}
        per_token = file.attrs["bytes_per_token"]
        discarded = report.counter_total(file, "ptstore", report.DISCARDED_COUNTER)
        requests = [sorted(file[f"samples/{name}/request"][:].tolist()) for name in rows]
        stored = file["samples/ptstore/stored_bytes"][:].sum()
        waited = file["samples/ptstore/ttft_s"][:]
        parts = [file[f"samples/ptstore/{part}_s"][:] for part in ("match", "load", "prefill")]
        kept = file["servers/ptstore/counters/owned_bytes"][:].sum()
    assert list(rows) == ["vanilla", "prefix", "ptstore"]
    assert requests == [list(range(8))] * 3
    assert [row["outputs_equal"] for row in rows.values()] == [True] * 3
    own = rows["ptstore"]
    assert own["tokens"]["remote"] > 0
    assert own["rma_bytes"] == own["tokens"]["remote"] * per_token + discarded
    assert rows["prefix"]["tokens"]["engine"] > 0
    assert own["tokens"]["recomputed"] < rows["prefix"]["tokens"]["recomputed"]
    assert stored == kept > 0
    assert np.allclose(sum(parts), waited)
