"""Which GPU, cores and network interface each rank of a node gets."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from experiments.baselines import DEFAULT_SYSTEMS, STORE_SETTINGS, SYSTEMS

WRAPPER = Path(__file__).resolve().parents[2] / "jobs" / "common" / "gpu_affinity.sh"
TELL = 'echo "${CUDA_VISIBLE_DEVICES-unset} ${OMP_NUM_THREADS-unset}"'
COUNTS = list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4)))

# From the machine overview of Polaris: cores at each GPU, and at each network interface.
CORES_AT_GPU = {0: range(24, 32), 1: range(16, 24), 2: range(8, 16), 3: range(8)}
CORES_AT_INTERFACE = {0: range(8), 1: range(16, 24)}


def wrap(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [WRAPPER, "bash", "-c", TELL],
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "7", **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def cpus(text: str) -> set[int]:
    """Return the CPUs of a list such as 0-7,32."""
    ends = [list(map(int, part.split("-"))) for part in text.split(",")]
    return {cpu for end in ends for cpu in range(end[0], end[-1] + 1)}


@pytest.mark.parametrize(
    "variable", ["PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"]
)
def test_every_client_has_its_gpu_and_servers_have_none(variable):
    seen = [
        wrap(**{variable: str(rank), "JOB_SERVERS": "2", "JOB_GPUS": "0:1:2:3"}).stdout
        for rank in range(6)
    ]
    assert seen == [" 1\n", " 1\n", "0 7\n", "1 7\n", "2 7\n", "3 7\n"]


def test_servers_of_several_systems_have_no_gpu():
    counts = {"JOB_SERVERS": "2", "POOLED_SYSTEMS": "2", "JOB_GPUS": "0:1"}
    seen = [wrap(PALS_LOCAL_RANKID=str(rank), **counts).stdout for rank in range(6)]
    assert seen == [" 1\n"] * 4 + ["0 7\n", "1 7\n"]


@pytest.mark.parametrize(
    ("rank", "gpus", "seen"),
    [("1", "3:2", "3 7\n"), ("2", "3:2", "2 7\n"), ("3", "3:2", "3 7\n"), ("1", "", " 7\n")],
)
def test_clients_share_gpus_in_turn_and_may_have_none(rank, gpus, seen):
    assert wrap(PALS_LOCAL_RANKID=rank, JOB_SERVERS="1", JOB_GPUS=gpus).stdout == seen


def test_the_launcher_inside_a_batch_step_of_slurm_decides():
    done = wrap(PMI_LOCAL_RANK="3", SLURM_LOCALID="0", JOB_SERVERS="1", JOB_GPUS="0:1:2:3")
    assert done.stdout == "2 7\n"


def test_a_rank_that_no_launcher_has_started_is_refused():
    done = wrap(JOB_SERVERS="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "which rank of its node" in done.stderr


def test_verbose_says_where_a_rank_is():
    done = wrap(PALS_LOCAL_RANKID="2", JOB_SERVERS="1", JOB_GPUS="0:1", JOB_VERBOSE="1")
    place, told = done.stdout.splitlines()
    own = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert "local rank 2: client, GPU 1, CPUs " in place
    assert cpus(place.rpartition(" ")[2]) == cpus(own)
    assert told == "1 7"


@pytest.mark.parametrize(("servers", "clients"), COUNTS)
def test_polaris_binds_each_rank_to_cores_of_its_own_at_its_gpu(evaluate, servers, clients):
    counts = {
        "JOB_SERVERS": str(servers), "JOB_CLIENTS": str(clients), "POOLED_SYSTEMS": "1",
    }  # fmt: skip
    text = evaluate("polaris/environment.sh", "bind_list; echo $JOB_GPUS $JOB_THREADS", **counts)
    bind, rest = text.splitlines()
    gpus, threads = rest.split()
    ranks = [cpus(part) for part in bind.removeprefix("list:").split(":")]
    assert len(ranks) == servers + clients
    assert sum(map(len, ranks)) == len(set.union(*ranks))
    for rank, gpu in zip(ranks[servers:], map(int, gpus.split(":")), strict=False):
        assert rank < set(CORES_AT_GPU[gpu])
        assert len(rank) == int(threads)


@pytest.mark.parametrize(("servers", "clients"), COUNTS)
def test_polaris_gives_every_rank_one_interface_and_servers_different_ones(
    evaluate, servers, clients
):
    counts = {
        "JOB_SERVERS": str(servers), "JOB_CLIENTS": str(clients), "POOLED_SYSTEMS": "1",
    }  # fmt: skip
    bind, text = evaluate("polaris/environment.sh", "bind_list; interface_map", **counts).split()
    ranks = [cpus(part) for part in bind.removeprefix("list:").split(":")]
    of = {
        rank: int(interface)
        for interface, _, ranks in (part.partition(":") for part in text.split(";"))
        for rank in cpus(ranks)
    }
    assert sorted(of) == list(range(servers + clients))
    for rank in range(min(servers, 2)):
        assert of[rank] == rank
        assert min(ranks[rank]) in CORES_AT_INTERFACE[rank]
    if clients == 4:
        assert sorted(of[rank] for rank in range(servers, servers + 4)) == [0, 0, 1, 1]


def test_servers_of_every_system_have_the_same_places(evaluate):
    counts = {"JOB_SERVERS": "2", "JOB_CLIENTS": "1", "POOLED_SYSTEMS": "3"}
    bind, text = evaluate("polaris/environment.sh", "bind_list; interface_map", **counts).split()
    assert bind == "list:" + "0,32:16,48:" * 3 + "25-31"
    assert text == "0:0,2,4;1:1,3,5,6"


@pytest.mark.parametrize("systems", [DEFAULT_SYSTEMS, SYSTEMS, SYSTEMS[:1], *zip(SYSTEMS)])
def test_systems_with_servers_are_counted_as_the_driver_does(evaluate, systems):
    counted = evaluate("common/lib.sh", f"count_pooled {','.join(systems)}; echo $POOLED_SYSTEMS")
    assert int(counted) == max(len(set(systems) & set(STORE_SETTINGS)), 1)
