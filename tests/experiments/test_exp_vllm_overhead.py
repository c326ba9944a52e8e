"""What the connector costs vLLM: with a stand-in for vLLM over the real store, and for real."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from experiments import exp_vllm_overhead, record, report, report_vllm_overhead
from experiments.common import vllm_answers
from experiments.common.datasets import load_documents
from experiments.common.options import UsageError
from experiments.vllm_overhead.engine import saved_of
from experiments.vllm_overhead.options import parse_options
from experiments.vllm_overhead.schedule import (
    PHASES,
    build_schedule,
    find_pair,
    prompt_count,
    system_of,
)
from experiments.vllm_overhead.tables import BATCH_COLUMNS, SAMPLE_COLUMNS
from experiments.vllm_ttft.prompts import build_prompts
from ptstore_mpi import file_stats
from ptstore_mpi.testing.launching import find_mpiexec, run_ranks
from tests.experiments.vllm_overhead_stand_in import DEARER

TOY = [
    "--dataset", "embedded", "--context-tokens", "96", "--requests", "12", "--batch", "2",
    "--output-tokens", "4", "--memory-bytes-per-node", "16MiB", "--seed", "4",
]  # fmt: skip


@pytest.fixture
def arguments(model_folder, tmp_path):
    """Return the command line of a run at toy size."""
    return [*TOY, "--model", str(model_folder), "--output", str(tmp_path)]


@pytest.fixture
def run_job(repository, arguments, monkeypatch):
    """Return a function that runs the driver over the stand-in on several ranks."""
    if find_mpiexec() is None:
        pytest.skip("no mpiexec beside this Python or on the PATH")
    monkeypatch.chdir(repository)

    def run(*more, ranks, nodes=1):
        program = ["-m", "tests.experiments.vllm_overhead_stand_in", *arguments, *more]
        return run_ranks(program, ranks=ranks, nodes=nodes)

    return run


def summaries(folder):
    with report.open_results(report.find_file(folder)) as file:
        return report_vllm_overhead.summarise(file)


@pytest.mark.parametrize(("ranks", "nodes"), [(3, 1), (5, 2)])  # others only wait
def test_two_clients_answer_in_turn_and_change_places(run_job, tmp_path, capsys, ranks, nodes):
    done = run_job(ranks=ranks, nodes=nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    path = report.find_file(tmp_path)
    assert f"results: {path}" in done.stdout
    assert "expected" not in done.stdout
    with h5py.File(path) as file:
        plain, connector = file["batches/plain"], file["batches/connector"]
        for batches in (plain, connector):
            assert batches["batch"][:].tolist() == [0, 1, 2, 3, 4, 5]
        assert plain["client"][:].tolist() == [0, 0, 0, 1, 1, 1]
        assert connector["client"][:].tolist() == [1, 1, 1, 0, 0, 0]
        assert plain["turn"][:].tolist() == [0, 1] * 3
        assert connector["turn"][:].tolist() == [1, 0] * 3
        counted = connector["counters/tokens.recomputed"][:]
        assert len(plain["counters"]) == 0
        for name in ("plain", "connector"):
            samples = file[f"samples/{name}"]
            assert samples["request"][:].tolist() == list(range(12))
            assert samples["batch"][:].tolist() == [n // 2 for n in range(12)]
            assert samples["same_tokens"][:].tolist() == [4] * 12
        assert counted.sum() == file["samples/connector/asked_tokens"][:].sum()
        assert file.attrs["complete"]
        assert file.attrs["clients_count"] == ranks - nodes
        config = json.loads(file.attrs["config"])
    assert config["connector"] == {}
    assert config["experiment"]["requests"] == 12
    rows = summaries(tmp_path)
    assert [row.get("system") for row in rows] == ["plain", "connector", None]
    check_reuse(rows)
    for name, wanted in {
        "requests_per_s": 1 / DEARER,
        "requests_per_s_settled": 1 / (2 * DEARER),
        "ttft_s": DEARER,
        "cpu_s": DEARER,
        "cpu_s_settled": 2 * DEARER,
    }.items():
        assert rows[2][name] == pytest.approx(dict.fromkeys(("p25", "p50", "p75"), wanted))
    assert report.main([str(path), "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == rows
    counted = file_stats.collect(path)["systems"]
    assert counted["plain"]["reasons"]["store"] == {"none": 12}
    assert counted["connector"]["reasons"]["store"] == {"stored": 12}


def check_reuse(rows):
    """Everything was computed, and saved where there is a store."""
    plain, connector, _ = rows
    for row in (plain, connector):
        assert row["outputs_equal"] is True
        assert row["first_tokens_equal"] is True
        assert row["tokens"]["recomputed"] == row["tokens"]["asked"] > 0
    assert plain["stored_bytes"] == 0 < connector["stored_bytes"]
    assert connector["store_reasons"] == ["stored"]


def test_the_pair_need_not_be_the_first_clients():
    assert find_pair([0, 0, 0]) == (0, 1)
    assert find_pair([0, 1, 1, 2, 2]) == (1, 2)
    assert find_pair([1, 0, 1, 0]) == (1, 3)
    assert find_pair([0, 1, 2]) is None
    assert find_pair([0]) is None


@pytest.mark.parametrize(("ranks", "nodes", "clients"), [(2, 1, 1), (4, 2, 2)])
def test_without_two_clients_on_a_node_it_is_refused(run_job, tmp_path, ranks, nodes, clients):
    done = run_job(ranks=ranks, nodes=nodes)
    assert done.returncode == 2
    assert done.stderr.count("expected two clients on one node, such as mpiexec -n 3 has") == 1
    assert f"given {clients} in all" in done.stderr
    assert not list(tmp_path.rglob("*.h5*"))


@pytest.mark.parametrize("name", ["--memory-bytes-per-node", "--engine-cache-bytes"])
def test_memory_that_cannot_hold_a_prompt_is_said_once(run_job, tmp_path, name):
    done = run_job(name, "64KiB", ranks=3)
    assert done.returncode == 2
    assert done.stderr.count(f"{name}: expected at least the ") == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.h5*"))


def schedule_of(*arguments):
    options = parse_options(arguments)
    asked = options.for_prompts(prompt_count(options))
    documents = load_documents("embedded", seed=1)
    prompts = build_prompts(documents, lambda text: list(text.encode()), asked)
    return build_schedule(prompts, options)


@pytest.mark.parametrize(
    ("requests", "batch", "half"), [("16", "2", 4), ("6", "1", 3), ("8", "4", 1)]
)
def test_half_of_the_batches_are_in_each_phase(requests, batch, half):
    found = schedule_of("--context-tokens", "32", "--requests", requests, "--batch", batch)
    assert [len(batches) for batches in found.batches] == [half, half]
    every = [one for batches in found.batches for one in batches]
    assert [one.number for one in every] == list(range(2 * half))
    orders = [one.order for one in every]
    assert orders == [("plain", "connector"), ("connector", "plain")] * half
    answered = [prompt for one in every for prompt in one.prompts]
    assert [prompt.request for prompt in answered] == list(range(int(requests)))
    assert {len(one.prompts) for one in every} == {int(batch)}
    spare = [prompt for warm_up in found.warm_ups for prompt in warm_up]
    assert [len(warm_up) for warm_up in found.warm_ups] == [int(batch)] * len(PHASES)
    # No prompt has another's first block, warming up included.
    assert len({prompt.tokens[:16] for prompt in answered + spare}) == len(answered + spare)
    assert {prompt.context_tokens for prompt in answered} == {32}
    assert found.longest_tokens >= max(len(prompt.tokens) for prompt in answered) + 16


def test_both_clients_have_both_systems():
    assert [system_of(0, phase) for phase in PHASES] == ["plain", "connector"]
    assert [system_of(1, phase) for phase in PHASES] == ["connector", "plain"]


def test_a_save_is_known_by_the_name_of_its_request():
    saves = [("1-ab", 10, "stored", 0.1), ("11-ab", 20, "stored", 0.1), ("1-ab", 5, "full", 0.1)]
    assert saved_of("1", saves) == {"stored_bytes": 15, "store_reason": "stored+full"}
    assert saved_of("11-ab", saves) == {"stored_bytes": 20, "store_reason": "stored"}
    assert saved_of("2", saves) == {"stored_bytes": 0, "store_reason": "none"}


def test_prompts_are_a_function_of_the_seed():
    first = schedule_of("--context-tokens", "32")
    assert schedule_of("--context-tokens", "32") == first
    assert schedule_of("--context-tokens", "32", "--seed", "2").digest != first.digest


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--context-tokens", "1024,2048"], "--context-tokens: expected a whole number"),
        (["--context-tokens", "15"], "expected a whole number of at least 16"),
        (["--requests", "0"], "--requests: expected a whole number of at least 2"),
        (["--requests", "6"], "--requests: expected a multiple of twice --batch, 4, given 6"),
        (["--batch", "3"], "--requests: expected a multiple of twice --batch, 6, given 16"),
        (["--batch", "0"], "--batch: expected a whole number of at least 1"),
        (["--output-tokens", "0"], "--output-tokens: expected a whole number of at least 1"),
        (["--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
        (["--threads", "0"], "--threads: expected a whole number of at least 1"),
        (["--memory-bytes-per-node", "much"], "--memory-bytes-per-node"),
        (["--engine-cache-bytes", "0"], "expected a size above 0"),
        (["--dataset", "none"], "--dataset: invalid choice: 'none'"),
        (["--model", "nowhere"], "--model: expected a folder with config.json"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        parse_options(arguments)


def test_without_vllm_it_is_said(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vllm_answers.importlib.util, "find_spec", lambda name: None)
    assert exp_vllm_overhead.main(arguments) == 2
    assert capsys.readouterr().err == "vLLM is not installed: make setup-vllm\n"
    assert not list(tmp_path.iterdir())


def turn(system, number, wall_s, *ttfts_s, outputs=None, samples=None, **changes):
    """One batch of requests of 100 tokens; CPU is twice the wall, saves double both."""
    saved = {"stored_bytes": 0, "store_reason": "none"}
    if system == "connector":
        saved = {"stored_bytes": 1_000, "store_reason": "stored"}
    rows = []
    for place, ttft_s in enumerate(ttfts_s):
        row = {name: 0 for name in SAMPLE_COLUMNS if name != "same_tokens"} | saved
        row |= {"request": 2 * number + place, "batch": number, "ttft_s": ttft_s}
        row |= {"prompt_tokens": 100, "asked_tokens": 100, "recomputed_tokens": 100}
        rows.append(row | {"output_tokens": 4, "reason": "not_found"} | (samples or {}))
    row = dict.fromkeys(BATCH_COLUMNS, 0) | {"batch": number, "wall_s": wall_s}
    row |= {"cpu_s": 2 * wall_s, "settled_s": 2 * wall_s, "settled_cpu_s": 4 * wall_s}
    outputs = outputs or [(1, 2, 3, 4)] * len(rows)
    return exp_vllm_overhead.Turn(system, rows, outputs, row | changes, {})


def write(folder, *batches):
    """Write a file of these turns."""
    attributes = {"experiment": "exp_vllm_overhead", "reference": "plain"}
    with record.ResultFile(folder, "made", attributes) as file:
        for turns in batches:
            exp_vllm_overhead.record_batch(file, turns)
        return file.finish()


def usual(number, plain_s, connector_s, **changes):
    return [
        turn("connector", number, connector_s, connector_s / 4, connector_s / 2, **changes),
        turn("plain", number, plain_s, plain_s / 4, plain_s / 2),
    ]


def test_the_numbers_of_a_known_file(tmp_path):
    write(tmp_path, usual(0, 8.0, 8.0), usual(1, 4.0, 5.0), usual(2, 10.0, 20.0))
    plain, connector, ratios = summaries(tmp_path)
    assert plain["requests"] == connector["requests"] == 6
    assert plain["requests_per_s"] == pytest.approx(6 / 22)
    assert connector["requests_per_s"] == pytest.approx(6 / 33)
    assert connector["requests_per_s_settled"] == pytest.approx(6 / 66)
    assert connector["cpu_s"] == pytest.approx(66 / 6)
    assert connector["cpu_s_settled"] == pytest.approx(132 / 6)
    assert plain["ttft_s"]["p50"] == pytest.approx((2.0 + 2.5) / 2)
    assert connector["stored_bytes"] == 6_000
    # Each batch is compared with itself: 1, 1.25 and 2 times as long.
    assert ratios["ratio"] == "connector / plain"
    assert ratios["batches"] == 3
    longer = {"p25": 1.125, "p50": 1.25, "p75": 1.625}
    for name in ("ttft_s", "cpu_s", "cpu_s_settled"):
        assert ratios[name] == pytest.approx(longer)
    for name in ("requests_per_s", "requests_per_s_settled"):
        assert ratios[name] == pytest.approx({"p25": 0.65, "p50": 0.8, "p75": 0.9})


def test_it_is_shown(tmp_path, capsys):
    write(tmp_path, usual(0, 8.0, 10.0))
    assert report.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "connector / plain, over 1 batches" in shown
    assert "1.250 │ 1.250 to 1.250" in shown
    assert "expected" not in shown


def test_one_differing_token_makes_outputs_differ(tmp_path):
    later = [(1, 2, 3, 4), (1, 2, 9, 4)]
    write(tmp_path, usual(0, 8.0, 8.0), usual(1, 8.0, 8.0, outputs=later))
    plain, connector, _ = summaries(tmp_path)
    assert plain["outputs_equal"] is True
    assert (connector["outputs_equal"], connector["first_tokens_equal"]) == (False, True)
    with h5py.File(report.find_file(tmp_path)) as file:
        assert file["samples/connector/same_tokens"][:].tolist() == [4, 4, 4, 2]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"samples": {"owned_tokens": 96, "recomputed_tokens": 4}}, "reused 192 tokens"),
        (
            {"samples": {"store_reason": "stored+queue_full"}},
            "to be saved, reasons queue_full, stored",
        ),
        ({"samples": {"stored_bytes": 0, "store_reason": "none"}}, "to be saved, reasons none"),
    ],
)
def test_what_was_not_to_be_is_named(tmp_path, capsys, changes, note):
    write(tmp_path, usual(0, 8.0, 8.0, **changes))
    assert report.main([str(tmp_path)]) == 0
    assert note in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"samples": {"recomputed_tokens": 5}}, "connector, request 0: .*add up to 5, asked were"),
        ({"samples": {"prompt_tokens": 99}}, "the engine to have seen the prompt that was asked"),
        ({"samples": {"ttft_s": 0.0}}, "request 0: expected ttft_s above 0, found ttft_s 0.0"),
        ({"samples": {"batch": 3}}, "expected one row for each batch of the samples"),
        ({"cpu_s": 0.0}, "connector, batch 0: expected cpu_s above 0, found cpu_s 0.0"),
        ({"settled_cpu_s": float("nan")}, "batch 0: expected settled_cpu_s above 0"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, capsys, changes, complaint):
    write(tmp_path, usual(0, 8.0, 8.0, **changes))
    with pytest.raises(report.ReportError, match=complaint):
        summaries(tmp_path)
    assert report.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == ""


def test_a_file_without_a_system_is_refused(tmp_path, capsys):
    path = write(tmp_path, usual(0, 8.0, 8.0))
    with h5py.File(path, "r+") as file:
        del file["samples/plain"]
    assert report.main([str(path)]) == 1
    assert "samples of plain: expected a group" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not vllm_answers.is_installed(), reason="vLLM is not installed")
def test_with_vllm_outputs_are_equal_and_all_is_saved(repository, tmp_path, monkeypatch):
    if find_mpiexec() is None:
        pytest.skip("no mpiexec beside this Python or on the PATH")
    monkeypatch.chdir(repository)
    program = [
        "-m", "experiments.exp_vllm_overhead", "--context-tokens", "256", "--requests", "4",
        "--dataset", "embedded", "--output", str(tmp_path),
    ]  # fmt: skip
    done = run_ranks(program, ranks=3, timeout_s=540)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = summaries(tmp_path)
    check_reuse(rows)
    assert np.isfinite([row["p50"] for row in rows[2].values() if isinstance(row, dict)]).all()
