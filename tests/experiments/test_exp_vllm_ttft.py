"""TTFT of vLLM over context length: with a stand-in for vLLM over the real store, and for real."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
import vllm_stand_in

from experiments import exp_vllm_ttft, record, report, report_vllm_ttft
from experiments.common import vllm_answers
from experiments.common.options import UsageError
from experiments.vllm_ttft.engine import Answer
from experiments.vllm_ttft.options import parse_options
from experiments.vllm_ttft.prompts import WARM_UP, build_prompts
from plots import plot_vllm_ttft
from ptstore_mpi.testing.launching import find_mpiexec, run_ranks

TOY = [
    "--dataset", "embedded", "--context-tokens", "256,96", "--repeats", "2", "--output-tokens", "4",
    "--memory-bytes-per-node", "16MiB", "--seed", "4",
]  # fmt: skip
HERE = ("vanilla", "prefix", "ptstore_local")
SOURCES = {"prefix": "engine", "ptstore_local": "owned", "ptstore_remote": "remote"}


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

    def run(*more, ranks, nodes):
        program = ["-m", "tests.experiments.vllm_stand_in", *arguments, *more]
        return run_ranks(program, ranks=ranks, nodes=nodes)

    return run


def summaries(folder):
    with report.open_results(report.find_file(folder)) as file:
        rows = report_vllm_ttft.summarise(file)
    return {(row["system"], row["context_tokens"]): row for row in rows}


def check(rows, systems):
    """Every system reused what it is here for, and nothing else."""
    assert list(rows) == [(name, length) for length in (96, 256) for name in systems]
    for (name, length), row in rows.items():
        tokens = dict(row["tokens"])
        assert row["requests"] == 2
        assert row["outputs_equal"] is True
        assert tokens.pop("asked") == sum(tokens.values()) > 2 * length
        reused = {key for key, count in tokens.items() if count and key != "recomputed"}
        assert reused == ({SOURCES[name]} if name in SOURCES else set())
        assert row["speedup"] == rows["vanilla", length]["ttft_s"]["p50"] / row["ttft_s"]["p50"]
        assert (row["speedup"] > 1) == (name in SOURCES)


def test_in_one_process_three_systems_are_measured(arguments, tmp_path, capsys):
    assert exp_vllm_ttft.main(arguments, open_engine=vllm_stand_in.open_stand_in) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("ptstore_remote is left out: it needs a client on another node\n")
    assert "vanilla" in shown.out
    rows = summaries(tmp_path)
    check(rows, HERE)
    path = report.find_file(tmp_path)
    assert f"results: {path}" in shown.out
    with h5py.File(path) as file:
        # The lengths take turns; the prompt that warmed up is not recorded.
        assert file["samples/prefix/request"][:].tolist() == [0, 1, 2, 3]
        assert file["samples/prefix/repeat"][:].tolist() == [0, 0, 1, 1]
        assert file["samples/prefix/context_tokens"][:].tolist() == [96, 256] * 2
        assert file["samples/prefix/same_tokens"][:].tolist() == [4] * 4
        assert file.attrs["systems"] == ",".join(HERE)
        assert file.attrs["complete"]
        stored = json.loads(file.attrs["config"])["store"]
    assert (stored["replica_admission"], stored["placement"]) == ("never", "local")
    assert report.main([str(path), "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == list(rows.values())


@pytest.mark.parametrize(("ranks", "away"), [(4, 1), (6, 2)])
def test_over_two_nodes_the_other_loads_too(run_job, tmp_path, ranks, away):
    done = run_job(ranks=ranks, nodes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stderr
    check(summaries(tmp_path), (*HERE, "ptstore_remote"))
    with h5py.File(report.find_file(tmp_path)) as file:
        assert set(file["samples/ptstore_local/client"][:]) == {0}
        assert set(file["samples/ptstore_remote/client"][:]) == {away}
        assert set(file["samples/ptstore_remote/node"][:]) == {1}
        assert file.attrs["clients_count"] == ranks - 2


def test_what_the_model_cannot_take_is_said_once(run_job, tmp_path):
    done = run_job("--context-tokens", "1000", ranks=4, nodes=2)
    assert done.returncode == 2
    assert done.stderr.count("--context-tokens 1000: with its question and 4 tokens of") == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.h5*"))


@pytest.mark.parametrize("name", ["--memory-bytes-per-node", "--engine-cache-bytes"])
def test_memory_that_cannot_hold_a_prompt_is_refused(arguments, capsys, name):
    more = [*arguments, name, "64KiB"]
    assert exp_vllm_ttft.main(more, open_engine=vllm_stand_in.open_stand_in) == 2
    assert f"{name}: expected at least the " in capsys.readouterr().err


def prompts_of(*arguments):
    documents = exp_documents()
    return build_prompts(documents, lambda text: list(text.encode()), parse_options(arguments))


def exp_documents():
    from experiments.common.datasets import load_documents

    return load_documents("embedded", seed=1)


def test_prompts_have_exact_contexts_and_no_first_block_in_common():
    found = prompts_of("--context-tokens", "32,700,128", "--repeats", "3")
    assert [prompt.context_tokens for prompt in found.measured] == [32, 128, 700] * 3
    assert (found.warm_up.repeat, found.warm_up.context_tokens) == (WARM_UP, 32)
    every = [found.warm_up, *found.measured]
    assert len({prompt.tokens[:16] for prompt in every}) == len(every)
    for prompt in every:
        question = bytes(prompt.tokens[prompt.context_tokens :])
        assert question.startswith(b"\n\nQuestion: ")
        assert question.endswith(b"\nAnswer:")
    assert found.longest_tokens == max(len(prompt.tokens) for prompt in every) + 16
    again = prompts_of("--context-tokens", "32,128,700", "--repeats", "3")
    assert again == found
    other = prompts_of("--context-tokens", "32,128,700", "--repeats", "3", "--seed", "2")
    assert other.digest() != found.digest() == again.digest()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--context-tokens", "1024,x"], "--context-tokens: expected a whole number"),
        (["--context-tokens", "15"], "expected a whole number of at least 16"),
        (["--context-tokens", ""], "--context-tokens: expected a whole number"),
        (["--repeats", "0"], "--repeats: expected a whole number of at least 1"),
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


def test_lengths_are_sorted_and_taken_once():
    assert parse_options(["--context-tokens", "64, 32,64"]).context_tokens == (32, 64)
    assert parse_options([]).context_tokens == (1024, 2048, 4096, 8064)


def test_without_vllm_it_is_said(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vllm_answers.importlib.util, "find_spec", lambda name: None)
    assert exp_vllm_ttft.main(arguments) == 2
    assert capsys.readouterr().err == "vLLM is not installed: make setup-vllm\n"
    assert not list(tmp_path.iterdir())


def measured(system, ttft_s, *, request=0, length=96, tokens=(1, 2, 3, 4), **changes):
    """One answer of 100 tokens, recomputed but for what `changes` says of the sources."""
    row = {name: 0 for name in exp_vllm_ttft.samples_of(system).columns if name != "same_tokens"}
    row |= {"request": request, "context_tokens": length, "prompt_tokens": 100}
    row |= {"asked_tokens": 100, "output_tokens": 4, "reason": "", "ttft_s": ttft_s} | changes
    row["ttft_cpu_s"] = 2 * ttft_s
    reused = sum(row[f"{source}_tokens"] for source in SOURCES.values())
    row |= {"recomputed_tokens": 100 - reused} | changes
    answer = Answer(
        prompt_tokens=100, tokens=tokens, start_s=0.0, ttft_s=ttft_s, ttft_cpu_s=ttft_s,
        total_s=0.0, cpu_s=0.0, facts={},
    )  # fmt: skip
    return exp_vllm_ttft.Measured(system, answer, row)


def write(folder, *prompts, dtype="float32"):
    """Write a file of these prompts' answers."""
    options = parse_options(["--dtype", dtype])
    attributes = {"experiment": "exp_vllm_ttft", "reference": "vanilla", "transport": "mpi"}
    with record.ResultFile(folder, "made", attributes) as file:
        for found in prompts:
            exp_vllm_ttft.record_answers(file, found, options)
        return file.finish()


