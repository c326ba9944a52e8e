"""Store on one node, load on the other, and say which transport carried the bytes and why.

usage: probe.py [wrong_and_late] [FIELD=VALUE ...]     fields of Config
       wrong_and_late: the probe brings rank 1 wrong bytes, and rank 3 none in time
"""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, Store
from ptstore_mpi.arena import Memory
from ptstore_mpi.testing.oracle import Oracle
from ptstore_mpi.transport import probe as probing

LAYOUT = KVLayout.for_attention(layers=2, kv_heads=2, head_dim=64, dtype="float32")
PROMPT = np.arange(512)


def main(store: Store) -> None:
    namespace = store.namespace("model", LAYOUT)
    oracle = Oracle(LAYOUT)
    if store.client_rank == 0:
        assert namespace.store(PROMPT, oracle.arrays(PROMPT)).reason == "stored"
    request = store.comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
    out = oracle.blank(len(PROMPT) // LAYOUT.block_tokens)
    got = namespace.load(namespace.match(np.append(PROMPT, 1)), out)
    assert got.tokens == len(PROMPT), got
    oracle.check(PROMPT, out, until_tokens=got.tokens)
    choice = store.transport_choice
    assert store.stats()["transport"]["reason"] == choice.reason
    text = f"client {store.client_rank} {got.by_source}: {choice.name}, {choice.reason}\n"
    sys.stdout.write(text)
    sys.stdout.flush()


def read_wrong_or_late(probe: probing._Probe, *_: object) -> Memory | None:
    return None if MPI.COMM_WORLD.Get_rank() == 3 else np.zeros(probe._nbytes, np.uint8)


if "wrong_and_late" in sys.argv:
    sys.argv.remove("wrong_and_late")
    probing._Probe._read = read_wrong_or_late
given = dict(argument.split("=") for argument in sys.argv[1:])
ptstore_mpi.run(main, Config.load(memory_bytes=32 << 20, **given))
