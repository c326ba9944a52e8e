"""Jobs that must end with an error: failing.py main | settings | memory | roles"""

from __future__ import annotations

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
    "memory": {"memory_bytes": 1 << 50},
    "roles": {"servers_per_node": 7},
}[sys.argv[1]]
ptstore_mpi.run(main, Config(**{"memory_bytes": 32 << 20, **settings}))
