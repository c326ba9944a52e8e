"""What needs no job: hashing, the index by itself, and how long a start takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

import ptstore_mpi
from experiments.microbench.measure import Measurement, Subject, power, timed
from ptstore_mpi import Config, KVLayout, Store, TensorSpec, _native

__all__ = ["measure_hashing", "measure_probing", "measure_start_up"]

TOKENS = (8192, 131072)
PROBED_BLOCKS = 512
INDEXED_BLOCKS = (10_000, 1_000_000)
ARENAS = {"64MiB": 64 << 20, "1GiB": 1 << 30, "4GiB": 4 << 30}
LAYOUT = KVLayout((TensorSpec("kv", 64 << 10),), block_tokens=16)


def measure_hashing(store: Store, *, repeats: int) -> Iterator[Measurement]:
    """Yield the rate of the chained block hash against BLAKE2b over the same bytes at once."""
    namespace = store.namespace("hashing", LAYOUT)
    for tokens in TOKENS:
        ids = np.arange(tokens, dtype=np.uint32)
        data = ids.tobytes()
        yield from Subject(
            "hash", "tokens", tokens,
            lambda ids=ids: timed(lambda: namespace.block_hashes(ids)),
            lambda data=data: timed(lambda: hashlib.blake2b(data, digest_size=16).digest()),
            unit="tokens/s", against="BLAKE2b, unchained", amount=tokens,
        ).measure(repeats)  # fmt: skip


def measure_probing(*, repeats: int) -> Iterator[Measurement]:
    """Yield the time of probing the core's index in vain, against a dictionary of Python's."""
    rng = np.random.default_rng(1)
    for blocks in INDEXED_BLOCKS:
        index = _native.PrefixIndex()
        known = rng.integers(256, size=(blocks, 16), dtype=np.uint8)
        index.insert(known, 0)
        reference = {row.tobytes(): place for place, row in enumerate(known)}
        unknown = rng.integers(256, size=(PROBED_BLOCKS, 16), dtype=np.uint8)
        keys = [row.tobytes() for row in unknown]
        yield from Subject(
            f"index/{power(blocks)} blocks", "tokens", PROBED_BLOCKS * 16,
            lambda index=index, unknown=unknown: timed(lambda: index.deepest(unknown)),
            lambda keys=keys, known=reference: timed(lambda: [key in known for key in keys]),
            unit="s", against="as many lookups in a dict",
        ).measure(repeats)  # fmt: skip


def measure_start_up(*, repeats: int) -> Iterator[Measurement]:
    """Yield the time from `launch` to the first store, against the smallest arena. One process."""
    reference = next(iter(ARENAS.values()))
    for name, size_bytes in ARENAS.items():
        yield from Subject(
            f"start_up/{name}", "size_bytes", size_bytes,
            lambda size_bytes=size_bytes: _first_store_s(size_bytes),
            lambda: _first_store_s(reference),
            unit="s", against="the smallest arena",
        ).measure(repeats)  # fmt: skip


def _first_store_s(memory_bytes: int) -> float:
    """Return the time until the first store of 1 MiB has succeeded, s."""
    kv = [np.ones((16, 64 << 10), np.uint8)]
    job = None

    def start() -> None:
        nonlocal job
        job = ptstore_mpi.launch(Config(memory_bytes=memory_bytes))
        assert job.client is not None
        stored = job.client.namespace("start", LAYOUT).store(np.arange(256), kv)
        assert stored.reason == "stored", stored

    seconds = timed(start)
    assert job is not None
    job.close()
    return seconds
