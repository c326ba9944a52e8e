"""A server stands still while engines answer: nobody waits longer than deadlines say.

usage: server_stops.py MODEL      needs 2 nodes of 1 server and 1 client

Each client in turn stops the first node's server, which has the prefix: before a load, in the
middle of one, and before anything is asked. It goes on when the requests have been answered.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config
from ptstore_mpi.integrations.vllm import attach, prepare_process
from ptstore_mpi.protocol.effects import StartGet, Unpack
from ptstore_mpi.protocol.messages import AcquireRequest
from ptstore_mpi.testing.bench import Bench

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "mpi" / "programs"))

from faults import at_step, does, go_on, sends, stop
from vllm_engines import BLOCK, OFF, Engine, books_kept
from vllm_model import VOCABULARY

MODES = ("async", "layered", "verified")
CONFIG = Config(
    memory_bytes=64 << 20,
    segment_tokens=128,
    copy_threads=1,
    replica_admission="never",
    match_timeout_s=1.0,
    load_timeout_s=1.5,
    store_timeout_s=1.0,
)
DEADLINES_S = CONFIG.match_timeout_s + CONFIG.load_timeout_s + 0.7
AT_ONCE = 6
SERVER_PID = MPI.COMM_WORLD.bcast(os.getpid())


def check_mode(bench, engine, prefix, mode):
    rng = np.random.default_rng([bench.store.client_rank, MODES.index(mode)])
    prompts = [prefix + rng.integers(3, VOCABULARY, 7).tolist() for _ in range(AT_ONCE)]
    engine.forget()
    started = time.monotonic()
    right = [answer.tokens for answer in engine.answer(*prompts, wishes=OFF)]
    limit_s = time.monotonic() - started + DEADLINES_S
    steps = {
        "before a load": sends(AcquireRequest),
        "in a load": does(StartGet if bench.store.node else Unpack),
    }
    for name, step in steps.items():
        with stopped_meanwhile(bench, engine, f"{mode}, {name}", limit_s):
            # What is recomputed here must not become near, or the next load is no Get.
            with at_step(bench.store, step, lambda: stop(SERVER_PID)):
                (answer,) = engine.answer(prompts[0], wishes={"ptstore_save": False})
            assert answer.tokens == right[0]
        wait_until_found(bench, engine, prompts[0], right[0])
    for count in (1, AT_ONCE):
        with stopped_meanwhile(bench, engine, f"{mode}, {count} at once", limit_s):
            stop(SERVER_PID)
            answers = engine.answer(*prompts[:count])
            assert [answer.tokens for answer in answers] == right[:count]
    wait_until_found(bench, engine, prompts[0], right[0])


def wait_until_found(bench, engine, prompt, right):
    """Wait until the server that went on answers as before."""
    bench.eventually(
        "the prefix is found again", lambda: hit(engine, prompt, right) >= len(prompt) - BLOCK
    )


@contextmanager
def stopped_meanwhile(bench, engine, what, limit_s):
    """Let the server go on after this, and tell how long it took."""
    engine.forget()
    with books_kept(engine):
        started = time.monotonic()
        yield
        took_s = time.monotonic() - started
        go_on(SERVER_PID)
    late = "late" if took_s > limit_s else "in time"
    print(f"node {bench.store.node}, {what}: {took_s:.2f} of {limit_s:.2f} s, {late}", flush=True)


def hit(engine, prompt, right):
    engine.forget()
    with books_kept(engine) as counted:
        assert engine.answer_alone(prompt) == [right]
    return counted["owned"] + counted["remote"]


def main(store):
    prepare_process()
    bench = Bench(store)
    prefix = np.random.default_rng(5).integers(3, VOCABULARY, 12 * BLOCK).tolist()
    with attach(store) as attachment:
        for mode in MODES:
            connector = {"load": mode, "fetch": "always", "salt": mode}
            engine = Engine(sys.argv[1], attachment, connector)
            if store.node == 0:
                engine.answer(prefix)
                engine.settle()
            for _ in bench.my_turn():
                check_mode(bench, engine, prefix, mode)
            engine.check_idle()
            engine.close()
            bench.check_settled()


if __name__ == "__main__":
    ptstore_mpi.run(main, CONFIG)
