"""Real conversations of a coding assistant, as runs of block ids.

Owns the reader of lines ``id, block_size, tool_tokens, system_tokens, requests``; a request is
``t`` (s since its conversation began), ``in`` and ``out`` (tokens), ``keep`` and ``add``: its ids
are the first ``keep`` of the request before it, then runs [start, count, ...]. ``sub`` nests the
requests of a sub-agent, with tools and system prompt of its own. Ids are local to a conversation,
but for the first (tools + system) / block_size of them, which conversations with the same pair
share; where a sub-agent begins with blocks its conversation has had, they stay what they were.

When conversations began is not in the trace: they begin evenly spread over an hour, by the seed.
What does not fill a block differs from everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.common.datasets import DatasetError, read_records
from experiments.traces.stream import (
    MOST_TOKENS,
    Tokens,
    TraceRequest,
    count_of,
    in_order,
    time_of,
)

PATTERN = "claude_code_kv/*.jsonl.gz"
STARTS_WITHIN_S = 3600.0
STARTS = 21  # stream of the seed
LARGEST_LOCAL_ID = 10_000_000
DEEPEST_NESTING = 8

_Ids = npt.NDArray[np.int64]
_UNKNOWN = -1


class _Units:
    """Hands out the units of the whole trace; those of shared beginnings once for each pair."""

    def __init__(self) -> None:
        self._next = 0
        self._shared: dict[tuple[int, int], _Ids] = {}

    def fresh(self, count: int) -> _Ids:
        """Return units that nobody has."""
        self._next += count
        if self._next > 2**32:
            raise DatasetError("claude_code: expected at most 2**32 blocks in the trace")
        return np.arange(self._next - count, self._next)

    def shared(self, pair: tuple[int, int], count: int) -> _Ids:
        """Return the units of the beginning that belongs to (tools, system) of so many tokens."""
        if pair not in self._shared:
            self._shared[pair] = self.fresh(count)
        return self._shared[pair]


class _Conversation:
    """Units of one conversation by its local ids."""

    def __init__(self, units: _Units) -> None:
        self._units = units
        self._by_local: _Ids = np.full(1024, _UNKNOWN, dtype=np.int64)

    def units_of(self, local: _Ids, shared: _Ids) -> _Ids:
        """Return the units of a whole prompt; the first may be those that others share."""
        top = int(local.max(initial=0)) + 1
        if top > len(self._by_local):
            grown = np.full(2 * top, _UNKNOWN, dtype=np.int64)
            grown[: len(self._by_local)] = self._by_local
            self._by_local = grown
        new = np.flatnonzero(self._by_local[local] == _UNKNOWN)
        front = new[new < len(shared)]
        self._by_local[local[front]] = shared[front]
        rest = new[len(front) :]
        self._by_local[local[rest]] = self._units.fresh(len(rest))
        return self._by_local[local]


def read(paths: Sequence[Path], seed: int) -> tuple[list[TraceRequest], int]:
    """Read the requests of files by time, and the tokens of a unit.

    Raises
    ------
    DatasetError
        A malformed line, by file and number.
    """
    random = np.random.default_rng([seed, STARTS])
    units, requests = _Units(), []
    session, unit_tokens = 0, 0
    for path in paths:
        for where, row in read_records(path, {"requests": list}):
            size = count_of(where, row, "block_size", least=1)
            if unit_tokens not in (0, size):
                raise DatasetError(
                    f"{where}: 'block_size': expected {unit_tokens} as before, found {size}"
                )
            unit_tokens = size
            start_s = float(random.uniform(0, STARTS_WITHIN_S))
            reader = _Reader(units, _Conversation(units), unit_tokens, session)
            requests += reader.read(where, row, start_s)
            session = reader.next_session
    return in_order(requests), max(unit_tokens, 1)


class _Reader:
    """Reads one conversation with its sub-agents; each of these is a session."""

    def __init__(
        self, units: _Units, conversation: _Conversation, unit_tokens: int, session: int
    ) -> None:
        self._units = units
        self._conversation = conversation
        self._unit_tokens = unit_tokens
        self.next_session = session

    def read(
        self, where: str, row: Mapping[str, Any], start_s: float, depth: int = 0
    ) -> Iterator[TraceRequest]:
        """Yield the requests of a conversation, or of a sub-agent."""
        if depth > DEEPEST_NESTING:
            raise DatasetError(f"{where}: expected at most {DEEPEST_NESTING} nested sub-agents")
        session = self.next_session
        self.next_session += 1
        pair = (count_of(where, row, "tool_tokens"), count_of(where, row, "system_tokens"))
        shared = self._units.shared(pair, sum(pair) // self._unit_tokens)
        local: _Ids = np.empty(0, dtype=np.int64)
        for place, each in enumerate(row["requests" if not depth else "sub"]):
            here = f"{where}: request {place}"
            if not isinstance(each, dict):
                raise DatasetError(f"{here}: expected an object, found {type(each).__name__}")
            time_s = start_s + time_of(here, each, "t")
            if "sub" in each:
                if not isinstance(each["sub"], list):
                    raise DatasetError(
                        f"{here}: expected list 'sub', found {type(each['sub']).__name__}"
                    )
                yield from self.read(here, each, time_s, depth + 1)
                continue
            local = _local_ids(here, each, local)
            units = self._conversation.units_of(local, shared)
            yield self._request(here, each, units, time_s, session)

    def _request(
        self, where: str, row: Mapping[str, Any], units: _Ids, time_s: float, session: int
    ) -> TraceRequest:
        prompt_tokens = count_of(where, row, "in", least=1)
        whole, rest = divmod(prompt_tokens, self._unit_tokens)
        if whole != len(units):
            raise DatasetError(
                f"{where}: expected {whole} blocks of {self._unit_tokens} tokens for 'in' "
                f"{prompt_tokens}, found {len(units)}"
            )
        if rest:
            units = np.append(units, self._units.fresh(1))
        output_tokens = count_of(where, row, "out")
        units32: Tokens = units.astype(np.uint32)
        return TraceRequest(time_s, session, units32, prompt_tokens, output_tokens)


def _local_ids(where: str, row: Mapping[str, Any], before: _Ids) -> _Ids:
    keep = count_of(where, row, "keep")
    if keep > len(before):
        raise DatasetError(f"{where}: 'keep': expected at most {len(before)}, found {keep}")
    runs = row.get("add")
    if not isinstance(runs, list) or len(runs) % 2:
        raise DatasetError(f"{where}: 'add': expected pairs of start and count, found {runs!r:.80}")
    parts = [before[:keep]]
    for start, count in zip(runs[::2], runs[1::2], strict=True):
        pair = {"start": start, "count": count}
        first = count_of(f"{where}: 'add'", pair, "start")
        end = first + count_of(f"{where}: 'add'", pair, "count")
        if end > LARGEST_LOCAL_ID:
            raise DatasetError(
                f"{where}: 'add': expected ids below {LARGEST_LOCAL_ID}, found {end - 1}"
            )
        parts.append(np.arange(first, end))
        if sum(map(len, parts)) > MOST_TOKENS:
            raise DatasetError(f"{where}: 'add': expected at most {MOST_TOKENS} blocks")
    return np.concatenate(parts)
