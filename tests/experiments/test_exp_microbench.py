"""The microbenchmark at its smallest: every part runs, is reported together and drawn."""

from __future__ import annotations

import json

import pytest

from experiments import exp_microbench, report
from plots import plot_microbench
from ptstore_mpi.testing.launching import find_mpiexec, run_ranks

QUICK = ["--quick", "--repeats", "2", "--run", "toy"]


@pytest.fixture(scope="module")
def results(tmp_path_factory, repository):
    """Return a folder with the results of a quick run of all parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        return run_all(tmp_path_factory)


def run_all(tmp_path_factory):
    """Run all parts, as make bench does."""
    folder = tmp_path_factory.mktemp("bench")
    for part in ("alone", "local"):
        assert exp_microbench.main([part, *QUICK, "--output", str(folder)]) == 0
    if find_mpiexec() is not None:
        for part, ranks, nodes in (("messages", 2, 1), ("remote", 4, 2)):
            program = ["-m", "experiments.exp_microbench", part, *QUICK, "--output", folder]
            done = run_ranks(program, ranks=ranks, nodes=nodes, timeout_s=110)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_part_is_reported_and_drawn(results, capsys, tmp_path):
    assert report.main([str(results), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = {row["name"] for row in rows}
    wanted = {"hash", "start_up/4GiB", "index/1e4 blocks", "server/match"}
    wanted |= {
        f"local_{what}/{view}" for what in ("load", "store") for view in ("contiguous", "heads")
    }
    if find_mpiexec() is not None:
        wanted |= {"remote_load/64KiB", "remote_load/1MiB", "match/1 server, 1e4 blocks"}
        wanted |= {"message/ping", "message/flood"}
    assert wanted <= names
    for row in rows:
        assert ("tokens" in row) != ("size_bytes" in row), row
        assert row["unit"] in ("bytes/s", "tokens/s", "s")
        better_is_more = row["unit"] != "s"
        ratio = row["ours"] / row["reference"]
        assert row["ratio"] == pytest.approx(ratio if better_is_more else 1 / ratio)
    assert report.main([str(results)]) == 0
    assert "1 is as good as the reference" in capsys.readouterr().out
    figure = tmp_path / "figure.png"
    assert plot_microbench.main([str(results), "-o", str(figure)]) == 0
    assert figure.stat().st_size > 10_000


def test_remote_needs_two_nodes(tmp_path, repository, monkeypatch):
    monkeypatch.chdir(repository)
    if find_mpiexec() is None:
        pytest.skip("there is no mpiexec")
    program = ["-m", "experiments.exp_microbench", "remote", "--output", tmp_path]
    done = run_ranks(program, ranks=2)
    assert done.returncode != 0
    assert "expected at least 2 nodes, got 1" in done.stderr
    assert "Traceback" not in done.stderr
