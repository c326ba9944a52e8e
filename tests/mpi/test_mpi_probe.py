"""The probe at start: what it finds, and what the job does then."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "probe.py"

pytestmark = [
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(is_openmpi(), reason="MPICH's virtual nodes are needed"),
]


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
@pytest.mark.parametrize(
    ("fault", "choice"),
    [
        ("none", "mpi, probed: MPI_Get works"),
        ("hang", "p2p, a probing MPI_Get did not end within 0.5 s (rank 1)"),
        ("corrupt", "p2p, a probing MPI_Get brought wrong bytes (rank 1)"),
    ],
)
def test_all_ranks_choose_what_works_and_load_with_it(netmod, fault, choice):
    limit = "5" if fault == "none" else "0.5"
    done = run_ranks(
        [PROGRAM, f"probe_fault={fault}", f"probe_timeout_s={limit}"],
        ranks=4,
        nodes=2,
        netmod=netmod,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(choice) == 2, done.stdout
    assert "'remote': 512" in done.stdout
    said = done.stderr.count(f"ptstore: transport {choice.replace(',', ':')}; MPICH")
    assert said == (fault != "none"), done.stderr


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_a_get_that_was_only_late_leaves_nothing_behind(netmod):
    done = run_ranks([PROGRAM, "probe_timeout_s=0.000001"], ranks=4, nodes=2, netmod=netmod)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("p2p, a probing MPI_Get did not end within 1e-06 s") == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ptstore: transport p2p: ")


def test_the_rank_that_is_named_is_one_that_failed_in_that_way():
    done = run_ranks([PROGRAM, "wrong_and_late", "probe_timeout_s=0.5"], ranks=4, nodes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("did not end within 0.5 s (rank 3)") == 2, done.stdout


def test_a_probe_may_take_longer_than_the_open_around_it():
    settings = ["probe_fault=hang", "probe_timeout_s=4", "close_timeout_s=3"]
    done = run_ranks([PROGRAM, *settings], ranks=4, nodes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("did not end within 4 s (rank 1)") == 2, done.stdout


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("clean", 0, "will end without MPI_Finalize"),
        ("exit", 3, "will end without MPI_Finalize"),  # of the abort a launcher may say nothing
        ("raise", 1, "RuntimeError: the results do not add up"),
    ],
)
def test_after_a_fallback_a_job_ends_as_its_processes_do(netmod, mode, code, words):
    program = [PROGRAM.with_name("after.py"), mode]
    done = run_ranks(program, ranks=4, nodes=2, netmod=netmod, timeout_s=30)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stderr
    if mode == "clean":
        assert done.stdout.count("is done") == 4
        assert "Abort" not in done.stderr


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_a_call_that_never_returns_ends_the_job_and_says_what_to_set(netmod):
    started = time.monotonic()
    done = run_ranks(
        [PROGRAM, "probe_fault=stuck", "probe_timeout_s=0.5"], ranks=4, nodes=2, netmod=netmod
    )
    assert time.monotonic() - started < 15
    assert done.returncode != 0
    assert "client" not in done.stdout
    assert done.stderr.count("ptstore: rank 1: phase 'probe' did not end within 1.5 s") == 1
    assert 'transport = "p2p"' in done.stderr


@pytest.mark.parametrize("transport", ["mpi", "p2p"])
def test_what_is_asked_for_is_not_probed(transport):
    done = run_ranks([PROGRAM, f"transport={transport}", "probe_fault=stuck"], ranks=4, nodes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{transport}, asked for") == 2
    assert not done.stderr
