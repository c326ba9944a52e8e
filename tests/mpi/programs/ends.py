"""A job that comes to a bad end; needs 2 nodes of 1 server and 1 client.

usage: ends.py FOLDER MODE      folder: where every rank notes who it is
       main | open | close      rank 3 raises there
       wait                     one client loads, the other computes, until somebody kills the job
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, Store
from ptstore_mpi.arena import Arena
from ptstore_mpi.testing.oracle import Oracle

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
LAYOUT = KVLayout.for_attention(layers=2, kv_heads=2, head_dim=64, dtype="float32")
CONFIG = Config(memory_bytes=32 << 20, shared_memory_dir=str(FOLDER / "shared"))
PROMPT = np.arange(512)
RANK = MPI.COMM_WORLD.Get_rank()


def fall_over(*_: object) -> None:
    raise RuntimeError("the engine fell over")


def note(what: str, text: str) -> None:
    """Leave a note that appears as a whole."""
    part = FOLDER / f"part.{RANK}"
    part.write_text(text)
    part.rename(FOLDER / f"{what}.{RANK}")


def main(store: Store) -> None:
    namespace = store.namespace("model", LAYOUT)
    oracle = Oracle(LAYOUT)
    if store.client_rank == 0:
        assert namespace.store(PROMPT, oracle.arrays(PROMPT)).reason == "stored"
    if MODE == "main" and RANK == 3:
        fall_over()
    if MODE == "close":
        return
    if store.client_rank:
        note("ready", "")
        time.sleep(120)
    out = oracle.blank(len(PROMPT) // LAYOUT.block_tokens)
    while True:
        namespace.load(namespace.match(np.append(PROMPT, 1)), out)
        note("ready", "")


names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()
         if "/dev/shm/mpich" in line}  # fmt: skip
note("pid", str(os.getpid()))
note("names", "\n".join(names))
if RANK == 3 and MODE == "open":
    Arena.start_populating = fall_over
if RANK == 3 and MODE == "close":
    Arena.close = fall_over
ptstore_mpi.run(main, CONFIG)
