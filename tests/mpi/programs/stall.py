"""A rank that does not get on: everybody's stacks end up in one file, and the job ends.

usage: stall.py server|client FOLDER
"""

from __future__ import annotations

import sys
import time

import numpy as np

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, Store, TensorSpec
from ptstore_mpi.protocol.handler import ServerHandler
from ptstore_mpi.transport.mpi_client import MpiClientTransport

LAYOUT = KVLayout((TensorSpec("a", 64),), block_tokens=1)


def stand_still(*_: object) -> None:
    time.sleep(1000)


def main(store: Store) -> None:
    namespace = store.namespace("model", LAYOUT)
    if store.client_rank:
        time.sleep(1000)  # an engine that computes: silence that means nothing
    namespace.match(np.arange(10))


if sys.argv[1] == "server":
    ServerHandler._match = stand_still
else:
    MpiClientTransport.send = stand_still
ptstore_mpi.run(main, Config(memory_bytes=1 << 20, stall_timeout_s=2.0, stall_dir=sys.argv[2]))
