"""Prefix-GDSF: uses times cost over size, on a clock that ages what is not used.

``H = clock + F * C / S``: `clock` is the H of the last victim, so that what was worth much long
ago is overtaken; `F` uses, each losing half its weight in ``half_life_s``; `C` the seconds lost if
the item were absent; `S` its bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from ptstore_mpi.cache.policies.base import Item, QueueRanking

__all__ = ["GdsfRanking"]


class GdsfRanking(QueueRanking):
    """The leaf of which a byte saves least time goes first.

    Parameters
    ----------
    capacity_bytes
        Size of the pool; not used.
    half_life_s
        Time in which a use loses half its weight, in seconds of the times given with uses. Five
        minutes: on chat traces longer ones are no better, on agent traces they are worse.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, capacity_bytes: int, *, half_life_s: float = 300.0) -> None:
        super().__init__(capacity_bytes)
        self.half_life_s = half_life_s

    def priority(self, item: Item) -> float:
        """Return H as of the last use."""
        return item.stamp + item.uses * item.cost_s / item.nbytes

    def forget(self, item: Item, *, evicted: bool) -> None:
        """Advance the clock to the victim's H."""
        if evicted:
            self.clock = max(self.clock, item.priority)

    def adopt(self, items: Collection[Item]) -> None:
        """Stamp the items as if the clock had been running: one value of a byte per turnover."""
        if not items:
            return
        total_bytes = sum(item.nbytes for item in items)
        self.clock = sum(item.cost_s for item in items) / total_bytes
        last = max(item.order for item in items)
        first = min(item.order for item in items)
        for item in items:
            item.stamp = self.clock * (item.order - first) / max(1, last - first)
