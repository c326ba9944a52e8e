"""Several threads of each client use one store at once; needs 2 nodes of 1 server and 1 client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import ptstore_mpi
from ptstore_mpi import Config, Store
from ptstore_mpi.testing.bench import Bench, Space

THREADS, TURNS, TOKENS = 4, 30, 64


def main(store: Store) -> None:
    bench = Bench(store)
    space: Space = bench.space()

    def work(thread: int) -> None:
        for turn in range(TURNS):
            number = (store.client_rank * THREADS + thread) * TURNS + turn
            prompt = bench.tokens(TOKENS, seed=number)
            assert space.put(prompt).reason == "stored"
            space.expect(np.append(prompt, 1), TOKENS)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    bench.everyone()
    bench.check_settled()
    bench.check_conservation()
    print(f"client {store.client_rank}: threads took turns", flush=True)


ptstore_mpi.run(main, Config(memory_bytes=64 << 20, placement="random"))
