"""Requests as the scheduler's side of the connector follows them. Values; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi import SOURCES, LoadResult, Match, Namespace
from ptstore_mpi.integrations.vllm.store_thread import Task

__all__ = ["Decision", "Tracked", "facts_of", "has_tokens", "preemptions_of", "refusal_of"]


@dataclass(slots=True, eq=False)
class Decision:
    """What a request was told, for as much as vLLM had then.

    Attributes
    ----------
    have_tokens, external_tokens
        Leading tokens that vLLM had, and how many beyond them were claimed.
    match
        What is to be loaded, of the whole prefix.
    reason
        Why no more.
    """

    have_tokens: int
    external_tokens: int
    match: Match
    reason: str


@dataclass(slots=True, eq=False)
class Tracked:
    """A request of the engine, from its first question to its end or preemption.

    Attributes
    ----------
    request
        vLLM's.
    namespace
        Where its KV belongs; None where its prompt is no tokens.
    saves
        Whether it is saved.
    refusal
        Why it takes nothing from the store; empty: it may.
    preemptions
        How often it was preempted when it was asked about; None: vLLM does not say.
    tokens
        All its tokens then.
    match_task, host_task, host, host_skip_tokens
        Match, and load into host memory, under way or done.
    found
        What the match came to.
    short_tokens
        Where a load into host memory ended short of its match.
    worth
        Tokens that vLLM had, and those of the match that are worth loading then.
    decision
        What vLLM was told last.
    block_ids
        Its blocks.
    is_counted, is_prompt_planned
        Whether its tokens were counted, and its prompt's save was planned.
    facts
        What is told of it at its end.
    """

    request: Any
    namespace: Namespace | None
    saves: bool
    refusal: str
    preemptions: int | None
    tokens: npt.NDArray[np.uint32]
    match_task: Task[Match] | None = None
    host_task: Task[LoadResult] | None = None
    host: list[Any] | None = None
    host_skip_tokens: int = 0
    found: Match | None = None
    short_tokens: int | None = None
    worth: tuple[int, int] | None = None
    decision: Decision | None = None
    block_ids: list[int] = field(default_factory=list)
    is_counted: bool = False
    is_prompt_planned: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Any, namespace: Namespace | None) -> Tracked:
        """Return a request of vLLM as it is now, with its own wishes."""
        given = request.kv_transfer_params
        wishes = given if isinstance(given, Mapping) else {}
        refusal = refusal_of(request)
        if not refusal and not wishes.get("ptstore_load", True):
            refusal = "not_wanted"
        if namespace is None:
            refusal = "embeddings"
        return cls(
            request,
            namespace,
            saves=namespace is not None and bool(wishes.get("ptstore_save", True)),
            refusal=refusal,
            preemptions=preemptions_of(request),
            tokens=np.array([0] if namespace is None else list(request.all_token_ids), np.uint32),
        )

    @property
    def name(self) -> str:
        """Name of the request."""
        return str(self.request.request_id)

    @property
    def was_preempted(self) -> bool:
        """Whether it was preempted since: its blocks are others'."""
        count = preemptions_of(self.request)
        if count is None:  # vLLM 0.11
            return bool(self.block_ids) and self.request.status.name == "PREEMPTED"
        return count != self.preemptions


def preemptions_of(request: Any) -> int | None:
    """Return how often a request was preempted; None where vLLM does not say."""
    count: int | None = getattr(request, "num_preemptions", None)
    return count


def has_tokens(request: Any) -> bool:
    """Tell whether a prompt is tokens, and nothing else that tokens do not say."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def refusal_of(request: Any) -> str:
    """Say why a request takes nothing from the store; empty: it may."""
    sampling = request.sampling_params
    if sampling is None:
        return "pooling"  # wants the hidden state of every token
    if sampling.prompt_logprobs is not None:
        return "prompt_logprobs"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "skip_reading"
    return ""


def facts_of(by_source: Mapping[str, int], asked: int) -> dict[str, Any]:
    """Return tokens by source as vLLM hands them to who asked."""
    facts: dict[str, Any] = {f"{name}_tokens": by_source.get(name, 0) for name in SOURCES}
    facts["recomputed_tokens"] = asked - sum(by_source.values())
    return facts
