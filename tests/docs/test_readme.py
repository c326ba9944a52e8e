"""README's example is run as it stands, in one process and as a job."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    script = tmp_path / "example.py"
    script.write_text(found[1])
    return script


def outputs(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_in_one_process(example: Path) -> None:
    (line,) = outputs([sys.executable, str(example)])
    assert line.startswith("client 0: 96 tokens")
    assert "'owned': 96" in line


def test_as_a_job(example: Path) -> None:
    mpiexec = str(MPIEXEC) if MPIEXEC.exists() else "mpiexec"
    lines = outputs([mpiexec, "-n", "4", sys.executable, "-m", "mpi4py", str(example)])
    assert [line[:19] for line in lines] == [f"client {rank}: 96 tokens" for rank in range(3)]


def test_as_a_job_of_two_nodes(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTSTORE_VIRTUAL_NODE_COUNT", "2")
    mpiexec = str(MPIEXEC) if MPIEXEC.exists() else "mpiexec"
    near, far = outputs([mpiexec, "-n", "4", sys.executable, "-m", "mpi4py", str(example)])
    assert near.startswith("client 0: 96 tokens")
    assert far.startswith("client 1: 96 tokens")
    assert "'owned': 96" in near
    assert "'remote': 96" in far
