"""The only server that has a hot prefix stops for a while under clients that answer requests.

usage: hot_prefix.py FOLDER      needs 2 nodes of 1 server each and clients on both

The last client, far from the prefix, stops the first node's server in the middle of a load; it is
continued STOPPED_S later. All the while every client answers questions on the prefix.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
from faults import at_step, does, go_on, stop
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import Config, Store
from ptstore_mpi.protocol.effects import StartGet
from ptstore_mpi.testing.bench import Bench

CONTINUED = Path(sys.argv[1]) / "continued"
SERVER_PID = MPI.COMM_WORLD.bcast(os.getpid())
STOPPED_S = 2.0
SLACK_S = 0.5
PREFIX_TOKENS = 224
QUESTION_COUNT = 12
CONFIG = Config(
    memory_bytes=32 << 20,
    segment_tokens=32,
    match_timeout_s=0.4,
    load_timeout_s=0.6,
    replica_admission="never",  # or its prefix would be near after the second load
    copy_threads=1,
)


def make_reuse(store: Store):
    """Return the engine at work; imported here, since servers need none of it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "integrations"))
    import torch
    from tiny_model import tiny_llama

    from ptstore_mpi.integrations.transformers import (
        FetchOrRecompute,
        PrefixReuse,
        TransformersEngine,
    )

    torch.set_num_threads(1)
    engine = TransformersEngine(tiny_llama(), model_id="tiny")
    return PrefixReuse(engine, engine.namespace(store), fetch=FetchOrRecompute(is_on=False))


def stop_for_a_while() -> None:
    def continue_server() -> None:
        CONTINUED.touch()
        go_on(SERVER_PID)

    stop(SERVER_PID)
    threading.Timer(STOPPED_S, continue_server).start()


def main(store: Store) -> None:
    reuse, bench = make_reuse(store), Bench(store)
    prefix = bench.tokens(PREFIX_TOKENS, seed=1) % 211
    prompts = [np.append(prefix, bench.tokens(9) % 211) for _ in range(QUESTION_COUNT)]
    expected, recompute_s = [], 0.0
    for prompt in prompts:
        whole = reuse.engine.prefill(prompt)
        expected.append(whole.token)
        recompute_s = max(recompute_s, whole.seconds)
    bench.everyone()
    if store.client_rank == 0:
        assert reuse.keep(reuse.first_token(prompts[0])).reason == "stored"
    bench.everyone()

    limit_s = recompute_s + CONFIG.match_timeout_s + CONFIG.load_timeout_s + SLACK_S
    source = "owned" if store.node == 0 else "remote"
    slowest_s, reasons, hits_after, number = 0.0, {}, 0, 0
    while hits_after < QUESTION_COUNT:
        prompt = prompts[number % QUESTION_COUNT]
        over = CONTINUED.exists()
        started = time.monotonic()
        if store.client_rank == store.client_count - 1 and number == 5:
            with at_step(store, does(StartGet), stop_for_a_while, after=True):
                answer = reuse.first_token(prompt)
        else:
            answer = reuse.first_token(prompt)
        took_s = time.monotonic() - started
        assert answer.token == expected[number % QUESTION_COUNT], (number, answer.reason)
        assert took_s < limit_s, f"{took_s:.2f} s, {answer.reason}"
        slowest_s = max(slowest_s, took_s)
        reasons[answer.reason] = reasons.get(answer.reason, 0) + 1
        if store.node == 0:  # elsewhere a recomputed prefix would from then on be a near one
            reuse.keep(answer)
        hits_after += over and answer.by_source[source] == PREFIX_TOKENS
        number += 1
        assert not over or number < 10_000, "hits never came back"
    assert reasons.get("partial", 0) + reasons.get("late", 0), "nobody noticed that it stopped"
    print(
        f"client {store.client_rank}: slowest {slowest_s:.3f} of {limit_s:.3f} s, recomputed in "
        f"{recompute_s:.3f} s, {reasons}, kept {store.stats()['reasons'].get('store')}",
        flush=True,
    )
    bench.check_settled()


ptstore_mpi.run(main, CONFIG)
