"""An engine in place of vLLM, over the real store: tokens, times and a cache, no model.

``python -m mpi4py -m tests.experiments.vllm_stand_in ...`` runs the driver over it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager

import numpy as np

from experiments import exp_vllm_ttft
from experiments.vllm_ttft.engine import Answer
from ptstore_mpi import SOURCES, KVLayout, TensorSpec

BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 8
RECOMPUTED_S, REUSED_S = 1e-3, 1e-5  # of a token


class StandIn:
    """Its next tokens and its KV are functions of the prompt."""

    def __init__(self, store, output_tokens):
        layout = KVLayout((TensorSpec("kv", BLOCK_TOKENS * BYTES_PER_TOKEN),), BLOCK_TOKENS)
        self._space = store.namespace("stand-in", layout)
        self._output_tokens = output_tokens
        self._own = set()
        self._now_s = 0.0

    def answer(self, prompt, *, own_cache, load=False, save=False):
        facts = dict.fromkeys((f"{source}_tokens" for source in SOURCES), 0)
        facts |= {"match_s": 0.0, "load_s": 0.0, "reason": "off"}
        tokens = np.array(prompt, dtype=np.uint32)
        if own_cache and prompt in self._own:
            facts["engine_tokens"] = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        elif load:
            facts |= self._load(tokens)
        if save:
            assert self._space.store(tokens, [_kv(tokens)]).reason == "stored"
        self._own.add(prompt)
        reused = sum(facts[f"{source}_tokens"] for source in SOURCES)
        facts["recomputed_tokens"] = len(prompt) - reused
        ttft_s = RECOMPUTED_S * facts["recomputed_tokens"] + REUSED_S * reused
        self._now_s += 2 * ttft_s
        return Answer(
            prompt_tokens=len(prompt),
            tokens=tuple(sum(prompt) + place for place in range(self._output_tokens)),
            start_s=self._now_s,
            ttft_s=ttft_s,
            ttft_cpu_s=ttft_s / 2,
            total_s=2 * ttft_s,
            cpu_s=1.5 * ttft_s,
            facts=facts,
        )

    def _load(self, tokens):
        match = self._space.match(tokens)
        out = np.zeros(match.tokens * BYTES_PER_TOKEN, np.uint8)
        loaded = self._space.load(match, [out])
        assert out.tobytes() == _kv(tokens)[: len(out)].tobytes()
        facts = {f"{source}_tokens": loaded.by_source[source] for source in SOURCES}
        return facts | {"load_s": loaded.seconds, "match_s": 1e-6, "reason": loaded.reason}

    def settle(self):
        pass

    def forget(self):
        self._own.clear()


def _kv(tokens):
    return tokens.astype(np.uint64).view(np.uint8)


@contextmanager
def open_stand_in(store, folder, options, longest_tokens):
    yield StandIn(store, options.output_tokens)


if __name__ == "__main__":
    sys.exit(exp_vllm_ttft.main(sys.argv[1:], open_engine=open_stand_in))
