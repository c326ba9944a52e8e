"""The life of one request with reuse: match, load, prefill, first token, keep.

Owns the order of these events and their times. Never touches MPI; all it knows of the store is
the public API, and of the engine, how to allocate and to prefill.

TTFT runs from the entry of `PrefixReuse.first_token` to the moment the first token is known:

    match -> allocate and load the prefix -> prefill the rest -> first token || keep (store)

A load that would take longer than the prefill that it saves is declined: see
`ptstore_mpi.integrations.fetch_or_recompute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi.errors import LayoutMismatchError
from ptstore_mpi.integrations.fetch_or_recompute import FetchOrRecompute, expected_sources

if TYPE_CHECKING:
    from transformers import DynamicCache

    from ptstore_mpi import KVLayout, LoadResult, Match, Namespace, StoreResult
    from ptstore_mpi.integrations.kv_buffers import KVBuffers
    from ptstore_mpi.integrations.transformers import TransformersEngine

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]

DECLINED = "declined"
"""Reason of an answer whose prefix was known and not loaded, since computing it is faster."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The first token of one request and what it took; times in seconds.

    Attributes
    ----------
    token, logits, kv, cache
        As in `Prefill`.
    token_ids
        The prompt, integer array (prompt_tokens,): a copy, since `keep` names the KV by it.
    ttft_s
        Time to first token: match, load, prefill and what lies between them.
    match_s, load_s, prefill_s
        Its parts; the load includes the allocation of the buffers.
    loaded_tokens
        Length of the verified prefix that was not computed.
    by_source
        These tokens by source, as `LoadResult.by_source`.
    reason
        Why no more was reused: the load's reason if it fell short of the match, else the match's;
        ``declined`` where the load was expected to take longer than it saves.
    """

    token: int
    logits: npt.NDArray[np.float32]
    kv: KVBuffers
    cache: DynamicCache
    token_ids: npt.NDArray[np.integer[Any]]
    ttft_s: float
    match_s: float
    load_s: float
    prefill_s: float
    loaded_tokens: int
    by_source: dict[str, int]
    reason: str

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.token_ids.size)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that came from no source and were computed."""
        return self.prompt_tokens - self.loaded_tokens


class PrefixReuse:
    """The life of a request in a serving loop: first token with reuse, then keep its KV.

    Parameters
    ----------
    engine
        Computes what the store does not have.
    namespace
        Where its KV is kept, usually `engine.namespace(store)`.
    fetch
        Decides what is loaded; `FetchOrRecompute(is_on=False)` always loads. Default: one that
        is on. Loads differ with it from run to run, outputs do not.

    Raises
    ------
    LayoutMismatchError
        The namespace is one of another layout.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        namespace: Namespace,
        *,
        fetch: FetchOrRecompute | None = None,
    ) -> None:
        if namespace.layout != engine.layout:
            raise LayoutMismatchError(
                f"expected a namespace of the engine's layout ({_brief(engine.layout)}), "
                f"got one of {_brief(namespace.layout)}"
            )
        self.engine = engine
        self.namespace = namespace
        self.fetch = FetchOrRecompute() if fetch is None else fetch

    def first_token(self, token_ids: TokenIds) -> Answer:
        """Answer a prompt with its first token, reusing the longest prefix that the store has.

        Raises
        ------
        TypeError, ValueError
            `token_ids` is not a non-empty sequence of integers of the model's vocabulary.
        """
        start = perf_counter()
        tokens = np.array(token_ids)
        hit = self._worth_loading(self.namespace.match(tokens))
        matched = perf_counter()
        kv = self.engine.allocate(tokens.size)
        got = self.namespace.load(hit, kv.views(self.engine.layout.block_tokens))
        loaded = perf_counter()
        result = self.engine.prefill(tokens, kv, cached_tokens=got.tokens)
        known = perf_counter()
        self._note(hit, got, known - loaded)
        return Answer(
            token=result.token,
            logits=result.logits,
            kv=kv,
            cache=result.cache,
            token_ids=tokens,
            ttft_s=known - start,
            match_s=matched - start,
            load_s=loaded - matched,
            prefill_s=known - loaded,
            loaded_tokens=got.tokens,
            by_source=dict(got.by_source),
            reason=got.reason if got.tokens < hit.tokens else hit.reason,
        )

    def keep(self, answer: Answer) -> StoreResult:
        """Store what the answer computed beyond the loaded prefix; call it after the answer.

        Raises
        ------
        CapacityError
            The increment is larger than an arena of the store.
        """
        views = answer.kv.views(self.engine.layout.block_tokens)
        # A declined prefix is not suspect: it is built upon, as one that was loaded.
        verified = None if answer.reason == DECLINED else answer.loaded_tokens
        return self.namespace.store(answer.token_ids, views, verified_tokens=verified)

    def _worth_loading(self, found: Match) -> Match:
        """Return what was found, or nothing of it where the load is declined."""
        verdict = self.fetch.judge(
            prompt_tokens=found.prompt_tokens,
            have_tokens=0,
            found_tokens=found.tokens,
            expected=self._expected(found),
        )
        if verdict.fetch or not found.tokens:
            return found
        return replace(found, tokens=0, reason=DECLINED, segments=())

    def _expected(self, hit: Match) -> dict[str, int]:
        near = self.namespace.near_servers
        return expected_sources(hit, near, self.engine.layout.block_tokens)

    def _note(self, hit: Match, got: LoadResult, prefill_s: float) -> None:
        """Tell both cost models what this request took; `hit` is what was to be loaded."""
        computed = hit.prompt_tokens - got.tokens
        self.namespace.note_prefill(computed, prefill_s)
        self.fetch.note_prefill(computed, prefill_s, cached_tokens=got.tokens)
        if got.tokens:
            self.fetch.note_load(got.by_source, got.seconds)
        elif got.reason == "late":
            self.fetch.note_load(self._expected(hit), got.seconds)


def _brief(layout: KVLayout) -> str:
    return (
        f"{len(layout.tensors)} tensors, blocks of {layout.block_tokens} tokens and "
        f"{layout.block_bytes} bytes"
    )
