"""Counters of the connector as vLLM's own statistics add them up and log them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

__all__ = ["PTStoreStats"]


class PTStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Sums by name; every one of them is a count."""

    def reset(self) -> None:
        """Begin again."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: Any) -> PTStoreStats:
        """Add another's counts to these."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts of an interval, and the share of tokens that were not computed."""
        asked = self.data.get("asked_tokens", 0)
        reused = asked - self.data.get("recomputed_tokens", 0)
        return {**self.data, "reused_share": round(reused / asked, 4) if asked else 0.0}

    def is_empty(self) -> bool:
        """Tell whether nothing was counted."""
        return not self.data
