"""Whole prompts of agents at work, as text.

Owns the reader of lines ``agent, session, requests``; a request is ``ts`` (microseconds), ``keep``
and ``add`` (the prompt: so many characters of the prompt on the line before it, then this text)
and ``output``. Requests of a session are listed so that they share much, not by time. Tokens are
made of the text as `stream.text_tokens` does, the answer's too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.datasets import DatasetError, check_text, read_records
from experiments.traces.stream import TraceRequest, count_of, in_order, text_tokens, time_of

PATTERN = "lmcache_agent/*.jsonl.gz"


def read(paths: Sequence[Path]) -> list[TraceRequest]:
    """Read the requests of files, by time; agents of several files begin at the same time.

    Raises
    ------
    DatasetError
        A malformed line, by file and number.
    """
    requests: list[TraceRequest] = []
    session = 0
    for path in paths:
        of_file: list[TraceRequest] = []
        for where, row in read_records(path, {"requests": list}):
            of_file += _read_session(where, row["requests"], session)
            session += 1
        requests += in_order(of_file)
    return in_order(requests)


def _read_session(where: str, rows: list[Any], session: int) -> Iterator[TraceRequest]:
    text = ""
    for place, row in enumerate(rows):
        here = f"{where}: request {place}"
        if not isinstance(row, dict):
            raise DatasetError(f"{here}: expected an object, found {type(row).__name__}")
        keep = count_of(here, row, "keep")
        if keep > len(text):
            raise DatasetError(f"{here}: 'keep': expected at most {len(text)}, found {keep}")
        text = text[:keep] + _text(here, row, "add")
        if not text:
            raise DatasetError(f"{here}: expected a prompt, found an empty text")
        tokens = text_tokens(text)
        output = text_tokens(text + _text(here, row, "output"))[len(tokens) :]
        time_s = time_of(here, row, "ts") / 1e6
        yield TraceRequest(time_s, session, tokens, len(tokens), len(output), output)


def _text(where: str, row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise DatasetError(f"{where}: expected str {name!r}, found {type(value).__name__}")
    check_text(f"{where}: {name!r}", value)
    return value