def usual(request, vanilla_s, local_s, **changes):
    return [
        measured("vanilla", vanilla_s, request=request),
        measured("ptstore_local", local_s, request=request, owned_tokens=96, **changes),
    ]


def test_the_numbers_of_a_known_file(tmp_path):
    write(tmp_path, usual(0, 8.0, 1.0), usual(1, 4.0, 2.0), usual(2, 10.0, 4.0))
    rows = summaries(tmp_path)
    own = rows["ptstore_local", 96]
    spread = {"p50": 2.0, "p90": 3.6, "p99": 3.96, "mean": 7 / 3, "min": 1.0}
    assert own["ttft_s"] == pytest.approx(spread)
    assert own["ttft_cpu_s"] == pytest.approx({name: 2 * s for name, s in spread.items()})
    assert own["speedup"] == own["cpu_speedup"] == 4.0
    assert rows["vanilla", 96]["speedup"] == 1.0
    assert own["tokens"] == {
        "asked": 300, "engine": 0, "owned": 288, "replica": 0, "remote": 0, "disk": 0,
        "recomputed": 12,
    }  # fmt: skip


def test_one_differing_token_makes_outputs_differ(tmp_path):
    write(tmp_path, usual(0, 8.0, 1.0), usual(1, 8.0, 1.0, tokens=(1, 2, 9, 4)))
    rows = summaries(tmp_path)
    assert rows["vanilla", 96]["outputs_equal"] is True
    assert rows["ptstore_local", 96]["outputs_equal"] is False
    with h5py.File(report.find_file(tmp_path)) as file:
        assert file["samples/ptstore_local/same_tokens"][:].tolist() == [4, 2]


