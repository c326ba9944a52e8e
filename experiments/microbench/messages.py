"""Matches against an echo of the same message sizes, and an echo against plain MPI ping-pong.

The echo takes the same way as a match, through the same loop of the server: what a match takes
longer is hashing, probing the index and building its answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from experiments.microbench.measure import Measurement, Subject, timed
from ptstore_mpi import KVLayout, Store, TensorSpec

__all__ = ["MEMORY_BYTES", "measure", "ping_pong_s"]

LAYOUT = KVLayout((TensorSpec("kv", 16),), block_tokens=16)
PROMPT_TOKENS = (8192, 32768)
FILL_TOKENS = 1 << 18
MEMORY_BYTES = 1 << 30
CALLS = 20
HASH_BYTES, REF_BYTES = 16, 26


def measure(
    store: Store, *, indexed_blocks: int, repeats: int, raw_s: float | None
) -> Iterator[Measurement]:
    """Yield the measurements of one client; the index of each server holds that many blocks.

    ``raw_s`` is the time of an MPI ping-pong with one server, s; None without one.
    """
    namespace = store.namespace(f"messages {indexed_blocks}", LAYOUT)
    rng = np.random.default_rng(1)
    servers = len(store.topology.server_ranks)
    stored = sum(row["block_count"] for row in store.server_stats())
    while stored < indexed_blocks * servers:
        tokens = rng.integers(
            1 << 30, size=min(FILL_TOKENS, (indexed_blocks * servers - stored) * 16)
        )
        result = namespace.store(tokens, [np.ones((len(tokens) // 16, 16), np.uint8)])
        assert result.reason == "stored", result
        stored += len(tokens) // 16
    what = f"{servers} server(s), {indexed_blocks:.0e} blocks"
    for prompt_tokens in PROMPT_TOKENS:
        known = rng.integers(1 << 30, size=prompt_tokens)
        kv = [np.ones((prompt_tokens // 16, 16), np.uint8)]
        assert namespace.store(known, kv).reason in ("stored", "known")
        prompt = np.append(known, 0)
        segments = -(-prompt_tokens // store.config.segment_tokens)
        request_bytes = prompt_tokens // 16 * HASH_BYTES

        def match(prompt: np.ndarray = prompt) -> float:
            return timed(lambda: [namespace.match(prompt) for _ in range(CALLS)]) / CALLS

        def echo(request: int = request_bytes, reply: int = segments * REF_BYTES) -> float:
            return (
                timed(
                    lambda: [
                        store.ping(request_bytes=request, reply_bytes=reply) for _ in range(CALLS)
                    ]
                )
                / CALLS
            )

        yield from Subject(
            f"match/{what}", "tokens", prompt_tokens, match, echo, unit="s", against="an echo"
        ).measure(repeats)
    if raw_s is not None and servers == 1:

        def ping() -> float:
            return timed(lambda: [store.ping() for _ in range(CALLS)]) / CALLS

        yield from Subject(
            "message/ping", "size_bytes", 0, ping, lambda: raw_s, unit="s", against="MPI ping-pong"
        ).measure(repeats)


def ping_pong_s(comm: MPI.Intracomm, *, client: int, server: int, count: int = 2000) -> float:
    """Return the time of one round trip of an empty message between two ranks, s, on both.

    To be called on these two, before there are servers.
    """
    rank = comm.Get_rank()
    nothing = bytearray(0)
    start_s = time.perf_counter()
    for _ in range(count):
        if rank == client:
            comm.Send([nothing, MPI.BYTE], server)
            comm.Recv([nothing, MPI.BYTE], server)
        else:
            comm.Recv([nothing, MPI.BYTE], client)
            comm.Send([nothing, MPI.BYTE], client)
    return (time.perf_counter() - start_s) / count
