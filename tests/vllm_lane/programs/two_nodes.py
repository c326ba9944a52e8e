"""What an engine on one node stores, one on the other loads; and a conversation moves to and fro.

usage: two_nodes.py MODEL      needs 2 nodes of 1 server and 1 client
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import ptstore_mpi
from ptstore_mpi import Config
from ptstore_mpi.integrations.vllm import attach, prepare_process
from ptstore_mpi.testing.bench import Bench

sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm_engines import BLOCK, OFF, Engine, books_kept
from vllm_model import VOCABULARY

MODES = ("async", "layered", "verified")
TURNS, QUESTION_TOKENS, ANSWER_TOKENS = 5, 70, 50
CONFIG = Config(memory_bytes=64 << 20, segment_tokens=128, copy_threads=1)


def tokens(count, seed):
    """Return tokens that are the same on both nodes."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


def computed(engine, prompt, max_tokens=4):
    engine.forget()
    (answer,) = engine.answer(prompt, wishes=OFF, max_tokens=max_tokens)
    engine.forget()
    return answer.tokens


def move_a_prefix(bench, engine, seed):
    prefix = tokens(9 * BLOCK, seed)
    prompt = prefix + tokens(5, seed + 100)
    right = computed(engine, prompt)
    for node in range(2):
        bench.everyone()
        if bench.store.node != node:
            continue
        with books_kept(engine) as counted:
            (answer,) = engine.answer(prompt)
        assert answer.tokens == right
        assert counted["remote"] == node * len(prefix), counted
        engine.check_stored(prompt, len(prefix))


def move_a_conversation(bench, engine, seed):
    comm, history, known = bench.store.comm, [], 0
    for turn in range(TURNS):
        asked = turn % bench.store.client_count
        prompt = history + tokens(QUESTION_TOKENS, seed + turn)
        answer = None
        if bench.store.client_rank == asked:
            right = computed(engine, prompt, ANSWER_TOKENS)
            with books_kept(engine) as counted:
                (found,) = engine.answer(prompt, max_tokens=ANSWER_TOKENS)
            answer = found.tokens
            assert answer == right
            assert counted["recomputed"] == len(prompt) - known, (counted, known)
        bench.everyone()
        history = prompt + comm.bcast(answer, asked)
        known = (len(history) - 1) // BLOCK * BLOCK


def main(store):
    prepare_process()
    bench = Bench(store)
    with attach(store) as attachment:
        for number, mode in enumerate(MODES):
            connector = {"load": mode, "fetch": "always", "save": "all", "salt": mode}
            engine = Engine(sys.argv[1], attachment, connector)
            move_a_prefix(bench, engine, 1000 * number)
            move_a_conversation(bench, engine, 1000 * number + 500)
            engine.check_idle()
            print(f"node {store.node}, {mode}: moved", flush=True)
            engine.close()
            bench.check_settled()


if __name__ == "__main__":
    ptstore_mpi.run(main, CONFIG)
