"""Real MPI jobs beyond the conformance suite: disorder, goodbyes, and jobs beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi, run_ranks

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(is_openmpi(), reason="MPICH's virtual nodes are needed"),
]


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_jobs_follow_each_other_and_stand_side_by_side(nodes, netmod):
    done = run_ranks([PROGRAMS / "life.py"], ranks=4, nodes=nodes, netmod=netmod)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finalized") == 4
    assert done.stdout.count("closed is closed") == 4 - nodes
    assert not done.stderr


@pytest.mark.parametrize(
    ("ranks", "netmod", "settings"),
    [
        (4, "ucx", ("placement=random", "verify=always")),
        (4, "ofi", ("placement=least_loaded",)),
        (4, "ucx", ("load_timeout_s=0.002",)),  # most loads end with Gets in flight
        (4, "ucx", ("store_timeout_s=0.001", "unconfirmed_count=4")),
        (4, "ucx", ("match_timeout_s=0.001", "retry_s=0.0003")),  # everything is sent again
        (4, "ofi", ("lease_cap_s=0.001", "retry_s=0.0005")),
        (8, "ucx", ("servers_per_node=2", "memory_bytes=524288")),
        (4, "ofi", ("transport=p2p", "load_timeout_s=0.002", "store_timeout_s=0.005")),
    ],
)
def test_disorder_ends_in_order(ranks, netmod, settings):
    done = run_ranks([PROGRAMS / "chaos.py", "5", *settings], ranks=ranks, nodes=2, netmod=netmod)
    assert done.returncode == 0, done.stdout + done.stderr
    clients = ranks - 2 * (2 if "servers_per_node=2" in settings else 1)
    assert done.stdout.count(" steps, ") == clients


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_a_client_takes_part_in_two_jobs(netmod):
    done = run_ranks([PROGRAMS / "several.py", "works"], ranks=6, nodes=2, netmod=netmod)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("closed by itself") == 2
    assert done.stdout.count("finalized") == 6
    assert not done.stderr


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("fails", "rank 5: failed in phase 'main'"),
        ("memory", "rank 1: cannot open the job: host"),
    ],
)
def test_an_error_in_one_of_two_jobs_ends_both(fault, expected):
    done = run_ranks([PROGRAMS / "several.py", fault], ranks=6, nodes=2, timeout_s=40)
    assert done.returncode != 0
    assert done.stderr.count(expected) == 1, done.stderr
    assert done.stderr.count("ptstore: rank") == 1, done.stderr


def test_threads_share_a_store():
    done = run_ranks([PROGRAMS / "threads.py"], ranks=4, nodes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("threads took turns") == 2


@pytest.mark.parametrize(("segments", "nodes"), [(100, 1), (4000, 1), (4000, 2)])
def test_answers_that_nobody_takes_do_not_hold_up_the_close(segments, nodes):
    done = run_ranks([PROGRAMS / "late_reply.py", str(segments)], ranks=4, nodes=nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("closed") == 4


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_program_goes_on_after_jobs_that_could_not_open(nodes):
    done = run_ranks([PROGRAMS / "caught.py"], ranks=4, nodes=nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("went on") == 4
    assert not done.stderr, "MPI complains at the end where a handle was not freed"
