"""Jobs over two hosts that share nothing but a wire: network namespaces. Root only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from experiments import report
from ptstore_mpi.testing.conformance import CASES
from ptstore_mpi.testing.launching import find_mpiexec, run_ranks

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "mpi" / "programs"
SCRIPT = str(HERE / "virtual_hosts.sh")
HOST_COUNT = 2

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]


def why_not() -> str | None:
    """Return why this machine cannot make virtual hosts."""
    if find_mpiexec() is None:
        return "there is no mpiexec"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "bash") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@pytest.fixture(scope="module")
def run_on_hosts():
    """Return a function that runs a program on some ranks, 2 if not said, of each of 2 hosts."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    name, subnet = f"pt{os.getpid() % 100000}h", f"10.77.{os.getpid() % 250}"
    made = subprocess.run(
        ["bash", SCRIPT, "up", name, subnet, str(HOST_COUNT)],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        if made.returncode:
            pytest.skip(f"this kernel or container makes no namespaces: {made.stderr.strip()}")
        asked = ["bash", SCRIPT, "options", name, subnet, str(HOST_COUNT)]

        def run(*program, ranks=2, timeout_s=120.0):
            launcher = subprocess.check_output([*asked, str(ranks)], text=True).split()
            return run_ranks(
                program, ranks=ranks * HOST_COUNT, launcher_options=launcher, timeout_s=timeout_s
            )

        yield run
    finally:
        subprocess.run(["bash", SCRIPT, "down", name], check=True)


def test_conformance(run_on_hosts):
    done = run_on_hosts(PROGRAMS / "conformance.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"passed (\S+)", done.stdout) == list(CASES)


def test_loads_beside_a_busy_client(run_on_hosts):
    done = run_on_hosts(PROGRAMS / "one_sided.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bytes by RMA beside a busy client" in done.stdout


def test_the_main_job(run_on_hosts, tmp_path):
    """The experiment with the real model: what one host computed, the other loads."""
    pytest.importorskip("ptstore_mpi.integrations.smollm2")
    done = run_on_hosts(
        *("-m", "experiments.exp_qa_replay", "--dataset", "embedded", "--context-tokens", "512"),
        *("--documents", "2", "--requests", "8", "--batch", "2", "--routing", "round_robin"),
        *("--memory-bytes-per-node", "128MiB", "--output", str(tmp_path)),
        timeout_s=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with report.open_results(report.find_file(tmp_path)) as file:
        rows = {row["system"]: row for row in report.summarise(file)}
        assert len(set(file["samples/ptstore/node"][:].tolist())) == HOST_COUNT
        bytes_per_token = file.attrs["bytes_per_token"]
        discarded = report.counter_total(file, "ptstore", report.DISCARDED_COUNTER)
    own = rows["ptstore"]
    assert all(row["outputs_equal"] for row in rows.values())
    assert own["tokens"]["remote"] > 0
    assert own["rma_bytes"] == own["tokens"]["remote"] * bytes_per_token + discarded


def test_copies_of_a_hot_set_spare_the_wire(run_on_hosts, model_folder, tmp_path):
    """The same prompts with replicas and without: fewer bytes cross, the answers are the same."""
    done = run_on_hosts(
        *("-m", "experiments.exp_qa_replay", "--systems", "vanilla,evostore,ptstore"),
        *("--dataset", "embedded", "--context-tokens", "128", "--documents", "4"),
        *("--popularity", "uniform", "--requests", "48", "--batch", "3", "--threads", "1"),
        *("--memory-bytes-per-node", "16MiB", "--model", str(model_folder)),
        *("--fetch", "always"),
        *("--output", str(tmp_path)),
        ranks=3,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with report.open_results(report.find_file(tmp_path)) as file:
        rows = {row["system"]: row for row in report.summarise(file)}
    without, with_copies = rows["evostore"], rows["ptstore"]
    assert all(row["outputs_equal"] for row in rows.values())
    assert (without["tokens"]["replica"], with_copies["tokens"]["replica"] > 0) == (0, True)
    assert 0 < with_copies["rma_bytes"] < without["rma_bytes"]
