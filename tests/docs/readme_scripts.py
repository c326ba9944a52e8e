"""README's scripts, taken out of README, how they are run, and what they must print."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TWO_NODES = {"PTSTORE_VIRTUAL_NODE_COUNT": "2"}


def save_script(name: str, folder: Path) -> Path:
    """Save the code that README says to save under this name, and return where it is."""
    pattern = r"```python\n((?:(?!```).)*)```\n\nSaved as `([\w.]+)`"
    found = re.findall(pattern, (ROOT / "README.md").read_text(), re.DOTALL)
    path = folder / name
    path.write_text({saved_as: code for code, saved_as in found}[name])
    return path


def outputs(
    python: str | Path,
    *arguments: str | Path,
    ranks: int = 0,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run ``python ARGUMENTS``, on ranks as README says to, and return its lines in order."""
    command: list[str | Path] = [python]
    if ranks:
        mpiexec = Path(python).with_name("mpiexec")
        launcher = mpiexec if mpiexec.exists() else "mpiexec"
        command = [launcher, "-n", str(ranks), python, "-m", "mpi4py"]
    return lines_of([*command, *arguments], folder=folder, environment=environment)


def lines_of(
    command: Sequence[str | Path],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run a command that must succeed and return its lines in order."""
    taken = dict(os.environ if environment is None else environment)
    taken.pop("PYTHONUNBUFFERED", None)  # with it lines of two ranks can mix
    done = subprocess.run(
        command,
        cwd=folder,
        env=taken,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def check_example_in_one_process(lines: list[str]) -> None:
    """Client 0 is alone and loads from its own node."""
    (line,) = lines
    assert line.startswith("client 0: 96 tokens")
    assert "'owned': 96" in line


def check_example_on_two_nodes(lines: list[str]) -> None:
    """Client 0 loads from its own node, client 1 from the other."""
    near, far = lines
    assert near.startswith("client 0: 96 tokens")
    assert far.startswith("client 1: 96 tokens")
    assert "'owned': 96" in near
    assert "'remote': 96" in far
