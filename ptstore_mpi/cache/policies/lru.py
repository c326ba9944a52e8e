"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

from ptstore_mpi.cache.policies.base import Item, QueueRanking

__all__ = ["LruRanking"]


class LruRanking(QueueRanking):
    """The leaf whose last use is longest ago goes first."""

    name: ClassVar[str] = "lru"

    def priority(self, item: Item) -> float:
        """Return the number of the last use."""
        return float(item.order)
