"""The driver as a job: several ranks, on one node and on two virtual ones."""

from __future__ import annotations

import time
from pathlib import Path

import h5py
import pytest

from experiments import report
from ptstore_mpi.arena import free_bytes_of
from ptstore_mpi.testing.launching import find_mpiexec, run_ranks

SHARED_MEMORY = Path("/dev/shm")
DRIVER = ["-m", "experiments.exp_qa_replay"]
TOY = [
    "--dataset", "embedded", "--context-tokens", "96", "--documents", "3", "--requests", "12",
    "--memory-bytes-per-node", "16MiB", "--batch", "2", "--threads", "1", "--seed", "4",
    "--fetch", "always",
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


@pytest.mark.parametrize(("nodes", "virtual"), [(2, 0), (1, 2)])
def test_systems_with_servers_of_their_own_answer_in_turn(
    run_job, tmp_path, monkeypatch, nodes, virtual
):
    monkeypatch.setenv("PTSTORE_VIRTUAL_NODE_COUNT", str(virtual))
    systems = "vanilla,prefix_node,evostore,ptstore"
    done = run_job("--systems", systems, ranks=8, nodes=nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    path = report.find_file(tmp_path)
    with report.open_results(path) as file:
        rows = {row["system"]: row for row in report.summarise(file)}
        requests = [file[f"samples/{name}/request"][:].tolist() for name in rows]
        servers = {name: file[f"servers/{name}/node"][:].tolist() for name in list(rows)[1:]}
        kept = {name: file[f"servers/{name}/counters/owned_bytes"][:].sum() for name in servers}
        assert file.attrs["servers_count"] == 6
        assert (file.attrs["clients_count"], file.attrs["transport"]) == (2, "mpi")
        assert set(file["samples/prefix_node/node"][:].tolist()) == {0, 1}
    assert ",".join(rows) == systems
    assert all(found == requests[0] for found in requests)
    assert {row["outputs_equal"] for row in rows.values()} == {True}
    assert set(map(tuple, servers.values())) == {(0, 1)}
    # Both pooled ones find what the other node has; without pooling each node computes it.
    assert rows["evostore"]["tokens"]["remote"] > 0 < rows["ptstore"]["tokens"]["remote"]
    assert rows["prefix_node"]["tokens"]["remote"] == 0
    assert kept["prefix_node"] > max(kept["evostore"], kept["ptstore"]) > 0
    assert "prefix_node" in done.stdout


@pytest.mark.parametrize(
    ("systems", "ranks", "servers", "clients"),
    [
        ("evostore,ptstore", 6, 1, 2),
        ("prefix_node,ptstore", 5, 1, 1),  # the second node has servers and no client
        ("evostore,ptstore", 10, 2, 2),
    ],
)
def test_ranks_of_a_node_are_servers_of_each_system_then_clients(
    run_job, tmp_path, monkeypatch, systems, ranks, servers, clients
):
    monkeypatch.setenv("PTSTORE_SERVERS_PER_NODE", str(servers))
    done = run_job("--systems", systems, "--requests", "6", ranks=ranks, nodes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    with report.open_results(report.find_file(tmp_path)) as file:
        assert ",".join(file["samples"]) == systems
        assert file.attrs["clients_count"] == clients
        nodes = file["servers/ptstore/node"][:].tolist()
    assert nodes == [0] * servers + [1] * servers


@pytest.fixture
def nothing_is_left():
    """A refused run opens no job, which would take MPI's names away. Others' come and go."""
    before = set(SHARED_MEMORY.glob("mpich_shm_*"))
    yield
    until = time.monotonic() + 10
    while left := set(SHARED_MEMORY.glob("mpich_shm_*")) - before:
        assert time.monotonic() < until, left
        time.sleep(0.1)


@pytest.mark.usefixtures("nothing_is_left")
def test_memory_for_one_system_may_be_too_little_for_two(run_job, tmp_path):
    third = free_bytes_of("/dev/shm") // 3  # of the host, for one of two nodes
    sizes = ["--memory-bytes-per-node", str(third)]
    done = run_job("--systems", "evostore,ptstore", *sizes, ranks=6, nodes=2)
    assert done.returncode == 2
    assert done.stderr.count("the servers of all systems want arenas of") == 1
    assert not list(tmp_path.rglob("*.h5*"))


@pytest.mark.usefixtures("nothing_is_left")
def test_too_few_ranks_are_refused_with_how_many_are_needed(run_job, tmp_path):
    done = run_job("--systems", "evostore,ptstore", ranks=4, nodes=2)
    assert done.returncode == 2
    assert done.stderr.count("expected at least 3 ranks on each node, 6 on 2 node(s)") == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.h5*"))


def test_what_the_data_cannot_give_is_said_once_and_ends_the_job(run_job, tmp_path):
    done = run_job("--documents", "1000000", ranks=4, nodes=2)
    assert done.returncode != 0
    assert done.stderr.count("--documents 1000000 expected at most the") == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.h5"))


@pytest.mark.usefixtures("nothing_is_left")
def test_a_wrong_setting_is_said_once(run_job, monkeypatch):
    monkeypatch.setenv("PTSTORE_VERIFY", "nowhere")
    done = run_job(ranks=4, nodes=2)
    assert done.returncode == 2
    assert done.stderr.count("environment variable PTSTORE_VERIFY") == 1


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
