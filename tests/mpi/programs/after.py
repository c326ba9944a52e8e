"""What processes do after a job whose probe hung: its window keeps them from MPI_Finalize.

usage: after.py clean | exit | raise      rank 3 leaves with 3, or raises while others wait for it
"""

from __future__ import annotations

import sys

from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config

MODE = sys.argv[1]
RANK = MPI.COMM_WORLD.Get_rank()

ptstore_mpi.run(
    lambda store: None, Config(memory_bytes=8 << 20, probe_fault="hang", probe_timeout_s=0.5)
)
if RANK == 3 and MODE == "exit":
    sys.exit(3)
if MODE == "raise":
    if RANK == 3:
        raise RuntimeError("the results do not add up")
    MPI.COMM_WORLD.Barrier()
sys.stdout.write(f"rank {RANK} is done\n")
