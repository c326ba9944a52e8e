"""A client that stands still past its lease or its reservation, while its bytes are reused.

usage: overrun.py TRANSPORT VERIFY      needs 2 nodes of 1 server and 1 client

One client stops itself inside an operation on the first node's server; the other one sees to it
that every page of that server gets other content, then continues it. Both clients take both parts.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
from faults import Step, at_step, await_state, does, go_on, prompts_of_first_server, sends
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, Store
from ptstore_mpi.protocol.effects import Pack, StartGet, Unpack
from ptstore_mpi.protocol.messages import PublishRequest
from ptstore_mpi.testing.bench import Bench, Space, Tokens

LAYOUT = KVLayout.for_attention(layers=2, kv_heads=2, head_dim=64, dtype="float32")
CONFIG = Config(
    replica_admission="never",
    transport=sys.argv[1],
    memory_bytes=4 << 20,
    segment_tokens=128,  # 256 KiB
    placement="random",
    verify=sys.argv[2],
    eviction="none",
    lease_cap_s=0.4,  # well before the deadline of the load: only the lease is over
    load_timeout_s=20.0,
    store_timeout_s=0.4,
    copy_threads=1,
)
TOKENS = 256
CLIENT_PIDS = MPI.COMM_WORLD.allgather(os.getpid())[1::2]


def stand_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Reuse:
    """The other client's part: fill the server with its own prompts, and look after them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.space = bench.space(layout=LAYOUT)
        self.prompts: list[Tokens] = []

    def fill(self) -> None:
        while True:
            [prompt] = prompts_of_first_server(self.bench, self.space, 1, TOKENS)
            stored = self.space.put(prompt)
            if stored.reason == "full":
                break
            assert stored.reason == "stored", stored
            self.prompts.append(prompt)
        assert len(self.prompts) >= 5, len(self.prompts)

    def check(self) -> None:
        for prompt in self.prompts:
            self.space.expect(np.append(prompt, 1), TOKENS)

    def forget(self) -> None:
        self.space.namespace.clear()
        self.prompts.clear()


def what_came(space: Space, prompt: Tokens, out: list[Any]) -> str:
    return "right" if all(map(np.array_equal, out, space.oracle.arrays(prompt))) else "foreign"


def late_load(
    bench: Bench, shared: Space, reuse: Reuse, step: Step, *, brings: str, acts: bool
) -> None:
    """A load stands still; meanwhile what it leased is cleared, freed and written over."""
    if acts:
        [prompt] = prompts_of_first_server(bench, shared, 1, TOKENS)
        asked = np.append(prompt, 1)
        assert shared.put(prompt).reason == "stored"
        out = shared.oracle.blank(TOKENS // LAYOUT.block_tokens)
        hit = shared.namespace.match(asked)
        bench.everyone()
        with at_step(bench.store, step, stand_still):
            got = shared.namespace.load(hit, out)
        assert (got.tokens, got.reason) == (0, "late"), got
        assert what_came(shared, prompt, out) == brings
        print(f"late load on node {bench.store.node}: {brings} bytes came", flush=True)
        bench.everyone()
        shared.expect(asked, 0, "cold")
    else:
        bench.everyone()
        pid = CLIENT_PIDS[1 - bench.store.client_rank]
        await_state(pid, "T")
        assert bench.server_total("leased_bytes") > 0
        assert shared.namespace.clear()
        bench.eventually("the lease has ended", lambda: not bench.server_total("zombie_bytes"))
        reuse.fill()
        go_on(pid)
        bench.everyone()
        reuse.check()
        reuse.forget()
    bench.everyone()


def late_write(bench: Bench, shared: Space, reuse: Reuse, step: Step, *, acts: bool) -> None:
    """A store stands still; then it writes and publishes what it has no right to any more."""
    if acts:
        [prompt] = prompts_of_first_server(bench, shared, 1, TOKENS)
        kv = shared.oracle.arrays(prompt)
        bench.everyone()
        with at_step(bench.store, step, stand_still):
            stored = shared.namespace.store(prompt, kv)
        assert stored.tokens == 0, stored
        assert stored.reason in ("late", "expired"), stored
        print(f"late write on node {bench.store.node}: {stored.reason}", flush=True)
        bench.everyone()
        shared.expect(np.append(prompt, 1), 0, "cold")
    else:
        bench.everyone()
        pid = CLIENT_PIDS[1 - bench.store.client_rank]
        await_state(pid, "T")
        bench.eventually(
            "the reservation has ended", lambda: not bench.server_total("live_reservation_count")
        )
        region_bytes = TOKENS * LAYOUT.bytes_per_token
        assert bench.server_total("reserved_bytes") == region_bytes, "time freed a writer's region"
        reuse.fill()
        go_on(pid)
        bench.everyone()
        reuse.check()
        reuse.forget()
    bench.everyone()


# Where a load stands still, and which bytes it then finds: near, and far. Before they are
# unpacked, a far load's bytes lie in its own memory already, a near one has read nothing yet.
NEAR_READS: list[tuple[Step, str]] = [(does(Unpack), "foreign")]
FAR_READS: list[tuple[Step, str]] = [
    (does(StartGet), "foreign"),
    (does(Unpack), "right"),
]
WRITES: list[Step] = [does(Pack), sends(PublishRequest)]


def main(store: Store) -> None:
    bench = Bench(store)
    shared: Space = bench.space(layout=LAYOUT, shared=True)
    reuse = Reuse(bench)
    for actor in range(store.client_count):
        parts: dict[str, Any] = {"acts": actor == store.client_rank}
        for step, brings in FAR_READS if actor else NEAR_READS:
            late_load(bench, shared, reuse, step, brings=brings, **parts)
        for step in WRITES:
            late_write(bench, shared, reuse, step, **parts)
    bench.check_settled()
    bench.check_conservation()
    print(f"client {store.client_rank}: settled", flush=True)


ptstore_mpi.run(main, CONFIG)
