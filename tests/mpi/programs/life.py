"""Jobs one after the other, side by side on halves of the ranks, and by the longer form.

usage: life.py [FIELD=VALUE ...]      fields of Config

Needs 4 ranks. MPI is finalized by hand, which complains of whatever is left.
"""

from __future__ import annotations

import sys
import time

import msgspec
import numpy as np
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import ClosedError, Config, KVLayout, Store
from ptstore_mpi.testing.oracle import Oracle

LAYOUT = KVLayout.for_attention(layers=1, kv_heads=1, head_dim=16, dtype="float32")
GIVEN = dict(argument.split("=") for argument in sys.argv[1:])
CONFIG = Config.load(memory_bytes=8 << 20, segment_tokens=32, **GIVEN)
HALF_CONFIG = msgspec.structs.replace(CONFIG, virtual_node_count=0)
PROMPT = np.arange(200)


def main(store: Store) -> int:
    namespace = store.namespace("model", LAYOUT)
    oracle = Oracle(LAYOUT)
    stored = namespace.store(PROMPT, oracle.arrays(PROMPT))
    assert stored.reason in ("stored", "known", "dedup"), stored
    out = oracle.blank(12)
    got = namespace.load(namespace.match(PROMPT), out)
    assert got.tokens == 192, got
    oracle.check(PROMPT, out, until_tokens=192)
    return store.client_count


world = MPI.COMM_WORLD
rank = world.Get_rank()
names = world.Get_name()

for _ in range(3):  # one job after the other: nothing of the one before is known
    result = ptstore_mpi.run(main, CONFIG)
    assert result in (None, 2, 3), result

half = world.Split(rank // 2, rank)  # two jobs at the same time
result = ptstore_mpi.run(main, HALF_CONFIG, comm=half)
assert result == (1 if rank % 2 else None), result
half.Free()

job = ptstore_mpi.launch(CONFIG)
if job.is_server:
    job.serve()
else:
    time.sleep(0.1 * rank)  # clients leave one after the other
    main(job.client)
client = job.client
job.close()
if client is not None:
    try:
        client.server_stats()
    except ClosedError:
        print("closed is closed", flush=True)

seeds = world.gather(hash("ptstore"))
assert seeds is None or len(set(seeds)) == len(seeds), "PYTHONHASHSEED should differ by rank"
assert world.Get_name() == names, "the caller's communicator was touched"
MPI.Finalize()
print("finalized", flush=True)
