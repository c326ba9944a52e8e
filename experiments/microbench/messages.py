"""Matches against an echo of the same message sizes, and an echo against plain MPI ping-pong.

The echo takes the same way as a match, through the same loop of the server: what a match takes
longer is hashing, probing the index and building its answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from experiments.microbench.measure import Measurement, Subject, power, timed
from ptstore_mpi import KVLayout, Store, TensorSpec

__all__ = ["MEMORY_BYTES", "Raw", "measure", "measure_raw"]

LAYOUT = KVLayout((TensorSpec("kv", 16),), block_tokens=16)
PROMPT_TOKENS = (8192, 32768)
FILL_TOKENS = 1 << 18
MEMORY_BYTES = 1 << 30
CALLS = 20
FEW_BLOCKS = 10_000
FLOOD_COUNT = 256
RAW_COUNT = 2048
HASH_BYTES, REF_BYTES = 16, 26


def measure(
    store: Store, *, indexed_blocks: int, repeats: int, raw: Raw | None
) -> Iterator[Measurement]:
    """Yield the measurements of one client; the index of each server holds that many blocks.

    ``raw`` is what plain MPI takes with one server; None where nobody has measured it.
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
    what = f"{servers} server{'s' * (servers > 1)}, {power(indexed_blocks)} blocks"
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
    if raw is not None and servers == 1 and indexed_blocks <= FEW_BLOCKS:
        yield from _measure_pings(store, raw, repeats=repeats)


@dataclass(frozen=True, slots=True)
class Raw:
    """What plain MPI takes for empty messages between two ranks, s per message and its answer."""

    one_at_a_time_s: float
    flood_s: float


def _measure_pings(store: Store, raw: Raw, *, repeats: int) -> Iterator[Measurement]:
    def pings() -> float:
        return timed(lambda: [store.ping() for _ in range(CALLS)]) / CALLS

    def flood() -> float:
        return timed(lambda: store.ping(count=FLOOD_COUNT)) / FLOOD_COUNT

    for name, ours, reference_s, against in (
        ("message/ping", pings, raw.one_at_a_time_s, "MPI ping-pong"),
        ("message/flood", flood, raw.flood_s, "an MPI echo"),
    ):
        yield from Subject(
            name, "size_bytes", 0, ours, lambda seconds=reference_s: seconds,
            unit="s", against=against,
        ).measure(repeats)  # fmt: skip


def measure_raw(comm: MPI.Intracomm, *, client: int, server: int) -> Raw:
    """Measure plain MPI between two ranks, before there are servers; to be called on these two."""
    is_client = comm.Get_rank() == client
    nothing = bytearray(0)

    def ping_pong() -> None:
        for _ in range(RAW_COUNT):
            if is_client:
                comm.Send([nothing, MPI.BYTE], server)
                comm.Recv([nothing, MPI.BYTE], server)
            else:
                comm.Recv([nothing, MPI.BYTE], client)
                comm.Send([nothing, MPI.BYTE], client)

    def flood() -> None:
        for _ in range(RAW_COUNT // FLOOD_COUNT):
            if is_client:
                sends = [comm.Isend([nothing, MPI.BYTE], server) for _ in range(FLOOD_COUNT)]
                for _ in range(FLOOD_COUNT):
                    comm.Recv([nothing, MPI.BYTE], server)
                MPI.Request.Waitall(sends)
            else:
                for _ in range(FLOOD_COUNT):
                    comm.Recv([nothing, MPI.BYTE], client)
                    comm.Send([nothing, MPI.BYTE], client)

    count = RAW_COUNT // FLOOD_COUNT * FLOOD_COUNT
    return Raw(timed(ping_pong) / RAW_COUNT, timed(flood) / count)
