"""Counters of one client: hits by source, bytes by path, seconds, reasons.

The conservation law holds per request and in total: the tokens of `SOURCES` and ``recomputed``
add up to the tokens asked for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ptstore_mpi.types import SOURCES, LoadResult, Match, StoreResult

__all__ = ["ClientStats"]


class ClientStats:
    """What this client's operations added up to."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._calls: Counter[str] = Counter()
        self._reasons: dict[str, Counter[str]] = {
            name: Counter() for name in ("match", "load", "store")
        }

    def add_match(self, match: Match) -> None:
        """Count a match. Its tokens count only when it is loaded."""
        self._add("match", match.reason, match.seconds)

    def add_load(self, match: Match, result: LoadResult) -> None:
        """Count a load: its request's tokens by source, the rest as recomputed."""
        self._add("load", result.reason, result.seconds)
        self._tokens["asked"] += match.prompt_tokens
        self._tokens.update(result.by_source)
        self._tokens["recomputed"] += match.prompt_tokens - sum(result.by_source.values())

    def add_store(self, result: StoreResult) -> None:
        """Count a store."""
        self._add("store", result.reason, result.seconds)
        self._tokens["stored"] += result.tokens

    def as_dict(self, byte_counters: dict[str, int]) -> dict[str, Any]:
        """Return everything as plain nested dictionaries."""
        return {
            "tokens": {
                name: self._tokens[name] for name in ("asked", *SOURCES, "recomputed", "stored")
            },
            "bytes": dict(byte_counters),
            "seconds": {name: self._seconds.get(name, 0.0) for name in self._reasons},
            "calls": {name: self._calls[name] for name in self._reasons},
            "reasons": {name: dict(counts) for name, counts in self._reasons.items()},
        }

    def _add(self, operation: str, reason: str, seconds: float) -> None:
        self._calls[operation] += 1
        self._reasons[operation][reason] += 1
        self._seconds[operation] = self._seconds.get(operation, 0.0) + seconds
