"""Loads from another node against one raw `MPI_Rget` of the same bytes between the same ranks.

The reference has a window of its own on the same servers, which make progress for both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from experiments.common import meeting
from experiments.microbench.measure import Measurement, Subject
from ptstore_mpi import KVLayout, Store, TensorSpec

__all__ = ["MEMORY_BYTES", "SEGMENT_TOKENS", "SIZES_BYTES", "RawWindow", "measure"]

PIECES = {"64KiB": 64 << 10, "1MiB": 1 << 20}
SIZES_BYTES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 128 << 20)
SEGMENT_TOKENS = 16
MEMORY_BYTES = 3 * SIZES_BYTES[-1]
_LIMIT_S = 60.0


class RawWindow:
    """A window on memory of every server rank, beside the store's. Collective to make and free."""

    def __init__(self, comm: MPI.Intracomm, *, is_server: bool) -> None:
        memory = np.ones(SIZES_BYTES[-1], np.uint8) if is_server else None
        self._window = MPI.Win.Create(memory, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def get_s(self, rank: int, target: Any) -> float:
        """Return how long one Get of ``len(target)`` bytes takes, s."""
        start_s = time.perf_counter()
        request = self._window.Rget([target, MPI.BYTE], rank)
        while not request.Test():
            if time.perf_counter() - start_s > _LIMIT_S:
                raise TimeoutError(f"a raw MPI_Rget did not end within {_LIMIT_S:g} s")
        return time.perf_counter() - start_s

    def free(self) -> None:
        """Give it back."""
        self._window.Unlock_all()
        self._window.Free()


def measure(
    store: Store, window: RawWindow, *, sizes_bytes: Sequence[int], repeats: int
) -> Iterator[Measurement]:
    """Yield the measurements of the last client, which loads what the first has stored.

    Collective over the clients; only the last yields.
    """
    for piece, piece_bytes in PIECES.items():
        layout = KVLayout((TensorSpec("kv", piece_bytes),), block_tokens=SEGMENT_TOKENS)
        namespace = store.namespace(f"remote {piece}", layout)
        for size_bytes in sizes_bytes:
            blocks = size_bytes // piece_bytes
            prompt = np.arange(blocks * SEGMENT_TOKENS) + 1
            if store.client_rank == 0:
                _store_scattered(namespace, prompt, blocks=blocks, piece_bytes=piece_bytes)
            meeting.meet(store.comm)
            if store.client_rank == store.client_count - 1:
                name = f"remote_load/{piece}"
                subject = _subject(name, namespace, prompt, window=window, store=store)
                yield from subject.measure(repeats)
            meeting.meet(store.comm)
            if store.client_rank == 0:
                namespace.clear()
            meeting.meet(store.comm)


def _store_scattered(namespace: Any, prompt: Any, *, blocks: int, piece_bytes: int) -> None:
    """Store block after block, another text's in between: no two are neighbours in the arena."""
    kv = np.ones((blocks, piece_bytes), np.uint8)
    for count in range(1, blocks + 1):
        for text in (prompt, np.append(prompt[:1] + 7, prompt[1:])):
            wanted = text[: count * SEGMENT_TOKENS]
            stored = namespace.store(wanted, [kv[:count]])
            assert stored.reason == "stored", stored


def _subject(name: str, namespace: Any, prompt: Any, *, window: RawWindow, store: Store) -> Subject:
    size_bytes = int(len(prompt) * namespace.layout.bytes_per_token)
    match = namespace.match(np.append(prompt, 0))
    assert match.tokens == len(prompt), match
    out = [np.ones(size_bytes, np.uint8).reshape(len(prompt) // SEGMENT_TOKENS, -1)]
    target = np.ones(size_bytes, np.uint8)
    server_rank = store.topology.server_ranks[0]

    def load() -> float:
        result = namespace.load(match, out)
        assert result.by_source["remote"] == len(prompt), result
        return float(result.seconds)

    return Subject(
        name, "size_bytes", size_bytes, load, lambda: window.get_s(server_rank, target),
        unit="bytes/s", against="one raw MPI_Rget", amount=size_bytes,
    )  # fmt: skip
