"""A client that gives up on long answers and leaves: the close must not wait for it for ever.

usage: late_reply.py SEGMENTS      the answers name this many segments, about 25 bytes each
"""

from __future__ import annotations

import sys
import time

import msgspec
import numpy as np

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, Store, TensorSpec
from ptstore_mpi.testing.oracle import Oracle

LAYOUT = KVLayout((TensorSpec("a", 64),), block_tokens=1)
PROMPT = np.arange(int(sys.argv[1]))


def main(store: Store) -> None:
    namespace = store.namespace("model", LAYOUT)
    if store.client_rank == 0:
        stored = namespace.store(PROMPT, Oracle(LAYOUT).arrays(PROMPT))
        assert stored.tokens == len(PROMPT), stored
    request = store.comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
    if store.client_rank == 1:
        namespace._config = msgspec.structs.replace(namespace._config, match_timeout_s=1e-6)
        for _ in range(3):
            assert namespace.match(PROMPT).reason == "partial"


ptstore_mpi.run(
    main,
    Config(memory_bytes=64 << 20, segment_tokens=1, close_timeout_s=15.0),
)
print("closed", flush=True)
