"""Two nodes of a server and a client: KV on devices is stored to and loaded from both nodes.

The driver is the stand-in, under its own name in LD_LIBRARY_PATH.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, Store, TensorView

sys.path.insert(0, str(Path(__file__).parents[1]))
from stand_in import NAME, StandIn

LAYOUT = KVLayout.for_attention(layers=2, kv_heads=3, head_dim=8, dtype="float16", block_tokens=4)
TOKENS = 64
PROMPTS = 8  # half of them by each client
BEHIND = StandIn(NAME)


def prompt(number: int) -> np.ndarray:
    return np.arange(TOKENS + 1) + 1000 * (number + 1)


def cache(number: int) -> list[np.ndarray]:
    generator = np.random.default_rng(number)
    shape = (1, 3, TOKENS + 5, 8)
    return [generator.integers(0, 256, shape).astype(np.float16) for _ in LAYOUT.tensors]


def main(store: Store) -> None:
    namespace = store.namespace("m", LAYOUT)
    me = store.client_rank
    for number in range(me, PROMPTS, 2):
        kv = [BEHIND.array(array, device=me) for array in cache(number)]
        stored = namespace.store(prompt(number), [TensorView.heads(array, 4) for array in kv])
        assert stored.tokens == TOKENS, stored
    request = store.comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
    by_source = {"owned": 0, "remote": 0}
    for number in range(PROMPTS):
        out = [BEHIND.array(np.zeros_like(array), device=me) for array in cache(number)]
        for array in out:
            array.write_later(np.zeros_like(array.inside))  # under way when the load begins
        match = namespace.match(prompt(number))
        loaded = namespace.load(match, [TensorView.heads(array, 4) for array in out])
        assert loaded.tokens == TOKENS, loaded
        for source in by_source:
            by_source[source] += loaded.by_source[source]
        BEHIND.finish_writes()
        for array, expected in zip(out, cache(number), strict=True):
            assert np.array_equal(array.inside[:, :, :TOKENS], expected[:, :, :TOKENS])
            assert not array.inside[:, :, TOKENS:].any()
    moved = store.stats()["bytes"]
    print(f"client {me}: {by_source}, stored {moved}", flush=True)
    assert all(by_source.values()), by_source
    assert moved["stored_local_bytes"], moved
    assert moved["stored_sent_bytes"], moved
    until = time.monotonic() + 20
    while BEHIND.registered_count() < 2:
        assert time.monotonic() < until, "arena and staging memory are not page-locked"
        time.sleep(1e-3)


ptstore_mpi.run(
    main, Config(memory_bytes=1 << 20, segment_tokens=16, get_bytes=4096, placement="random")
)
left = (BEHIND.registered_count(), BEHIND.pending_count(), BEHIND.live_export_count())
assert left == (0, 0, 0), left
print("right, and nothing is left in the driver", flush=True)
