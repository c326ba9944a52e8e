"""A machine that looks like Polaris or like Slurm from inside a job: launcher, login files."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = Path(__file__).with_name("stand_in_launcher.py")
JOB_PREFIXES = ("JOB_", "PBS_", "SLURM_", "PMI_", "PTSTORE_", "MPIR_", "MPICH_", "UCX_", "EXPERIM")

# The small model of the tests of the experiments, which is a fixture there.
_SPEC = importlib.util.spec_from_file_location(
    "conftest_of_experiments", ROOT / "tests" / "experiments" / "conftest.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_EXPERIMENTS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_EXPERIMENTS)
model_folder = _EXPERIMENTS.model_folder


@dataclass
class Machine:
    """Runs scripts with stand-ins first on the PATH and remembers what they were asked for."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        self.log = self.folder / "launches.jsonl"
        # A login shell (bash -l) reads this last, so the PATH stays ours.
        home = self.folder / "home"
        home.mkdir()
        (home / ".bash_profile").write_text(f'export PATH="{self.bin}:{os.environ["PATH"]}"\n')
        kept = {k: v for k, v in os.environ.items() if not k.startswith(JOB_PREFIXES)}
        self.environment = {
            **kept,
            "HOME": str(home),
            "STAND_IN_LOG": str(self.log),
            "JOB_MODULES": "",
            "JOB_RESULTS": str(self.folder / "results"),
            "JOB_SCRATCH": str(self.folder / "scratch"),
            "JOB_VENV": sys.prefix,
            "PBS_O_WORKDIR": str(ROOT),
            "SLURM_SUBMIT_DIR": str(ROOT),
        }

    def put(self, name: str, text: str) -> Path:
        """Put a program on the PATH."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def pbs(self, *hosts: str) -> None:
        """Stand inside a PBS job on these hosts."""
        nodefile = self.folder / "nodefile"
        nodefile.write_text("".join(f"{host}\n" for host in hosts))
        self.environment |= {"PBS_NODEFILE": str(nodefile), "PBS_JOBID": "7.server"}
        (self.bin / "mpiexec").symlink_to(LAUNCHER)

    def slurm(self, nodes: int, cpus: int) -> None:
        """Stand inside a Slurm job."""
        self.environment |= {
            "SLURM_JOB_ID": "8",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_CPUS_ON_NODE": str(cpus),
        }
        (self.bin / "srun").symlink_to(LAUNCHER)

    def run(
        self, script: str | Path, *arguments: str, timeout_s: float = 60, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of the repository from elsewhere; a job script as a scheduler does."""
        command = [str(ROOT / script)]
        if not command[0].endswith(".sh"):
            spooled = self.folder / "spooled"
            spooled.write_bytes((ROOT / script).read_bytes())
            command = ["bash", "-l", str(spooled)]
        return subprocess.run(
            [*command, *arguments],
            env=self.environment | settings, cwd=self.folder, capture_output=True, text=True,
            timeout=timeout_s, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def launches(self) -> list[dict[str, Any]]:
        """Return what the launcher was asked for, in order."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(scope="session")
def evaluate() -> Callable[[str, str], str]:
    """Return a function that sources a script of jobs/ and evaluates an expression of bash."""

    def run(script: str, code: str, **settings: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", f"source jobs/{script}; {code}"],
            env={"PATH": os.environ["PATH"], **settings}, cwd=ROOT,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    return run
