"""Engines on two nodes of a real MPI job: over both netmods, and while a server stands still."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi, run_ranks

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(is_openmpi(), reason="MPICH's virtual nodes are needed"),
    pytest.mark.timeout(600),
]


def run(program, model, *, netmod):
    done = run_ranks([PROGRAMS / program, model], ranks=4, nodes=2, netmod=netmod, timeout_s=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_prefixes_and_conversations_move(model, netmod):
    assert run("two_nodes.py", model, netmod=netmod).count("moved") == 6


@pytest.fixture(scope="module", params=["ucx", "ofi"])
def stops(request, model):
    """Return what happened to requests while a server stood still, a line each."""
    out = run("server_stops.py", model, netmod=request.param)
    return [line for line in out.splitlines() if line.startswith("node ")]


def test_a_server_stops(stops):
    assert len(stops) == 2 * 3 * 4
    late = [line for line in stops if line.endswith("late") and "6 at once" not in line]
    assert not late


def test_a_server_stops_under_many(stops):
    late = [line for line in stops if line.endswith("late") and "6 at once" in line]
    assert not late
