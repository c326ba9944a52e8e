"""Engines in place of vLLM with a connector and without, over the real store.

``python -m mpi4py -m tests.experiments.vllm_overhead_stand_in ...`` runs the driver over them. With
the connector everything takes `DEARER` times as long, and a save as long again as the batch.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager

from experiments import exp_vllm_overhead
from experiments.vllm_overhead.engine import Answer, Answered
from experiments.vllm_overhead.tables import CONNECTOR
from tests.experiments import vllm_stand_in

DEARER = 1.25


class StandIn:
    """Times and tokens are functions of the prompts, and of the system."""

    def __init__(self, store, output_tokens, *, connected):
        self._engine = vllm_stand_in.StandIn(store, output_tokens)
        self._connected = connected

    def answer(self, prompts):
        answers = [
            self._engine.answer(prompt, own_cache=True, load=self._connected, save=self._connected)
            for prompt in prompts
        ]
        factor = DEARER if self._connected else 1.0
        wall_s = factor * sum(answer.total_s for answer in answers)
        saved_s = wall_s if self._connected else 0.0
        return Answered(
            answers=tuple(self._read(answer, factor) for answer in answers),
            start_s=answers[0].start_s,
            wall_s=wall_s,
            cpu_s=wall_s / 2,
            settled_s=wall_s + saved_s,
            settled_cpu_s=(wall_s + saved_s) / 2,
        )

    def _read(self, answer, factor):
        facts = {name: value for name, value in answer.facts.items() if name != "load_s"}
        saved_bytes = vllm_stand_in.BYTES_PER_TOKEN * answer.prompt_tokens
        facts["stored_bytes"] = saved_bytes if self._connected else 0
        facts["store_reason"] = "stored" if self._connected else "none"
        return Answer(
            prompt_tokens=answer.prompt_tokens,
            tokens=answer.tokens,
            ttft_s=factor * answer.ttft_s,
            facts=facts,
        )


@contextmanager
def open_stand_in(store, folder, options, longest_tokens, system):
    yield StandIn(store, options.output_tokens, connected=system == CONNECTOR)


if __name__ == "__main__":
    sys.exit(exp_vllm_overhead.main(sys.argv[1:], open_engine=open_stand_in))
