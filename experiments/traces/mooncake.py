"""The traces of Mooncake (FAST'25): lengths and chained ids of blocks of 512 tokens.

Owns the reader of ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``. Equal ids
mean equal prefixes up to there. What was answered is not in the trace: the next prompt of a
conversation has it, under ids of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.common.datasets import DatasetError, read_records
from experiments.traces.stream import Tokens, TraceRequest, count_of, in_order, time_of

UNIT_TOKENS = 512
PATTERN = "mooncake/conversation_trace.jsonl.gz"
LARGEST_ID = 2**32 - 1


class _Sessions:
    """Which requests continue each other; the trace does not say.

    A request continues the latest one all of whose whole blocks it begins with, where the last of
    these was new with that one: a system prompt that all share joins nobody.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._by_last_block: dict[int, int] = {}
        self._count = 0

    def session_of(self, ids: Sequence[int], whole_blocks: int) -> int:
        """Return the session of the next request of the trace."""
        found = (self._by_last_block[i] for i in reversed(ids) if i in self._by_last_block)
        session = next(found, self._count)
        self._count = max(self._count, session + 1)
        if whole_blocks and ids[whole_blocks - 1] not in self._seen:
            self._by_last_block[ids[whole_blocks - 1]] = session
        self._seen.update(ids[:whole_blocks])
        return session


def read(paths: Sequence[Path]) -> list[TraceRequest]:
    """Read the requests of files, by time.

    Raises
    ------
    DatasetError
        A malformed line, by file and number.
    """
    rows = []
    for path in paths:
        for where, row in read_records(path, {"hash_ids": list}):
            prompt_tokens = count_of(where, row, "input_length", least=1)
            units = _units(where, row["hash_ids"], prompt_tokens)
            output_tokens = count_of(where, row, "output_length")
            time_s = time_of(where, row, "timestamp") / 1000
            rows.append(TraceRequest(time_s, 0, units, prompt_tokens, output_tokens))
    sessions = _Sessions()
    return [
        TraceRequest(
            row.time_s,
            sessions.session_of(row.units.tolist(), row.prompt_tokens // UNIT_TOKENS),
            row.units,
            row.prompt_tokens,
            row.output_tokens,
        )
        for row in in_order(rows)
    ]


def _units(where: str, ids: list[object], prompt_tokens: int) -> Tokens:
    expected = -(-prompt_tokens // UNIT_TOKENS)
    if len(ids) != expected:
        raise DatasetError(
            f"{where}: 'hash_ids': expected {expected} ids of {UNIT_TOKENS} tokens for "
            f"'input_length' {prompt_tokens}, found {len(ids)}"
        )
    for place, value in enumerate(ids):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 0 <= value <= LARGEST_ID:  # type: ignore[operator]
            raise DatasetError(
                f"{where}: 'hash_ids'[{place}]: expected a whole number in 0 .. {LARGEST_ID}, "
                f"found {value!r:.80}"
            )
    return np.array(ids, dtype=np.uint32)
