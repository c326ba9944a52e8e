"""Engines in one process: refused beside each other, right after each other.

usage: one_engine.py MODEL
"""

from __future__ import annotations

import gc
import sys

import numpy as np

import ptstore_mpi
from ptstore_mpi import Config, ConfigError
from ptstore_mpi.integrations.vllm import attach, build_llm, prepare_process, release, settle

CONFIG = Config(memory_bytes=64 << 20, segment_tokens=128, copy_threads=1)


def build(**changes):
    arguments = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "block_size": 32,
        "kv_cache_bytes": 4 << 20,
        "connector": {"fetch": "always"},
    }
    return build_llm(sys.argv[1], **{**arguments, **changes})


def answer(llm, prompt):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.kv_transfer_params


def refused(build_it):
    try:
        build_it()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was built")


def main(store):
    prepare_process()
    from vllm import LLM

    prompt = np.random.default_rng(3).integers(3, 200, 300).tolist()
    plain = build(connector=None)
    right, _ = answer(plain, prompt)
    release(plain)
    with attach(store):
        first = build()
        assert answer(first, prompt)[0] == right
        assert "release" in refused(build)
        settle(first)
        first.reset_prefix_cache()
        assert answer(first, prompt)[0] == right
        held = first.llm_engine
        release(first)
        release(first)
        try:
            build(block_size=48)  # no backend takes it
        except Exception as error:
            print("as it should be:", type(error).__name__)
        second = build()
        del held, first, plain
        gc.collect()
        tokens, facts = answer(second, prompt)
        assert (tokens, facts["ptstore"]["owned_tokens"]) == (right, 288)
        # vLLM's own way, beside one of ours: refused before anything is mixed up
        arguments = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512}
        said = refused(lambda: LLM(sys.argv[1], kv_cache_memory_bytes=4 << 20, **arguments))
        assert "not released" in said
    print("one after the other")


if __name__ == "__main__":
    ptstore_mpi.run(main, CONFIG)
