"""Everybody naps for long whenever nothing is to be done: slower, and otherwise as ever.

Needs 2 nodes of 1 server and 1 client.
"""

from __future__ import annotations

import numpy as np

import ptstore_mpi
from ptstore_mpi import Config, Store
from ptstore_mpi.testing.bench import Bench

NAP_S = 0.1  # 500 times the default


def main(store: Store) -> None:
    bench = Bench(store)
    space = bench.space(shared=True)
    prompts = [bench.tokens(160, seed=seed) for seed in range(2)]
    slowest_s = 0.0
    for _ in bench.my_turn():
        for prompt in prompts[store.client_rank :: 2]:
            assert space.put(prompt).reason == "stored"
    for prompt in prompts:
        asked = np.append(prompt, 1)
        match, got = space.get(asked)
        assert (match.tokens, match.reason) == (160, "whole"), match
        assert (got.tokens, got.reason) == (160, "loaded"), got
        slowest_s = max(slowest_s, match.seconds)
    assert slowest_s > NAP_S / 4, "nobody seems to have napped"
    bench.everyone()
    assert bench.total(space.namespace.clear() or 0) == len(prompts) * 7
    bench.check_settled()
    bench.check_conservation()
    print(f"client {store.client_rank}: slowest match {slowest_s:.2f} s", flush=True)


ptstore_mpi.run(
    main,
    Config(memory_bytes=4 << 20, segment_tokens=24, nap_first_s=NAP_S, nap_cap_s=NAP_S,
           idle_spin_s=1e-6, copy_threads=1),
)  # fmt: skip
