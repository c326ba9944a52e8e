"""Jobs that must end with an error: failing.py FAULT

FAULT: main | settings | memory | roles, or on rank 2 alone: folder | variable
"""

from __future__ import annotations

import os
import sys
import time

from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config, Store


def main(store: Store) -> None:
    if sys.argv[1] == "main" and store.client_rank == store.client_count - 1:
        raise RuntimeError("the engine fell over")
    time.sleep(60)


rank = MPI.COMM_WORLD.Get_rank()
settings = {
    "main": {},
    "settings": {"memory_bytes": (32 + rank) << 20},
    "memory": {"memory_bytes": 1 << 47},
    "roles": {"servers_per_node": 7},
    "folder": {"shared_memory_dir": "/nope" if rank == 2 else "/dev/shm"},
    "variable": {},
}[sys.argv[1]]
if sys.argv[1] == "variable":
    if rank == 2:
        os.environ["PTSTORE_TRANSPORT"] = "rma"
    ptstore_mpi.run(main)
ptstore_mpi.run(main, Config(**{"memory_bytes": 32 << 20, **settings}))
