"""One stream of requests, whatever the trace: times, sessions, prompts as token ids.

Owns the form of a request and how tokens are made where a trace has none. Never reads a file.

Where a trace names *units* (blocks of its own) instead of tokens, token ``j`` of unit ``u`` is
``u * odd + j`` modulo 2**32. Multiplying by an odd number is one to one there, so two units differ
in every token, equal ones in none: hashing and matching are real, and nothing else of a token
matters to them. Where a trace has text and no tokenizer, a token is four characters that stand
side by side: texts that share a beginning share its tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.common.datasets import DatasetError

Tokens = npt.NDArray[np.uint32]

MOST_TOKENS = 10_000_000  # of a prompt or an answer: a slip of a trace, not a request
MOST_TIME = 1e18  # in whatever unit a trace counts
_UNIT_FACTOR = np.uint32(0x9E3779B1)  # odd
_CHARACTERS = np.array([0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1], dtype=np.uint32)  # odd

_NOTHING: Tokens = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request.

    Attributes
    ----------
    time_s
        Arrival, s since the trace began.
    session
        What `affinity` keeps together: a conversation, a document; numbered from 0.
    units
        Units of the prompt: uint32, shape (units,); tokens where ``unit_tokens`` is 1.
    prompt_tokens, output_tokens
        How many there are.
    output
        Token ids of the answer, uint32; empty where the trace does not say what was answered.
    """

    time_s: float
    session: int
    units: Tokens
    prompt_tokens: int
    output_tokens: int
    output: Tokens = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """All requests, in the order of their times.

    Attributes
    ----------
    name
        Key of `experiments.traces.TRACES`.
    unit_tokens
        Tokens of a unit.
    block_tokens
        Tokens of a block of the store that fits this trace.
    requests
        The requests.
    """

    name: str
    unit_tokens: int
    block_tokens: int
    requests: Sequence[TraceRequest]

    def prompt(self, request: TraceRequest) -> Tokens:
        """Return the token ids of a prompt: uint32, shape (prompt_tokens,)."""
        if self.unit_tokens == 1:
            return request.units
        inside = np.arange(self.unit_tokens, dtype=np.uint32)
        tokens = (request.units * _UNIT_FACTOR)[:, None] + inside
        return tokens.ravel()[: request.prompt_tokens]

    def kept(self, request: TraceRequest) -> Tokens:
        """Return what is stored after a request: its prompt, and the answer where it is known."""
        if not request.output.size:
            return self.prompt(request)
        return np.concatenate([self.prompt(request), request.output])

    def first(self, count: int) -> Trace:
        """Return the trace of the first requests only; 0: all of them."""
        return replace(self, requests=self.requests[:count]) if count else self

    def digest(self) -> str:
        """Return a hash of all requests, equal on every rank and machine."""
        state = hashlib.sha256(f"{self.unit_tokens}".encode())
        for request in self.requests:
            state.update(
                f"{request.time_s:.6f} {request.session} {request.prompt_tokens} ".encode()
            )
            state.update(request.units.astype("<u4").tobytes())
            state.update(request.output.astype("<u4").tobytes())
        return state.hexdigest()


def in_order(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return requests by time, those of one time as they were, the first at 0 s."""
    ordered = sorted(requests, key=lambda request: request.time_s)
    if not ordered:
        return []
    start_s = ordered[0].time_s
    return [replace(request, time_s=request.time_s - start_s) for request in ordered]


def text_tokens(text: str) -> Tokens:
    """Return the whole tokens of a text, at least one: what fills none belongs to what follows."""
    width = len(_CHARACTERS)
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(np.uint32)
    codes = np.pad(codes, (0, max(width - len(codes), 0)))[: max(len(codes) // width, 1) * width]
    words = codes.reshape(-1, width) * _CHARACTERS
    return np.bitwise_xor.reduce(words ^ (words >> np.uint32(15)), axis=1)


def count_of(where: str, row: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    """Return a whole number of a row in ``least .. MOST_TOKENS``; raise DatasetError without."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKENS:
        raise DatasetError(
            f"{where}: {name!r}: expected a whole number in {least} .. {MOST_TOKENS}, "
            f"found {value!r:.80}"
        )
    return value


def time_of(where: str, row: Mapping[str, Any], name: str) -> float:
    """Return a time of a row, 0 or more; raise DatasetError where there is none."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_TIME:
        raise DatasetError(f"{where}: {name!r}: expected a time of 0 or more, found {value!r:.80}")
    return float(value)
