"""The driver at toy size: a random Llama of two layers, one rank, everything real."""

from __future__ import annotations

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest

from experiments import report
from experiments.common.options import UsageError, default_dataset, parse_options

BLOCK_TOKENS = 16
TOY = [
    "--dataset", "embedded", "--context-tokens", "96", "--documents", "3", "--requests", "8",
    "--memory-bytes-per-node", "16MiB", "--batch", "3", "--threads", "1", "--seed", "4",
    "--fetch", "always",  # the model is so small that computing can be faster than loading
]  # fmt: skip


@pytest.fixture
def run_driver(model_folder, tmp_path):
    """Return a function that runs the driver in this process: (result file, summaries)."""
    from experiments import exp_qa_replay

    def run(*arguments):
        argv = [*TOY, "--model", str(model_folder), "--output", str(tmp_path), *arguments]
        assert exp_qa_replay.main(argv) == 0
        path = report.find_file(tmp_path)
        with report.open_results(path) as file:
            return path, {row["system"]: row for row in report.summarise(file)}

    return run


def test_all_systems_answer_the_same_requests_with_equal_outputs(run_driver, capsys):
    path, rows = run_driver()
    assert path.parent.name == "exp_qa_replay"
    assert list(rows) == ["vanilla", "prefix", "ptstore"]
    with h5py.File(path) as file:
        requests = [file[f"samples/{name}/request"][:].tolist() for name in rows]
        tokens = [file[f"samples/{name}/asked_tokens"][:].tolist() for name in rows]
        assert file.attrs["complete"]
        assert json.loads(file.attrs["config"])["experiment"]["seed"] == 4
        stored = file["samples/ptstore/stored_bytes"][:]
        own = file["batches/ptstore/counters/tokens.owned"][:]
        owned = file["samples/ptstore/owned_tokens"][:]
    assert requests[0] == requests[1] == requests[2]
    assert sorted(requests[0]) == list(range(8))
    assert tokens[0] == tokens[1] == tokens[2]
    for name, row in rows.items():
        assert row["outputs_equal"] is True, name
        parts = {key: value for key, value in row["tokens"].items() if key != "asked"}
        assert sum(parts.values()) == row["tokens"]["asked"]
    # Three documents, eight requests: at least five find a document of 96 tokens again.
    assert rows["ptstore"]["tokens"]["owned"] >= 5 * 96
    assert rows["prefix"]["tokens"]["engine"] == rows["ptstore"]["tokens"]["owned"]
    assert rows["vanilla"]["tokens"]["recomputed"] == rows["vanilla"]["tokens"]["asked"]
    assert set(rows["ptstore"]["speedup_by_source"]) == {"owned"}
    assert rows["ptstore"]["rma_bytes"] == 0
    assert stored.sum() > 0
    assert own.sum() == owned.sum()
    shown = capsys.readouterr().out
    assert f"results: {path}" in shown.replace("\n", "")
    assert "equal" in shown


def test_every_system_on_a_store_has_one_of_its_own(run_driver):
    path, rows = run_driver("--systems", "ptstore,evostore,prefix_node,vanilla")
    assert list(rows) == ["vanilla", "prefix_node", "evostore", "ptstore"]
    assert {row["outputs_equal"] for row in rows.values()} == {True}
    with h5py.File(path) as file:
        stores = json.loads(file.attrs["config"])["store"]
        counters = {name: file[f"servers/{name}/counters"] for name in stores}
        # Were one store behind two of them, the second would find all that the first has kept.
        kept = {name: group["owned_bytes"][:].tolist() for name, group in counters.items()}
        recomputed = {name: row["tokens"]["recomputed"] for name, row in rows.items()}
        assert set(json.loads(file.attrs["transports"])) == set(stores)
    assert len(set(map(str, kept.values()))) == 1
    assert kept["ptstore"][0] > 0
    assert recomputed["prefix_node"] == recomputed["evostore"] == recomputed["ptstore"]
    admission = {name: settings["replica_admission"] for name, settings in stores.items()}
    assert admission["evostore"] == "never" != admission["ptstore"]


def test_one_seed_is_one_run(run_driver):
    columns = []
    for _ in range(2):
        path, _ = run_driver("--systems", "ptstore")
        with h5py.File(path) as file:
            group = file["samples/ptstore"]
            names = ("request", "document", "first_token", "owned_tokens", "stored_bytes")
            columns.append({name: group[name][:].tolist() for name in names})
        assert columns[0] == columns[-1]


@pytest.mark.parametrize("fetch", ["cost", "always"])
def test_outputs_are_equal_whether_loads_are_declined_or_not(run_driver, monkeypatch, fetch):
    from ptstore_mpi.integrations.transformers import FetchOrRecompute

    honest = FetchOrRecompute.note_load

    def note_load(self, by_source, seconds):
        for _ in range(5):
            honest(self, by_source, 1e3)

    monkeypatch.setattr(FetchOrRecompute, "note_load", note_load)
    path, rows = run_driver("--fetch", fetch)
    with h5py.File(path) as file:
        assert json.loads(file.attrs["config"])["experiment"]["fetch"] == fetch
        reasons = file["samples/ptstore/reason"].asstr()[:].tolist()
    assert ("declined" in reasons) == (fetch == "cost")
    assert {row["outputs_equal"] for row in rows.values()} == {True}


def test_nothing_is_reused_where_every_prompt_is_distinct(run_driver):
    _, rows = run_driver("--popularity", "distinct")
    for name in ("prefix", "ptstore"):
        assert rows[name]["tokens"]["recomputed"] == rows[name]["tokens"]["asked"]
        assert rows[name]["speedup_by_source"] == {}


