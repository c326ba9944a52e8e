"""All shell of the repository: syntax, shellcheck, and what each script says of itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path
    for folder in ("jobs", "tests", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".sh", ".pbs", ".sbatch"} or path == ROOT / ".ci" / "run"
)
HELPERS = {"lib.sh", "settings.sh", "experiment.sh", "environment.sh"}  # sourced, never run


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_every_script_is_found():
    assert {"jobs/local.sh", "jobs/polaris/qa_replay.pbs", ".ci/run"} < set(names(SCRIPTS))
    assert len([path for path in SCRIPTS if path.name in HELPERS]) == 5


def test_shellcheck_finds_nothing():
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        [shellcheck, "-x", *names(SCRIPTS)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_parses_and_stops_at_the_first_error(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if script.name in HELPERS:
        assert not os.access(script, os.X_OK)
    else:
        assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("machine", ["polaris", "slurm"])
def test_help_lists_every_setting_once_with_its_default(machine):
    script = ROOT / "jobs" / machine / "launch.sh"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    listed = re.findall(r"^  (JOB_[A-Z_]+) .*\n +default: .", done.stdout, re.MULTILINE)
    sources = [script.with_name("environment.sh"), *(ROOT / "jobs" / "common").glob("*.sh"), script]
    used = {name for path in sources for name in re.findall(r"\bJOB_[A-Z_]+", path.read_text())}
    assert len(listed) == len(set(listed)) > 20
    assert set(listed) == used - {"JOB_ID", "JOB_SETTINGS"}
