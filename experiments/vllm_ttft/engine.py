"""vLLM as the driver sees it: a request answered under switches, and its caches emptied.

Owns the clocks of a request, and all that is known of vLLM here. Never knows a system.

TTFT is vLLM's own, from the request's arrival to its first token on the host. CPU time is that of
the process, all threads, until the step that brought the first token has ended, and over the whole
answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from experiments.common.vllm_answers import (
    NOT_INSTALLED,
    EngineError,
    facts_of,
    first_token_s,
    is_installed,
    settle_saves,
)
from experiments.vllm_ttft.options import Options

if TYPE_CHECKING:
    from ptstore_mpi import Store

__all__ = ["Answer", "Engine", "open_vllm", "prepare"]

CONNECTOR = {"fetch": "always"}  # that a load is worth its while is the question, not the premise


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request came to; `facts` are the connector's: tokens by source, times, reason."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    start_s: float
    ttft_s: float
    ttft_cpu_s: float
    total_s: float
    cpu_s: float
    facts: dict[str, Any]


class Engine(Protocol):
    """What the driver needs of an engine."""

    def answer(
        self, prompt: Sequence[int], *, own_cache: bool, load: bool = False, save: bool = False
    ) -> Answer:
        """Answer a prompt.

        Parameters
        ----------
        prompt
            Token ids.
        own_cache
            Whether the engine's own cache may be read.
        load, save
            Whether the store is read, and written.
        """

    def settle(self) -> None:
        """Wait until every save has ended."""

    def forget(self) -> None:
        """Settle, and empty the engine's own cache."""


def prepare(options: Options) -> None:
    """Set up this process for vLLM, before anything imports it.

    Raises
    ------
    EngineError
        vLLM is not installed.
    """
    if not is_installed():
        raise EngineError(NOT_INSTALLED)
    from ptstore_mpi.integrations.vllm import prepare_process

    prepare_process(threads=options.threads)


@contextmanager
def open_vllm(
    store: Store, folder: Path, options: Options, longest_tokens: int
) -> Iterator[Engine]:
    """Run an engine over a store within the block.

    Parameters
    ----------
    store
        This client's.
    folder
        The model.
    options
        Of the run.
    longest_tokens
        Positions that the longest prompt takes, with its answer.
    """
    from ptstore_mpi.integrations.vllm import attach, build_llm, release

    with attach(store):
        llm = build_llm(
            str(folder),
            dtype=options.dtype,
            max_model_len=longest_tokens,
            kv_cache_bytes=options.engine_cache_bytes,
            prefix_caching=True,
            connector=CONNECTOR,
        )
        try:
            yield _VllmEngine(llm, options.output_tokens)
        finally:
            release(llm)


class _VllmEngine:
    def __init__(self, llm: Any, output_tokens: int) -> None:
        self._llm = llm
        self._output_tokens = output_tokens
        self._steps: list[tuple[float, float]] = []  # ends of steps: time, CPU time
        self._note_steps(llm.llm_engine)

    def answer(
        self, prompt: Sequence[int], *, own_cache: bool, load: bool = False, save: bool = False
    ) -> Answer:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=self._output_tokens,
            ignore_eos=True,
            skip_reading_prefix_cache=not own_cache,
            extra_args={"kv_transfer_params": {"ptstore_load": load, "ptstore_save": save}},
        )
        self._steps.clear()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        (output,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        cpu_s = time.process_time() - start_cpu_s
        total_s = time.perf_counter() - start_s
        ttft_s = first_token_s(output)
        known_s = output.metrics.arrival_time + ttft_s
        ends = (cpu for end_s, cpu in self._steps if end_s >= known_s)
        first_cpu_s = next(ends, self._steps[-1][1])  # none: the clock was set
        return Answer(
            prompt_tokens=len(output.prompt_token_ids),
            tokens=tuple(output.outputs[0].token_ids),
            start_s=start_s,
            ttft_s=ttft_s,
            ttft_cpu_s=first_cpu_s - start_cpu_s,
            total_s=total_s,
            cpu_s=cpu_s,
            facts=facts_of(output),
        )

    def settle(self) -> None:
        settle_saves(self._llm)

    def forget(self) -> None:
        self.settle()
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM kept its own cache: some of its blocks are still in use")

    def _note_steps(self, llm_engine: Any) -> None:
        step = llm_engine.step

        def noted() -> Any:
            outputs = step()
            self._steps.append((time.time(), time.process_time()))  # vLLM's own clock is time()
            return outputs

        llm_engine.step = noted
