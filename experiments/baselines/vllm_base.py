"""A compared system that has a vLLM engine of its own: how it starts, answers and ends.

Owns the engine's life and what its outputs mean. Never knows a store. Whatever brings its own
connector is a subclass::

    class Other(VllmSystem):
        name = "other"

        def surround(self, stack):          # what must run before the engine is built
            stack.enter_context(own_server())

        def arguments(self):                # the connector, as vLLM takes it
            return {**super().arguments(), "kv_transfer_config": ...}

        def tokens_by_source(self, output): # where the tokens came from, if not the engine
            ...

        def settle(self, sample):           # what became of keeping the prompt
            ...

The time to the first token is vLLM's own: from the arrival of the request in the engine's front to
the step that brought the token.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.baselines.base import FirstToken, Sample, System
from experiments.common.vllm_answers import first_token_s
from experiments.common.workload import Request

WARM_UP_TOKEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the engines of all systems have alike.

    Attributes
    ----------
    model
        Folder of the model.
    dtype
        Of weights and KV.
    max_model_len
        Tokens of the longest prompt, and one.
    block_tokens
        Tokens of a block of vLLM.
    working_bytes
        KV memory that one prompt needs while it runs.
    """

    model: Path
    dtype: str
    max_model_len: int
    block_tokens: int
    working_bytes: int


class VllmSystem(System):
    """One system on an engine of its own, which lives from `open` to `close`.

    Parameters
    ----------
    facts
        What all engines have alike.
    cache_bytes
        KV memory beyond what a running prompt needs.
    """

    prefix_caching = True

    def __init__(self, facts: EngineFacts, *, cache_bytes: int = 0) -> None:
        self.facts = facts
        self.cache_bytes = cache_bytes
        self._stack = ExitStack()
        self._llm: Any = None
        self._sampling: Any = None

    def arguments(self) -> dict[str, Any]:
        """Return what the engine is built with, beside the model."""
        return {
            "dtype": self.facts.dtype,
            "max_model_len": self.facts.max_model_len,
            "block_size": self.facts.block_tokens,
            "kv_cache_bytes": self.facts.working_bytes + self.cache_bytes,
            "prefix_caching": self.prefix_caching,
            "connector": None,
        }

    def settings(self) -> dict[str, Any]:
        """Return what the engine is built with, for the record."""
        return self.arguments()

    def surround(self, stack: ExitStack) -> None:
        """Start what must be there before the engine; `stack` ends it after the engine."""

    def tokens_by_source(self, output: Any) -> dict[str, int]:
        """Return where the tokens of a prompt came from; the rest were computed."""
        return {"engine": output.num_cached_tokens or 0}

    def times(self, output: Any) -> tuple[float, float]:
        """Return the seconds of looking up the prefix and of loading it."""
        return 0.0, 0.0

    def reason(self, output: Any) -> str:
        """Return why no more was reused."""
        usable = (len(output.prompt_token_ids) - 1) // self.facts.block_tokens
        cached = output.num_cached_tokens or 0
        if not cached:
            return "cold"
        return "whole" if cached == usable * self.facts.block_tokens else "diverged"

    def open(self) -> None:
        """Build the engine and compute a few tokens, less than a block: nothing is kept of them."""
        from vllm import SamplingParams

        from ptstore_mpi.integrations.vllm import build_llm, release

        self.surround(self._stack)
        self._llm = build_llm(str(self.facts.model), use_tqdm_on_load=False, **self.arguments())
        self._stack.callback(release, self._llm)
        self._sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        most = min(self.facts.block_tokens, self.facts.max_model_len) - 1
        self._generate([WARM_UP_TOKEN] * most)
        self.drain()

    def drain(self) -> None:
        """Wait until the engine has ended what it does after a first token."""

    def first_token(self, request: Request) -> FirstToken:
        """Have the engine answer."""
        output = self._generate(request.tokens.tolist())
        ttft_s = first_token_s(output)
        match_s, load_s = self.times(output)
        return FirstToken(
            token=output.outputs[0].token_ids[0],
            logits=None,
            match_s=match_s,
            load_s=load_s,
            prefill_s=max(ttft_s - match_s - load_s, 0.0),
            tokens_by_source=self.tokens_by_source(output),
            reason=self.reason(output),
            ttft_s=ttft_s,
        )

    def close(self) -> None:
        """End the engine, then what it stood on."""
        self._llm = None
        self._stack.close()

    def _generate(self, token_ids: list[int]) -> Any:
        prompt = {"prompt_token_ids": token_ids}
        (output,) = self._llm.generate([prompt], self._sampling, use_tqdm=False)
        return output


class VllmVanilla(VllmSystem):
    """Every prompt is computed: vLLM with its prefix cache off."""

    name = "vanilla"
    prefix_caching = False

    def reason(self, output: Any) -> str:
        """Return what the system is."""
        return "vanilla"


class VllmPrefix(VllmSystem):
    """The engine's own prefix cache, with `cache_bytes` to keep prefixes in."""

    name = "prefix"

    def settle(self, sample: Sample) -> None:
        """Say who keeps the prompt: the engine does, and tells nobody how much."""
        sample.store_reason = "engine"
