"""Fan-out measured at toy size: what is recorded adds up, is reported and drawn."""

from __future__ import annotations

import json

import h5py
import pytest

from experiments import exp_fan_out, report, report_fan_out
from experiments.common.options import UsageError
from experiments.fan_out.options import parse_options
from plots import plot_fan_out

TOY = ["--nodes", "2", "--documents-per-node", "2", "--loads", "4", "--context-tokens", "256"]
MANY = [*TOY, "--nodes", "12", "--popularity", "zipf:2.0", "--redirect-mb", "1"]


@pytest.fixture
def measure(tmp_path, capsys):
    """Return a function that runs the driver in this process and returns its lines of JSON."""

    def run(*arguments):
        assert exp_fan_out.main([*arguments, "--json", "--output", str(tmp_path)]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_every_combination_is_a_run_and_its_parts_add_up(measure, tmp_path):
    rows = measure(*TOY, "--popularity", "zipf:1.0", "uniform")
    runs = [(row["popularity"], row["mode"]) for row in rows]
    assert runs == [(p, m) for p in ("zipf:1.0", "uniform") for m in ("replicas", "fan_out")]
    with h5py.File(report.find_file(tmp_path)) as file:
        nodes = {name: file[f"nodes/{name}"][:] for name in ("run", "sent_bytes")}
        loads = {name: column[:] for name, column in file["samples/loads"].items()}
        sent = file["runs/sent_bytes"][:].tolist()
        per_token = file.attrs["bytes_per_token"]
    assert [nodes["sent_bytes"][nodes["run"] == run].sum() for run in range(4)] == sent
    near = loads["owned_tokens"] + loads["replica_tokens"]
    assert (near + loads["remote_tokens"] == 256).all()
    assert len(loads["run"]) == 4 * 2 * 4
    for run, row in enumerate(rows):
        remote_tokens = loads["remote_tokens"][loads["run"] == run].sum()
        assert row["sent_bytes"] == remote_tokens * per_token > 0
        assert row["tokens"]["asked"] == 2 * 4 * 256


def test_with_fan_out_no_node_sends_more_than_without(measure):
    without, with_it = measure(*MANY)
    assert with_it["sent_max_over_mean"] < without["sent_max_over_mean"]
    assert with_it["hottest_bytes"] < without["hottest_bytes"]
    assert (without["redirect_count"], with_it["redirect_count"] > 0) == (0, True)
    two = measure(*TOY)
    assert two[1]["sent_max_over_mean"] <= two[0]["sent_max_over_mean"]


def test_the_same_seed_gives_the_same_run(measure):
    first, second, other = (measure(*MANY, "--seed", seed) for seed in ("5", "5", "6"))
    for rows in (first, second, other):
        for row in rows:
            del row["wall_s"]
    assert first == second != other


def test_it_is_reported_and_drawn(measure, tmp_path, capsys):
    rows = measure(*TOY)
    path = report.find_file(tmp_path)
    assert report.main([str(path), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert report.main([str(tmp_path)]) == 0
    assert "fan_out" in capsys.readouterr().out
    assert plot_fan_out.main([str(tmp_path)]) == 0
    ratio = rows[0]["sent_max_over_mean"]
    assert f"2 nodes, zipf:1.0, replicas: sent max / mean {ratio:.2f}" in capsys.readouterr().out
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("place", "complaint"),
    [("nodes/sent_bytes", "nodes sent "), ("samples/loads/owned_tokens", "do not add up")],
)
def test_a_file_that_contradicts_itself_is_refused(measure, tmp_path, place, complaint):
    measure(*TOY)
    with h5py.File(report.find_file(tmp_path), "r+") as file:
        file[place][0] += 1
        with pytest.raises(report.ReportError, match=complaint):
            report_fan_out.summarise(file)


def test_what_is_no_result_of_it_is_not_drawn(measure, tmp_path, capsys):
    measure(*TOY)
    path = report.find_file(tmp_path)
    with h5py.File(path, "r+") as file:
        file["runs/mode"][0] = "sideways"
    assert plot_fan_out.main([str(path)]) == 1
    assert "run 0: expected nodes, loads and a mode" in capsys.readouterr().err
    with h5py.File(path, "r+") as file:
        file.attrs["experiment"] = "exp_microbench"
    assert plot_fan_out.main([str(path)]) == 1
    assert "expected results of exp_fan_out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nodes", "1"], "expected a whole number of at least 2"),
        (["--modes", "sideways"], "invalid choice: 'sideways'"),
        (["--popularity", "distinct"], "expected documents that recur, given 'distinct'"),
        (["--popularity", "zipf:x"], "zipf"),
        (["--context-tokens", "200"], "expected whole blocks of 128 tokens, given '200'"),
        (["--link-gb-per-s", "0"], "expected a number of 0.001 to 10000, given '0'"),
        (["--latency-us", "nan"], "expected a number of 0 to 1e"),
        (["--memory-gb", "8"], "--memory-gb: expected room for 16 documents of 536870912 bytes"),
        (["--nodes", "4096", "--documents-per-node", "17", "--model", "deepseek-v3"],
         "--documents-per-node: expected at most 65536 documents in all"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        parse_options(arguments)


def test_what_cannot_be_run_is_said(tmp_path, capsys):
    output = ["--output", str(tmp_path / "results")]
    assert exp_fan_out.main(["--seed", "x", *output]) == 2
    assert "--seed: expected a whole number" in capsys.readouterr().err.splitlines()[-1]
    slow = ["--nodes", "4", "--link-gb-per-s", "0.001", "--documents-per-node", "1"]
    large = ["--context-tokens", "65408", "--loads", "1", "--popularity", "zipf:9"]
    assert exp_fan_out.main([*slow, *large, *output]) == 2
    assert "expected every load to end within 10000 s" in capsys.readouterr().err.splitlines()[-1]
