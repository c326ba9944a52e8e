"""Real MPI jobs: the conformance suite at every rank count, over virtual nodes and both netmods."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ptstore_mpi.testing.conformance import CASES
from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
SHARED_MEMORY = Path("/dev/shm")

pytestmark = [
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(is_openmpi(), reason="MPICH's virtual nodes are needed"),
]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No arena outlives its job, however that ended. Other jobs' names are there for moments."""
    before = set(SHARED_MEMORY.glob("ptstore-arena-*"))
    yield
    until = time.monotonic() + 10
    while left := set(SHARED_MEMORY.glob("ptstore-arena-*")) - before:
        assert time.monotonic() < until, left
        time.sleep(0.1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "nodes", "netmod", "settings"),
    [
        (1, 1, "ucx", ()),
        (2, 1, "ucx", ()),
        (3, 1, "ucx", ()),
        (4, 1, "ofi", ()),
        (3, 2, "ucx", ()),  # the second node has a server and no client
        (4, 2, "ucx", ()),
        (4, 2, "ofi", ()),
        (6, 2, "ucx", ("servers_per_node=2",)),
        (3, 1, "ucx", ("p2p",)),
        (4, 2, "ucx", ("p2p",)),
        (4, 2, "ofi", ("p2p",)),
        (4, 1, "ucx", ("virtual_node_count=2",)),
    ],
)
def test_conformance(ranks, nodes, netmod, settings):
    done = run_ranks(
        [PROGRAMS / "conformance.py", *settings],
        ranks=ranks,
        nodes=nodes,
        netmod=netmod,
        timeout_s=270,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"passed (\S+)", done.stdout) == list(CASES)
    assert not done.stderr, "MPI complains at the end where a handle was not freed"


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_loads_beside_a_busy_client(netmod):
    done = run_ranks([PROGRAMS / "one_sided.py"], ranks=4, nodes=2, netmod=netmod)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bytes by RMA beside a busy client" in done.stdout


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("main", "rank 3: failed in phase 'main'"),
        ("settings", "the settings must be equal on every rank"),
        ("memory", "lower memory_bytes"),
        ("roles", "servers_per_node = 7, but node 0 has only 2"),
        ("folder", "the settings must be equal on every rank"),
        ("variable", "environment variable PTSTORE_TRANSPORT"),
    ],
)
def test_an_error_ends_the_whole_job(fault, expected):
    started = time.monotonic()
    done = run_ranks([PROGRAMS / "failing.py", fault], ranks=4, nodes=2)
    assert done.returncode != 0
    assert done.stderr.count(expected) == 1, done.stderr
    assert time.monotonic() - started < 30
    if fault == "main":
        assert "RuntimeError: the engine fell over" in done.stderr
    else:
        assert "ptstore: rank 0: cannot open the job: " in done.stderr
        assert "Traceback" not in done.stderr
