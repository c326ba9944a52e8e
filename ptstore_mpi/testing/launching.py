"""Start programs as MPI jobs from a test: ranks, virtual nodes, wire, a limit in seconds.

Virtual nodes are MPICH's cliques; the wire between them is TCP, by UCX or by OFI. Open MPI has
none: there programs set ``Config.virtual_node_count``, and all messages take TCP.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

__all__ = ["NETMODS", "find_mpiexec", "is_openmpi", "job_environment", "run_ranks"]

NETMODS: Mapping[str, Mapping[str, str]] = {
    "ucx": {"UCX_TLS": "tcp,self"},
    "ofi": {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
}
"""Environment that puts the bytes between nodes on TCP, by MPICH network module."""

_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "HYDRA_", "OMPI_")
_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_osc": "^ucx",  # where it finds no network it complains, on every rank
}
_OPENMPI_OPTIONS = ("--oversubscribe", "--bind-to", "none")
# Another PYTHONHASHSEED on every rank: keys and formats must not depend on it.
_SHELL = 'PYTHONHASHSEED=$((RANDOM + 1)) exec "$@"'


def find_mpiexec() -> str | None:
    """Return the launcher beside this interpreter, else the one on the PATH, else None."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@cache
def is_openmpi() -> bool:
    """Return whether `find_mpiexec` is Open MPI's launcher."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return False
    done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in done.stdout


def job_environment(nodes: int, netmod: str) -> dict[str, str]:
    """Return this process's environment for a job on ``nodes`` virtual nodes of this host."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    cliques = {"MPIR_CVAR_NUM_CLIQUES": str(nodes), "MPIR_CVAR_CLIQUES_BY_BLOCK": "1"}
    return {**kept, **cliques, **NETMODS[netmod]}


def run_ranks(
    program: Sequence[str | os.PathLike[str]],
    *,
    ranks: int,
    nodes: int = 1,
    netmod: str = "ucx",
    launcher_options: Sequence[str] = (),
    timeout_s: float = 90.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m mpi4py PROGRAM`` on ``ranks`` ranks and return what became of it.

    Parameters
    ----------
    program
        A script or ``-m module``, and its arguments.
    ranks, nodes
        Ranks in all, split into ``nodes`` virtual nodes of consecutive ranks (MPICH only).
    netmod
        Key of `NETMODS` (MPICH only).
    launcher_options
        Further options of ``mpiexec``.
    timeout_s
        After it the job is killed and ``subprocess.TimeoutExpired`` raised.

    Raises
    ------
    FileNotFoundError
        There is no ``mpiexec``.
    ValueError
        Virtual nodes were asked for, and the launcher is Open MPI's.
    """
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise FileNotFoundError("no mpiexec beside this Python or on the PATH")
    environment = job_environment(nodes, netmod)
    options = list(launcher_options)
    if is_openmpi():
        if nodes > 1:
            raise ValueError(f"{nodes} virtual nodes: with Open MPI use virtual_node_count")
        environment |= _OPENMPI
        options += _OPENMPI_OPTIONS
    command = [mpiexec, *options, "-n", str(ranks), "bash", "-c", _SHELL, "_"]
    command += [sys.executable, "-m", "mpi4py", *(os.fspath(part) for part in program)]
    # What a launcher or a rank leaves in its folder of temporary files goes with the job.
    with tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True) as folder:
        return subprocess.run(
            command,
            env={**environment, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