def test_below_float32_the_reference_is_computed_in_two_parts(tmp_path):
    split = {"tokens": (1, 2, 9, 4), "engine_tokens": 96}
    found = [*usual(0, 8.0, 1.0, tokens=(1, 2, 9, 4)), measured("prefix", 1.0, **split)]
    write(tmp_path, found, dtype="bfloat16")
    equal = {name: row["outputs_equal"] for (name, _), row in summaries(tmp_path).items()}
    assert equal == {"vanilla": False, "prefix": True, "ptstore_local": True}


def test_a_system_that_did_not_reuse_is_named(tmp_path, capsys):
    missed = measured("ptstore_local", 8.0, reason="not_found")
    write(tmp_path, [measured("vanilla", 8.0), missed])
    assert report.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ptstore_local at 96 tokens: expected to reuse owned tokens, reasons not_found" in shown


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"recomputed_tokens": 5}, r"ptstore_local, request 0: .*add up to 101, asked were 100"),
        ({"prompt_tokens": 99}, "the engine to have seen the prompt that was asked"),
        ({"local_s": 0.0}, "expected ttft_s above 0, found ttft_s 0.0"),
        ({"local_s": float("nan")}, "expected ttft_s above 0, found ttft_s nan"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, capsys, change, complaint):
    write(tmp_path, usual(0, 8.0, **{"local_s": 1.0} | change))
    with pytest.raises(report.ReportError, match=complaint):
        summaries(tmp_path)
    assert report.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == ""


def test_a_file_without_samples_is_refused(tmp_path, capsys):
    path = write(tmp_path, usual(0, 8.0, 1.0))
    with h5py.File(path, "r+") as file:
        del file["samples/vanilla"], file["samples/ptstore_local"]
    assert report.main([str(path)]) == 1
    assert "expected samples of vanilla, prefix" in capsys.readouterr().err
    assert plot_vllm_ttft.main([str(path)]) == 1
    assert "expected samples of vanilla, prefix" in capsys.readouterr().err


def test_it_is_drawn(tmp_path, capsys):
    longer = [measured("vanilla", 12.0, request=1, length=128)]
    path = write(tmp_path, usual(0, 8.0, 1.0), longer)
    assert plot_vllm_ttft.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ptstore_local, 96 tokens: TTFT median 1.000 s, 8.0x\n" in shown
    assert "vanilla, 128 tokens: TTFT median 12.000 s, 1.0x\n" in shown
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_result_of_it_is_not_drawn(tmp_path, capsys):
    path = write(tmp_path, usual(0, 8.0, 1.0))
    with h5py.File(path, "r+") as file:
        file["samples/vanilla/ttft_s"][0] = 0.0
    assert plot_vllm_ttft.main([str(path)]) == 1
    assert "expected ttft_s above 0 everywhere" in capsys.readouterr().err
    with h5py.File(path, "r+") as file:
        file.attrs["experiment"] = "exp_fan_out"
    assert plot_vllm_ttft.main([str(path)]) == 1
    assert "expected results of exp_vllm_ttft" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not vllm_answers.is_installed(), reason="vLLM is not installed")
def test_with_vllm_outputs_are_equal_and_loading_is_faster(repository, tmp_path, monkeypatch):
    if find_mpiexec() is None:
        pytest.skip("no mpiexec beside this Python or on the PATH")
    monkeypatch.chdir(repository)
    program = [
        "-m", "experiments.exp_vllm_ttft", "--context-tokens", "1024", "--repeats", "1",
        "--dataset", "embedded", "--output", str(tmp_path),
    ]  # fmt: skip
    done = run_ranks(program, ranks=4, nodes=2, timeout_s=540)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = summaries(tmp_path)
    assert [name for name, _ in rows] == [*HERE, "ptstore_remote"]
    for (name, _), row in rows.items():
        assert row["outputs_equal"] is True, name
        if name in SOURCES:
            assert row["tokens"][SOURCES[name]] == 1024
            assert row["cpu_speedup"] > 2, row
    assert rows["vanilla", 1024]["tokens"]["recomputed"] == rows["vanilla", 1024]["tokens"]["asked"]
    assert np.isfinite([row["cpu_s"]["p50"] for row in rows.values()]).all()
