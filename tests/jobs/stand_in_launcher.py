#!/usr/bin/env python3
"""Stands in for mpiexec of PALS and for srun, where there is neither.

Knows the options that their manuals name and refuses others. Appends what it was asked for to
$STAND_IN_LOG, a JSON object a line. One process per node is run, node after node, with the local
rank that the launcher would give; so are all ranks where $STAND_IN_RANKS is "each". Where it is
"mpi" they are started as one MPI job, nodes as virtual nodes of this machine. Otherwise ranks are
not run at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PALS = {"-n", "--ppn", "--hostfile", "--depth", "--cpu-bind", "--env"}
SRUN = {
    "--nodes", "--ntasks", "--ntasks-per-node", "--distribution", "--cpus-per-task", "--cpu-bind",
    "--kill-on-bad-exit", "--export", "--mpi",
}  # fmt: skip
LOCAL_RANK = {"mpiexec": "PALS_LOCAL_RANKID", "srun": "SLURM_LOCALID"}


def parse(name: str, words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        word, *words = words
        if name == "srun":
            word, _, value = word.partition("=")
        else:
            value, *words = words
        if word not in (PALS if name == "mpiexec" else SRUN):
            sys.exit(f"{name}: unknown option {word}")
        options.setdefault(word, []).append(value)
    return options, words


def main() -> int:
    name = Path(sys.argv[0]).name
    options, program = parse(name, sys.argv[1:])
    ranks = int(options.get("-n", options.get("--ntasks", [""]))[0])
    per_node = int(options.get("--ppn", options.get("--ntasks-per-node", [""]))[0])
    hosts = Path(options.pop("--hostfile")[0]).read_text().split() if name == "mpiexec" else []
    given = dict(pair.split("=", 1) for pair in options.pop("--env", []))
    environment = os.environ | given
    entry = {
        "options": {key: values[0] for key, values in options.items()},
        "hosts": hosts,
        "program": program,
        "environment": environment,
    }
    with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
        log.write(json.dumps(entry) + "\n")
    how = os.environ.get("STAND_IN_RANKS", "") if per_node > 1 else "each"
    if how == "mpi":
        return run_mpi(name, program, environment, ranks=ranks, per_node=per_node)
    for rank in range(ranks if how == "each" else 0):
        place = {LOCAL_RANK[name]: str(rank % per_node)}
        status = subprocess.run(program, env=environment | place, check=False).returncode
        if status:
            return status
    return 0


def run_mpi(
    name: str, program: list[str], environment: dict[str, str], *, ranks: int, per_node: int
) -> int:
    nodes = {
        "MPIR_CVAR_NUM_CLIQUES": str(ranks // per_node),
        "MPIR_CVAR_CLIQUES_BY_BLOCK": "1",
        "UCX_TLS": "tcp,self",
    }
    place = f'{LOCAL_RANK[name]}=$((PMI_RANK % {per_node})) exec "$@"'
    # Told so, MPICH's launcher does not ask the scheduler that seems to be here for hosts.
    command = [os.environ["STAND_IN_MPIEXEC"], "-rmk", "user", "-launcher", "fork"]
    command += ["-n", str(ranks), "bash", "-c", place, "_", *program]
    return subprocess.run(command, env=environment | nodes, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
