"""What every compared system is: it answers a request with its first token, then settles.

Owns the clock, so that TTFT means the same for all: from the request's arrival to its first token
on the host, everything between included. An engine with a clock of its own says what it measured,
and then times all systems of the run. Never knows what a system does in between.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from experiments.common.workload import Request
from ptstore_mpi import SOURCES


class ConservationError(RuntimeError):
    """The tokens of a request by source do not add up to the tokens asked for."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a system returns: a greedy token, its logits, and how the time was spent.

    Attributes
    ----------
    logits
        None where the engine does not give them away.
    ttft_s
        What the engine's own clock says; None where it has none.
    """

    token: int
    logits: npt.NDArray[np.float32] | None
    match_s: float
    load_s: float
    prefill_s: float
    tokens_by_source: dict[str, int]
    reason: str
    ttft_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Sample:
    """One request answered by one system; the fields but `logits` are columns of the record."""

    request: int
    client: int
    node: int
    batch: int
    document: int
    question: int
    start_s: float
    ttft_s: float
    match_s: float
    load_s: float
    prefill_s: float
    asked_tokens: int
    engine_tokens: int = 0
    owned_tokens: int = 0
    replica_tokens: int = 0
    remote_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    first_token: int
    reason: str
    store_s: float = 0.0
    stored_bytes: int = 0
    store_reason: str = ""
    same_token: int = -1
    max_abs_logit_diff: float = float("nan")
    logits: npt.NDArray[np.float32] | None = field(repr=False)

    def row(self) -> dict[str, Any]:
        """Return the recorded columns."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "logits"}

    def compare(self, reference: Sample) -> None:
        """Set the comparison with the recomputed answer of the same request."""
        self.same_token = int(self.first_token == reference.first_token)
        if self.logits is not None and reference.logits is not None:
            self.max_abs_logit_diff = float(np.max(np.abs(self.logits - reference.logits)))


@dataclass(frozen=True, slots=True)
class Place:
    """Where and when this client answers: recorded with each sample."""

    client: int
    node: int
    batch: int
    run_start_s: float  # of time.perf_counter, when the run began


class System(ABC):
    """One compared system on one client: `open`, `answer` and `settle` in turn, `close`."""

    name: ClassVar[str]

    def settings(self) -> dict[str, Any]:
        """Return the settings of an engine of its own, for the record."""
        return {}

    def open(self) -> None:
        """Get ready to answer."""
        return

    @abstractmethod
    def first_token(self, request: Request) -> FirstToken:
        """Answer with whatever is known of the prompt reused."""

    def keep(self) -> tuple[int, str]:
        """Keep the last prompt's KV for later requests: (bytes newly kept, reason)."""
        return 0, "none"

    @abstractmethod
    def close(self) -> None:
        """Give back what the system holds."""

    def answer(self, request: Request, place: Place) -> Sample:
        """Answer one request and time it.

        Raises
        ------
        ConservationError
            Tokens by source do not add up to the prompt.
        """
        start_s = time.perf_counter()
        first = self.first_token(request)
        waited_s = time.perf_counter() - start_s
        asked = len(request.tokens)
        by_source = {source: first.tokens_by_source.get(source, 0) for source in SOURCES}
        token_columns: dict[str, Any] = {f"{key}_tokens": n for key, n in by_source.items()}
        recomputed = first.tokens_by_source.get("recomputed", asked - sum(by_source.values()))
        _check_conservation(self.name, request, by_source, recomputed)
        return Sample(
            request=request.index,
            client=place.client,
            node=place.node,
            batch=place.batch,
            document=request.document,
            question=request.question,
            start_s=start_s - place.run_start_s,
            ttft_s=waited_s if first.ttft_s is None else first.ttft_s,
            match_s=first.match_s,
            load_s=first.load_s,
            prefill_s=first.prefill_s,
            asked_tokens=asked,
            recomputed_tokens=recomputed,
            first_token=first.token,
            reason=first.reason,
            logits=first.logits,
            **token_columns,
        )

    def settle(self, sample: Sample) -> None:
        """After the first token: keep the KV, and write its time into the sample."""
        start_s = time.perf_counter()
        sample.stored_bytes, sample.store_reason = self.keep()
        sample.store_s = time.perf_counter() - start_s


def _check_conservation(
    system: str, request: Request, by_source: dict[str, int], recomputed: int
) -> None:
    asked = len(request.tokens)
    parts = {**by_source, "recomputed": recomputed}
    if sum(parts.values()) != asked or min(parts.values()) < 0 or recomputed < 1:
        raise ConservationError(
            f"{system}, request {request.index}: expected the tokens by source to add up to the "
            f"{asked} asked for, with at least 1 recomputed; given: {parts}"
        )
