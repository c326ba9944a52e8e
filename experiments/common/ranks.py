"""Which rank of the job this is, known without starting MPI: a wrong command line should not."""

from __future__ import annotations

import os

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def launcher_rank() -> int:
    """Return the rank that the launcher gave this process; 0 without a launcher."""
    for variable in RANK_VARIABLES:
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return 0