def swap_key_blocks(buffers):
    """Exchange the first two blocks of the keys, as a store that mixes up addresses would.

    Of the keys alone: cached keys carry their positions, so attention over them is a sum over a
    set, and exchanging blocks of keys *and* values together cannot be seen in any output.
    """
    for keys in buffers.keys:
        first = keys[:, :BLOCK_TOKENS].clone()
        keys[:, :BLOCK_TOKENS] = keys[:, BLOCK_TOKENS : 2 * BLOCK_TOKENS]
        keys[:, BLOCK_TOKENS : 2 * BLOCK_TOKENS] = first


def test_swapping_two_loaded_blocks_is_seen_in_the_outputs(run_driver, monkeypatch):
    from ptstore_mpi.integrations.transformers import TransformersEngine

    honest = TransformersEngine.prefill
    swapped = []

    def prefill(self, token_ids, buffers=None, cached_tokens=0):
        if cached_tokens >= 2 * BLOCK_TOKENS:
            swap_key_blocks(buffers)
            swapped.append(cached_tokens)
        return honest(self, token_ids, buffers, cached_tokens)

    monkeypatch.setattr(TransformersEngine, "prefill", prefill)
    path, rows = run_driver("--systems", "vanilla,ptstore")
    assert rows["vanilla"]["outputs_equal"] is True
    assert rows["ptstore"]["outputs_equal"] is False
    with h5py.File(path) as file:
        reused = file["samples/ptstore/owned_tokens"][:] > 0
        difference = file["samples/ptstore/max_abs_logit_diff"][:]
    assert len(swapped) == reused.sum() >= 5
    assert np.all(difference[reused] > 1e-3)
    assert np.all(difference[~reused] <= 1e-3)


def test_a_full_arena_is_a_reason_and_the_outputs_stay_equal(run_driver, monkeypatch):
    # One prompt takes about 60 KiB: two fit.
    monkeypatch.setenv("PTSTORE_EVICTION", "none")
    path, rows = run_driver("--memory-bytes-per-node", "160KiB", "--documents", "8")
    with h5py.File(path) as file:
        reasons = file["samples/ptstore/store_reason"].asstr()[:].tolist()
    assert "stored" in reasons
    assert "full" in reasons
    assert rows["ptstore"]["outputs_equal"] is True


def test_a_prompt_larger_than_the_arena_is_recorded_as_such(run_driver):
    path, rows = run_driver("--memory-bytes-per-node", "16KiB", "--systems", "vanilla,ptstore")
    with h5py.File(path) as file:
        reasons = file["samples/ptstore/store_reason"].asstr()[:].tolist()
    assert set(reasons) == {"too_large"}
    assert rows["ptstore"]["outputs_equal"] is True


def test_an_error_in_a_system_leaves_the_flushed_batches(run_driver, monkeypatch, tmp_path):
    from experiments.baselines.prefix import PrefixCacheSystem

    honest = PrefixCacheSystem.first_token
    calls = []

    def first_token(self, request):
        calls.append(request.index)
        if len(calls) > 3:
            raise RuntimeError("the fourth request fails")
        return honest(self, request)

    monkeypatch.setattr(PrefixCacheSystem, "first_token", first_token)
    with pytest.raises(RuntimeError, match="the fourth request fails"):
        run_driver()
    (part,) = tmp_path.rglob("*.h5.part")
    with h5py.File(part) as file:
        assert len(file["samples/ptstore/ttft_s"]) == 3
    assert not list(tmp_path.rglob("*.h5"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--systems", "vanilla,evo"], "expected names among vanilla,prefix,prefix_node,evos"),
        (["--popularity", "power"], "--popularity must be power:A"),
        (["--memory-bytes-per-node", "many"], "expected a size such as 512MiB"),
        (["--memory-bytes-per-node", "0"], "expected a size above 0"),
        (["--context-tokens", "0"], "expected a whole number of at least 1"),
        (["--routing", "psychic"], "invalid choice"),
        (["--fetch", "never"], "--fetch: invalid choice"),
        (["--seed", "-3"], "--seed: expected a whole number of at least 0"),
        (["--threads", "-1"], "--threads: expected a whole number of at least 0"),
        (["--model", "/nowhere"], "--model: expected a folder with config.json"),
    ],
)
def test_an_impossible_option_is_refused_by_name(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        parse_options(arguments)


def test_sizes_and_systems_are_read_with_their_units():
    options = parse_options(["--memory-bytes-per-node", "1GiB", "--systems", "ptstore,vanilla"])
    assert options.memory_bytes_per_node == 2**30
    assert options.systems == ("vanilla", "ptstore")
    assert parse_options([]).memory_bytes_per_node == 320 * 2**20


def test_the_default_data_set_is_the_embedded_one_without_a_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("PTSTORE_DATA", raising=False)
    assert default_dataset() == "embedded"
    monkeypatch.setenv("PTSTORE_DATA", str(tmp_path))
    assert default_dataset() == "squad"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--documents", "100000"], "--documents 100000 expected at most the"),
        (["--context-tokens", "1000"], "this model takes 1024"),
    ],
)
def test_what_data_or_model_cannot_give_is_said(
    model_folder, tmp_path, capsys, arguments, complaint
):
    from experiments import exp_qa_replay

    argv = [*TOY, "--model", str(model_folder), "--output", str(tmp_path), *arguments]
    assert exp_qa_replay.main(argv) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wrong_command_line_ends_without_a_traceback(repository):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.exp_qa_replay", "--requests", "none"],
        cwd=repository, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--requests" in done.stderr
    assert "Traceback" not in done.stderr
