"""vLLM as the driver sees it: prompts answered at once, and what is saved of them.

Owns the clocks of a batch. CPU time is that of the process, all threads: the engine, the connector
and the client's half of the store, without the server. What is saved in the background goes on
after the last answer; its end is a second reading of both clocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from experiments.common.vllm_answers import facts_of, first_token_s, settle_saves
from experiments.vllm_overhead.options import Options
from experiments.vllm_overhead.tables import CONNECTOR
from ptstore_mpi import SOURCES

if TYPE_CHECKING:
    from ptstore_mpi import Store

__all__ = ["SETTINGS", "Answer", "Answered", "Engine", "open_vllm", "saved_of"]

SETTINGS: dict[str, Any] = {}  # of the connector: all as by default
Save = tuple[str, int, str, float]
"""Request, bytes, reason and seconds, as `Attachment.take_saves` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request came to.

    Attributes
    ----------
    facts
        Its tokens by source, `match_s`, and what became of looking it up and of saving it, by the
        names of the columns.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    ttft_s: float
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What one batch came to.

    Attributes
    ----------
    start_s
        When it was submitted, by `time.perf_counter`.
    wall_s, cpu_s
        To the last token of the last answer.
    settled_s, settled_cpu_s
        To the end of the last save.
    """

    answers: tuple[Answer, ...]
    start_s: float
    wall_s: float
    cpu_s: float
    settled_s: float
    settled_cpu_s: float


class Engine(Protocol):
    """What the driver needs of an engine."""

    def answer(self, prompts: Sequence[Sequence[int]]) -> Answered:
        """Answer prompts, all submitted at once, and return when everything is saved."""


@contextmanager
def open_vllm(
    store: Store, folder: Path, options: Options, longest_tokens: int, system: str
) -> Iterator[Engine]:
    """Run the engine of a system within the block.

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
    system
        With the connector, or without.
    """
    from ptstore_mpi.integrations.vllm import attach, build_llm, release

    with ExitStack() as stack:
        attachment = stack.enter_context(attach(store)) if system == CONNECTOR else None
        llm = build_llm(
            str(folder),
            dtype=options.dtype,
            max_model_len=longest_tokens,
            kv_cache_bytes=options.engine_cache_bytes,
            prefix_caching=True,
            connector=None if attachment is None else SETTINGS,
        )
        stack.callback(release, llm)
        yield _VllmEngine(llm, attachment, options.output_tokens)


class _VllmEngine:
    def __init__(self, llm: Any, attachment: Any, output_tokens: int) -> None:
        self._llm = llm
        self._attachment = attachment
        self._output_tokens = output_tokens

    def answer(self, prompts: Sequence[Sequence[int]]) -> Answered:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=self._output_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        settle_saves(self._llm)
        settled_s = time.perf_counter() - start_s
        settled_cpu_s = time.process_time() - start_cpu_s
        saves = [] if self._attachment is None else self._attachment.take_saves()
        return Answered(
            answers=tuple(self._read(output, saves) for output in outputs),
            start_s=start_s,
            wall_s=wall_s,
            cpu_s=cpu_s,
            settled_s=settled_s,
            settled_cpu_s=settled_cpu_s,
        )

    def _read(self, output: Any, saves: Sequence[Save]) -> Answer:
        facts = _own_facts(output) if self._attachment is None else _told_facts(output)
        return Answer(
            prompt_tokens=len(output.prompt_token_ids),
            tokens=tuple(output.outputs[0].token_ids),
            ttft_s=first_token_s(output),
            facts=facts | saved_of(output.request_id, saves),
        )


def saved_of(request_id: str, saves: Sequence[Save]) -> dict[str, Any]:
    """Return what became of saving a request; within vLLM its name has a random part at the end."""
    own = [save for save in saves if save[0] == request_id or save[0].startswith(f"{request_id}-")]
    reasons = dict.fromkeys(reason for _, _, reason, _ in own)
    return {
        "stored_bytes": sum(stored_bytes for _, stored_bytes, _, _ in own),
        "store_reason": "+".join(reasons) or "none",
    }


def _own_facts(output: Any) -> dict[str, Any]:
    cached = output.num_cached_tokens or 0
    tokens = {f"{name}_tokens": 0 for name in SOURCES} | {"engine_tokens": cached}
    recomputed = len(output.prompt_token_ids) - cached
    return {**tokens, "recomputed_tokens": recomputed, "match_s": 0.0, "reason": "none"}


def _told_facts(output: Any) -> dict[str, Any]:
    facts = facts_of(output)
    del facts["load_s"]  # nothing recurs: nothing is loaded
    return facts
