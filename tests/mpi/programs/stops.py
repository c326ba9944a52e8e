"""A server is stopped at every step of load and store, and continued when the operation has ended.

usage: stops.py TRANSPORT      needs 2 nodes of 1 server and 1 client

Both clients in turn stop the first node's server: it is
near to one of them and far from the other.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from faults import Step, at_step, does, go_on, prompts_of_first_server, sends, stop
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, Store
from ptstore_mpi.protocol.effects import Pack, StartGet, StartWrite, Unpack
from ptstore_mpi.protocol.messages import (
    AcquireRequest,
    MatchRequest,
    PublishRequest,
    ReleaseRequest,
    ReserveRequest,
)
from ptstore_mpi.testing.bench import Bench, Space, Tokens

LAYOUT = KVLayout.for_attention(layers=4, kv_heads=4, head_dim=64, dtype="float32")
CONFIG = Config(
    replica_admission="never",
    transport=sys.argv[1],
    memory_bytes=96 << 20,
    segment_tokens=128,  # 1 MiB
    get_bytes=256 << 10,
    gets_in_flight_count=2,  # so that the first bytes come while the last are not asked for yet
    placement="random",
    match_timeout_s=0.5,
    load_timeout_s=0.7,
    store_timeout_s=0.9,
    copy_threads=1,
)
TOKENS = 512
SLACK_S = 0.5
PIDS = MPI.COMM_WORLD.allgather(os.getpid())

# When the server stops -> what the operation then says, near and far from it.
LOADS: list[tuple[str, Step, bool, tuple[str, str]]] = [
    ("before match", sends(MatchRequest), False, ("partial", "partial")),
    ("before acquire", sends(AcquireRequest), False, ("late", "late")),
    ("first bytes", does(Unpack), False, ("loaded", "late")),
    ("before release", sends(ReleaseRequest), False, ("loaded", "loaded")),
]
GETS = ("Gets in flight", does(StartGet), True, ("", "late"))
STORES: list[tuple[str, Step, bool, tuple[str, str]]] = [
    ("before match", sends(MatchRequest), False, ("partial", "partial")),
    ("before reserve", sends(ReserveRequest), False, ("late", "late")),
    ("data under way", lambda e: isinstance(e, Pack | StartWrite), True, ("late", "late")),
    ("before publish", sends(PublishRequest), False, ("late", "late")),
]


class Timed:
    """Measures calls against their deadlines."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def __call__(self, deadline_s: float, operation: Callable[..., Any], *args: Any) -> Any:
        started = time.monotonic()
        result = operation(*args)
        took_s = time.monotonic() - started
        name = operation.__name__
        print(f"took {took_s:.3f} of {deadline_s:.1f} s: {self.phase}, {name}", flush=True)
        assert took_s < deadline_s + SLACK_S, f"{self.phase}: {name} took {took_s:.2f} s"
        return result


def no_transfer(bench: Bench, space: Space, asked: Tokens) -> bool:
    space.namespace.match(asked)  # every operation takes note of what has ended meanwhile
    return not bench.store._context.ledger.transfer_count


def check_load(bench: Bench, space: Space, prompt: Tokens, phase: tuple[Any, ...]) -> None:
    name, step, after, reasons = phase
    reason = reasons[bench.store.node]
    asked = np.append(prompt, 1)
    out = space.oracle.blank(TOKENS // LAYOUT.block_tokens)
    timed = Timed(f"node {bench.store.node}, load, {name}")
    with at_step(bench.store, step, lambda: stop(PIDS[0]), after=after):
        hit = timed(CONFIG.match_timeout_s, space.namespace.match, asked)
        got = timed(CONFIG.load_timeout_s, space.namespace.load, hit, out)
    kept = [array.copy() for array in out]
    go_on(PIDS[0])
    assert (hit.reason if reason == "partial" else got.reason) == reason, (hit, got)
    assert (got.tokens == TOKENS) == (reason == "loaded"), got
    space.oracle.check(asked, out, until_tokens=got.tokens)
    bench.remote_bytes += got.by_source["remote"] * LAYOUT.bytes_per_token
    back = space.expect(asked, TOKENS)
    assert back.by_source["owned" if bench.store.node == 0 else "remote"] == TOKENS, back
    bench.eventually("the Gets of the miss have ended", lambda: no_transfer(bench, space, asked))
    for before, now in zip(kept, out, strict=True):
        assert np.array_equal(before, now), "the load wrote after it had returned"


def check_store(bench: Bench, space: Space, prompt: Tokens, phase: tuple[Any, ...]) -> None:
    name, step, after, reasons = phase
    kv = space.oracle.arrays(prompt)
    timed = Timed(f"node {bench.store.node}, store, {name}")
    asks = reasons == ("partial", "partial")
    deadline_s = CONFIG.match_timeout_s if asks else CONFIG.store_timeout_s
    with at_step(bench.store, step, lambda: stop(PIDS[0]), after=after):
        stored = timed(deadline_s, space.namespace.store, prompt, kv)
    go_on(PIDS[0])
    assert stored.reason == reasons[bench.store.node], stored
    assert stored.tokens == 0, stored
    # A publish that was on its way when the server went on may still have come in time.
    published = name == "before publish" or (name == "data under way" and not bench.store.node)
    again = space.put(prompt)
    assert again.reason in ("stored", *["known"] * published), again
    space.expect(np.append(prompt, 1), TOKENS)


def main(store: Store) -> None:
    bench = Bench(store)
    space = bench.space(layout=LAYOUT)
    far = bool(store.node)
    for _ in bench.my_turn():
        first, *others = prompts_of_first_server(bench, space, 1 + len(STORES), TOKENS)
        assert space.put(first).reason == "stored"
        for phase in [*LOADS, *[GETS] * far]:
            check_load(bench, space, first, phase)
        for prompt, phase in zip(others, STORES, strict=True):
            check_store(bench, space, prompt, phase)
    bench.check_settled()
    bench.check_conservation()
    assert store.stats()["bytes"]["discarded_bytes"] > 0 or not far
    print(f"client {store.client_rank}: settled", flush=True)


ptstore_mpi.run(main, CONFIG)
