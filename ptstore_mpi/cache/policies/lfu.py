"""Least frequently used, with plain counts.

Counts do not decay: this is the baseline that comparisons mean, and it tells ``adaptive`` when
popularity is stable. What ages is `GdsfRanking`: with equal sizes and costs it is this very count
with dynamic ageing.
"""

from __future__ import annotations

from typing import ClassVar

from ptstore_mpi.cache.policies.base import Item, QueueRanking

__all__ = ["LfuRanking"]


class LfuRanking(QueueRanking):
    """The leaf with the fewest uses since it came goes first."""

    name: ClassVar[str] = "lfu"

    def priority(self, item: Item) -> float:
        """Return the count of uses."""
        return item.uses
