"""One engine per process: a second one is refused, a failed one leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

PROGRAM = Path(__file__).parent / "programs" / "one_engine.py"


def test_engines_follow_each_other(model):
    done = subprocess.run(
        [sys.executable, PROGRAM, model],
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one after the other" in done.stdout
