"""The driver as a job: several ranks, on one node and on two virtual ones."""

from __future__ import annotations

import h5py
import pytest

from experiments import report
from ptstore_mpi.testing.launching import find_mpiexec, run_ranks

DRIVER = ["-m", "experiments.exp_qa_replay"]
TOY = [
    "--dataset", "embedded", "--context-tokens", "96", "--documents", "3", "--requests", "12",
    "--memory-bytes-per-node", "16MiB", "--batch", "2", "--threads", "1", "--seed", "4",
]  # fmt: skip


@pytest.fixture
def run_job(repository, model_folder, tmp_path, monkeypatch):
    """Return a function that runs the driver on `ranks` ranks split into `nodes` nodes."""
    if find_mpiexec() is None:
        pytest.skip("no mpiexec beside this Python or on the PATH")
    monkeypatch.chdir(repository)

    def run(*arguments, ranks, nodes):
        folders = ["--model", str(model_folder), "--output", str(tmp_path)]
        return run_ranks([*DRIVER, *TOY, *folders, *arguments], ranks=ranks, nodes=nodes)

    return run


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (3, 1)])
def test_a_job_reuses_what_another_client_stored(run_job, tmp_path, ranks, nodes):
    done = run_job(ranks=ranks, nodes=nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    path = report.find_file(tmp_path)
    with report.open_results(path) as file:
        rows = {row["system"]: row for row in report.summarise(file)}
        bytes_per_token = file.attrs["bytes_per_token"]
        discarded = report.counter_total(file, "ptstore", report.DISCARDED_COUNTER)
        clients = file["samples/ptstore/client"][:].tolist()
        found_nodes = set(file["samples/ptstore/node"][:].tolist())
        assert (file.attrs["servers_count"], file.attrs["clients_count"]) == (nodes, 2)
        assert file.attrs["transport"] == "mpi"
        reason = {1: "one node: no bytes cross a wire", 2: "probed: MPI_Get works"}[nodes]
        assert file.attrs["transport_reason"] == reason
        # Client 1 takes up what client 0 was the first to compute, or the reverse.
        owned = file["samples/ptstore/owned_tokens"][:].sum()
    own = rows["ptstore"]
    assert [rows[name]["outputs_equal"] for name in rows] == [True] * 3
    assert sorted(clients) == [0] * 6 + [1] * 6
    assert found_nodes == set(range(nodes))
    assert own["rma_bytes"] == own["tokens"]["remote"] * bytes_per_token + discarded
    assert (own["tokens"]["remote"] > 0) == (nodes == 2)
    assert owned > 0
    # Pooling: at most both clients compute a document at once, later requests find it.
    assert own["tokens"]["recomputed"] <= rows["prefix"]["tokens"]["recomputed"]
    assert "answers of client 0" in done.stderr
    assert str(path.name) in done.stdout


def test_what_the_data_cannot_give_is_said_once_and_ends_the_job(run_job, tmp_path):
    done = run_job("--documents", "1000000", ranks=4, nodes=2)
    assert done.returncode != 0
    assert done.stderr.count("--documents 1000000 expected at most the") == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.h5"))


def test_a_wrong_command_line_is_said_once(run_job):
    done = run_job("--batch", "0", ranks=3, nodes=1)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("--batch: expected a whole number") == 1


def test_every_batch_of_every_client_is_recorded(run_job, tmp_path):
    done = run_job("--systems", "vanilla", ranks=3, nodes=1)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("*.h5")
    with h5py.File(path) as file:
        assert file["batches/vanilla/batch"][:].tolist() == [0, 0, 1, 1, 2, 2]
        assert file["batches/vanilla/client"][:].tolist() == [0, 1] * 3
        assert file["samples/vanilla/batch"][:].tolist() == [0] * 4 + [1] * 4 + [2] * 4
