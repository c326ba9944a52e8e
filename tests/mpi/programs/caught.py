"""Jobs that cannot be opened, and a program that goes on: nothing of them may stay behind."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config, ConfigError, TransportError
from ptstore_mpi.arena import Arena


def no_arena(*_: object) -> NoReturn:
    raise TransportError("no arena today")


def fails(kind: type[Exception], config: Config) -> None:
    with pytest.raises(kind):
        ptstore_mpi.launch(config)
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("ptstore-")], threads


fails(ConfigError, Config(servers_per_node=7))
fails(ConfigError, Config(memory_bytes=(32 + MPI.COMM_WORLD.Get_rank()) << 20))
create, Arena.create = Arena.create, no_arena
fails(TransportError, Config(memory_bytes=8 << 20))
Arena.create = create
ptstore_mpi.run(lambda store: None, Config(memory_bytes=8 << 20))
print("went on", flush=True)
