"""Ranks that are one engine, for real: vLLM's external launcher over the ranks of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from ptstore_mpi.testing.launching import run_ranks

PROGRAM = Path(__file__).parent / "programs" / "tensor_parallel.py"


@pytest.mark.timeout(600)
def test_ranks_decide_alike(model):
    done = run_ranks([PROGRAM, model], ranks=3, timeout_s=540)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("alike") == 6
