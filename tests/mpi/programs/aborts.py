"""Exceptions at random effects of loads and stores, hundreds of them; then a client that leaves.

usage: aborts.py TRANSPORT COUNT      count: aborted operations of each client
       needs 2 nodes of 1 server and 1 client

Both clients use the same few texts in arenas that are too small for them. Every loaded byte is
checked, and memory that an aborted load was given must stay as it was left.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from faults import AbortError, aborted_at, at_step, sends

import ptstore_mpi
from ptstore_mpi import Config, Store
from ptstore_mpi.protocol.messages import PublishRequest
from ptstore_mpi.testing.bench import LAYOUT, Bench, Space, Tokens
from ptstore_mpi.types import whole_pages

COUNT = int(sys.argv[2])
PAUSE_COUNT = 100
CONFIG = Config(
    transport=sys.argv[1],
    memory_bytes=384 << 10,
    segment_tokens=24,
    staging_bytes=1 << 20,
    get_bytes=8 << 10,
    placement="random",
    load_timeout_s=2.0,
    store_timeout_s=1.0,
    copy_threads=1,
)


class Aborts:
    """One client's operations, most of which end with an exception."""

    def __init__(self, bench: Bench, space: Space) -> None:
        self.bench = bench
        self.space = space
        self.ends: Counter[tuple[str, str]] = Counter()
        self.left: list[Any] = []
        self.written: list[Any] = []

    @property
    def count(self) -> int:
        return sum(n for (_, where), n in self.ends.items() if where != "completed")

    def prompt(self) -> Tokens:
        rng = self.bench.rng
        text = self.bench.tokens(160, seed=int(rng.integers(4)))
        return np.append(text[: int(rng.integers(5, 160))], int(rng.integers(4)))

    def step(self) -> None:
        prompt = self.prompt()
        hit = self.space.namespace.match(prompt)
        self.attempt("load", prompt, lambda: self.load(prompt, hit))
        self.attempt("store", prompt, lambda: self.space.put(prompt))
        if self.bench.rng.random() < 0.4:  # so that there is something to load
            self.space.put(prompt)
        if self.bench.rng.random() < 0.1:
            self.space.namespace.drop_tail(hit)
        if self.bench.rng.random() < 0.05:
            self.space.namespace.clear()

    def attempt(self, name: str, prompt: Tokens, operation: Any) -> None:
        rng = self.bench.rng
        number, after = int(rng.integers(30)), bool(rng.integers(2))
        with aborted_at(self.bench.store, number, after=after) as seen:
            try:
                operation()
                where = "completed"
            except AbortError:
                where = seen[-1]
        self.ends[name, where] += 1

    def load(self, prompt: Tokens, hit: Any) -> None:
        for array, before in zip(self.written, self.left, strict=True):
            assert np.array_equal(array, before), "an aborted load wrote after its end"
        self.written = out = self.space.oracle.blank(len(prompt) // LAYOUT.block_tokens)
        try:
            got = self.space.namespace.load(hit, out)
        finally:
            self.left = [array.copy() for array in out]
        self.space.oracle.check(prompt, out, until_tokens=got.tokens)


def leave_in_the_middle(bench: Bench, space: Space) -> None:
    """The second client aborts a store and leaves; until then time frees nothing of it."""
    region_bytes = 4 * whole_pages(CONFIG.segment_tokens * LAYOUT.bytes_per_token)
    if bench.store.client_rank:
        prompt = bench.tokens(4 * CONFIG.segment_tokens)
        try:
            with at_step(bench.store, sends(PublishRequest), abort):
                space.put(prompt)
        except AbortError:
            bench.everyone()
            bench.everyone()
        return
    bench.everyone()
    assert bench.server_total("reserved_bytes") == region_bytes
    bench.eventually("it expires", lambda: not bench.server_total("live_reservation_count"))
    time.sleep(0.1)
    assert bench.server_total("reserved_bytes") == region_bytes, "freed before its writer went on"
    bench.everyone()
    bench.eventually("it is free", lambda: not bench.server_total("reserved_bytes"))
    assert not bench.server_total("leased_bytes")


def abort() -> None:
    raise AbortError


def main(store: Store) -> None:
    bench = Bench(store)
    space = bench.space(shared=True)
    aborts = Aborts(bench, space)
    for pause in range(PAUSE_COUNT, COUNT + 1, PAUSE_COUNT):
        while aborts.count < pause:
            aborts.step()
        bench.check_settled()
    ends = sum(store.comm.allgather(aborts.ends), Counter())
    if store.client_rank == 0:
        lines = [f"count {n} {name} {where}" for (name, where), n in sorted(ends.items())]
        print("\n".join(lines), flush=True)
    space.namespace.clear()
    bench.check_settled()
    assert bench.server_total("owned_bytes") == 0
    bench.everyone()
    leave_in_the_middle(bench, space)


ptstore_mpi.run(main, CONFIG)
print("closed", flush=True)
