"""Two ranks are one engine: they decide alike, and each keeps its own shard in the store.

Run on a server and two clients. The second rank's store thread is slower, so that whatever depended
on time would come out differently.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np

import ptstore_mpi
from ptstore_mpi import Config, Namespace
from ptstore_mpi.integrations.vllm import (
    attach,
    build_llm,
    join_ranks,
    prepare_process,
    release,
    settle,
)

OFF = {"ptstore_load": False, "ptstore_save": False}
LENGTHS = (321, 128, 20, 257, 256)


def main(store):
    prepare_process()
    slow_down(store.client_rank)
    for mode in ("async", "layered", "verified"):
        join_ranks(store.comm)
        decide_alike(store, mode)
        print(f"rank {store.client_rank}, {mode}: alike")


def decide_alike(store, mode):
    with attach(store) as attachment:
        before = store.stats()["tokens"]["asked"]
        llm = build_llm(
            sys.argv[1],
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=1024,
            block_size=32,
            kv_cache_bytes=4 << 20,
            connector={"load": mode, "fetch": "always", "save_queue_tokens": 700, "salt": mode},
            tensor_parallel_size=store.client_count,
            distributed_executor_backend="external_launcher",
        )
        random_tokens = np.random.default_rng(1)
        prompts = [random_tokens.integers(3, 200, length).tolist() for length in LENGTHS]
        right, _ = answer(llm, prompts, OFF)
        llm.reset_prefix_cache()
        for _ in range(4):  # not all fit the queue at first
            tokens, facts = answer(llm, prompts, {})
            assert tokens == right
            settle(llm)
            assert llm.reset_prefix_cache()
        stats = attachment.stats()
        release(llm)
    everywhere = store.comm.allgather(facts)
    assert all(found == everywhere[0] for found in everywhere)
    assert [of["owned_tokens"] for of in facts] == [320, 96, 0, 256, 224], facts
    assert stats["asked_tokens"] == store.stats()["tokens"]["asked"] - before


def answer(llm, prompts, wishes):
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=6,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": wishes},
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    facts = [output.kv_transfer_params["ptstore"] for output in outputs]
    kept = [{k: v for k, v in of.items() if k.endswith("_tokens")} for of in facts]
    return [list(output.outputs[0].token_ids) for output in outputs], kept


def slow_down(rank):
    chance = random.Random(rank)
    for name in ("match", "load", "store"):
        real = getattr(Namespace, name)

        def delayed(self, *args, _real=real, **options):
            time.sleep(chance.random() * 0.02 * rank)
            return _real(self, *args, **options)

        setattr(Namespace, name, delayed)


if __name__ == "__main__":
    ptstore_mpi.run(main, Config.load(memory_bytes="64MiB", segment_tokens=128))
