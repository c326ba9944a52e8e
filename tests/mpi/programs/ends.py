"""A job that comes to a bad end; needs 2 nodes of 1 server and 1 client.

usage: ends.py FOLDER MODE      folder: where every rank notes who it is
       main | open | close      rank 3 raises there
       exit                     rank 3 says sys.exit(7)
       settings | doctor        every rank, or `ptstore doctor`, finds a wrong setting
       stopped                  client 0 stops server 0; client 1 computes for a while; both leave
       late                     client 1 computes while client 0 waits in close
       wait                     one client loads, the other computes, until somebody kills the job
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, Store, cli
from ptstore_mpi.arena import Arena
from ptstore_mpi.testing.oracle import Oracle

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
LAYOUT = KVLayout.for_attention(layers=2, kv_heads=2, head_dim=64, dtype="float32")
CONFIG = Config(
    memory_bytes=32 << 20,
    shared_memory_dir=str(FOLDER / "shared"),
    close_timeout_s=3 if MODE in ("stopped", "late") else 60,
    stall_timeout_s=2 if MODE == "stopped" else 300,
    stall_dir=str(FOLDER),
)
LATE_S = 4  # more than close_timeout_s
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
    if MODE == "exit" and RANK == 3:
        sys.exit(7)
    if MODE == "stopped" and store.client_rank == 0:
        os.kill(int((FOLDER / "pid.0").read_text()), signal.SIGSTOP)
    if MODE in ("stopped", "late") and store.client_rank:
        time.sleep(LATE_S)
        note("left", str(time.time()))
    if MODE in ("close", "stopped", "late"):
        return
    if store.client_rank:
        note("ready", "")
        time.sleep(120)
    out = oracle.blank(len(PROMPT) // LAYOUT.block_tokens)
    while True:
        namespace.load(namespace.match(np.append(PROMPT, 1)), out)
        note("ready", "")


names = {
    line[line.index("/") :].removesuffix(" (deleted)").strip()
    for line in Path("/proc/self/maps").read_text().splitlines()
    if "/dev/shm/mpich" in line
}
note("pid", str(os.getpid()))
note("names", "\n".join(names))
if RANK == 3 and MODE == "open":
    Arena.start_populating = fall_over
if RANK == 3 and MODE == "close":
    Arena.close = fall_over
if MODE in ("settings", "doctor"):
    MPI.COMM_WORLD.Barrier()  # all names are noted
    os.environ["PTSTORE_TRANSPORT"] = "rma"
if MODE == "doctor":
    sys.exit(cli.main(["doctor"]))
config = Config.load() if MODE == "settings" else CONFIG
ptstore_mpi.run(main, config)
