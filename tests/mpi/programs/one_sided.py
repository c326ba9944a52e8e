"""A client that computes, and calls no MPI at all, delays nobody who loads from its node.

Needs 2 nodes of 1 server and 1 client. Client 0 stores and then sleeps outside MPI; client 1
matches and loads all the while.
"""

from __future__ import annotations

import time

import numpy as np

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, Store
from ptstore_mpi.testing.oracle import Oracle

LAYOUT = KVLayout.for_attention(layers=4, kv_heads=2, head_dim=64, dtype="float32")
PROMPT = np.arange(1024)
BUSY_S = 4.0
LOADS = 5


def main(store: Store) -> None:
    namespace = store.namespace("model", LAYOUT)
    oracle = Oracle(LAYOUT)
    if store.client_rank == 0:
        assert namespace.store(PROMPT, oracle.arrays(PROMPT)).reason == "stored"
    request = store.comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
    if store.client_rank == 0:
        time.sleep(BUSY_S)
        return
    started = time.perf_counter()
    for _ in range(LOADS):
        out = oracle.blank(len(PROMPT) // LAYOUT.block_tokens)
        got = namespace.load(namespace.match(np.append(PROMPT, 1)), out)
        assert got.by_source["remote"] == len(PROMPT), got
        oracle.check(PROMPT, out, until_tokens=got.tokens)
    took_s = time.perf_counter() - started
    assert took_s < BUSY_S / 2, f"{LOADS} loads took {took_s:.2f} s"
    rma_bytes = store.stats()["bytes"]["rma_bytes"]
    assert rma_bytes == LOADS * len(PROMPT) * LAYOUT.bytes_per_token, rma_bytes
    print(f"loaded {rma_bytes} bytes by RMA beside a busy client", flush=True)


ptstore_mpi.run(main, Config(memory_bytes=64 << 20, replica_admission="never"))
