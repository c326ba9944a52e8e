"""CUDA tensors in a real MPI job of two virtual nodes, over the stand-in driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi, run_ranks

pytestmark = [
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(is_openmpi(), reason="MPICH's virtual nodes are needed"),
]


def test_near_and_far(library, monkeypatch):
    folders = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(folders))
    program = Path(__file__).parent / "programs" / "device_job.py"
    done = run_ranks([program], ranks=4, nodes=2, timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right, and nothing is left in the driver") == 4, done.stdout
    assert not done.stderr
