"""`ptstore doctor` alone and as a job: what it finds, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi, run_ranks

DOCTOR = ["-m", "ptstore_mpi", "doctor"]

pytestmark = [
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(is_openmpi(), reason="MPICH's virtual nodes are needed"),
]


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_a_job_that_is_fit(monkeypatch, netmod):
    monkeypatch.setenv("PTSTORE_MEMORY_BYTES", "32MiB")
    done = run_ranks([*DOCTOR, "--json"], ranks=4, nodes=2, netmod=netmod)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    job, (host,) = report["job"], report["job"]["hosts"]
    assert report["usable"]
    assert report["advice"] == []
    assert report["mpi"]["library"].startswith("MPICH")
    assert netmod in report["mpi"]["netmod"]
    assert report["mpi"]["started_by_mpi4py"]
    assert [job[f"{name}_count"] for name in ("rank", "node", "server", "client")] == [4, 2, 2, 2]
    assert (job["transport"], job["transport_reason"]) == ("mpi", "probed: MPI_Get works")
    assert 0 < job["probe_s"] < 5
    assert host["shared_memory_wanted_bytes"] == 64 << 20
    assert not done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        (
            "PTSTORE_VERIFY",
            "never",
            "verify (environment variable PTSTORE_VERIFY): expected one of off, remote",
        ),
        ("PTSTORE_MEMORY_BYTES", "100TB", "lower memory_bytes"),
        ("PTSTORE_SERVERS_PER_NODE", "5", "servers_per_node = 5, but node 0 has only 2"),
    ],
)
def test_a_job_that_cannot_open(monkeypatch, variable, value, error):
    monkeypatch.setenv(variable, value)
    done = run_ranks(DOCTOR, ranks=4, nodes=2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count(error) == 1
    assert "Traceback" not in done.stderr


def test_a_job_that_hangs_while_it_opens(monkeypatch):
    monkeypatch.setenv("PTSTORE_PROBE_FAULT", "stuck")
    monkeypatch.setenv("PTSTORE_PROBE_TIMEOUT_S", "0.5")
    done = run_ranks([*DOCTOR, "--json"], ranks=4, nodes=2)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert not report["usable"]
    assert report["mpi"]["library"].startswith("MPICH")
    assert "phase 'probe' did not end within" in report["error"]


def test_alone_by_its_own_name():
    command = Path(sys.executable).with_name("ptstore")
    program = [str(command)] if command.exists() else [sys.executable, "-m", "ptstore_mpi"]
    done = subprocess.run(
        [*program, "doctor"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "local: one rank: the server runs in process" in done.stdout
    assert "advice         one rank tells nothing about MPI" in done.stdout
