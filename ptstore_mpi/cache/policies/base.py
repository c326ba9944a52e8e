"""What the policies share: items, and what a ranking of leaves must answer.

Owns no tree: `EvictionPolicy` keeps it and tells a ranking which items are leaves. A ranking
never sees bytes, a clock or a lease.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from ptstore_mpi import _native

__all__ = ["Item", "QueueRanking", "Ranking"]

LOWEST = -math.inf


@dataclass(slots=True, eq=False)
class Item:
    """One segment or block in a pool.

    Attributes
    ----------
    key
        Its 64-bit name in this pool.
    content
        64 bits that name what it holds, however often it comes and goes.
    nbytes
        Room it takes, in bytes.
    cost_s
        Expected seconds lost if it were absent.
    parent
        The item it continues, in the same pool; None where that is elsewhere or nothing.
    path_bytes, path_cost_s
        The same sums over this item and all its ancestors here.
    child_count, pin_count
        Items that continue it here; reasons why it must stay though it is a leaf.
    uses
        Uses that ended here, and those of children that have gone; see `EvictionPolicy`. A share
        of ``2 ** (-age_s / half_life_s)`` of each is left, at ``used_s``.
    used_s
        Time of ``uses``, in seconds.
    order
        Number of its last use among all uses of the pool.
    stamp
        What the ranking's clock said then.
    priority
        Worth, as its ranking saw it when it was last enlisted. Lowest goes first.
    floor
        Largest worth of the children that have gone: it is never worth less.
    """

    key: int
    content: int
    nbytes: int
    cost_s: float
    parent: Item | None
    path_bytes: int
    path_cost_s: float
    child_count: int = 0
    pin_count: int = 0
    uses: float = 0.0
    used_s: float = 0.0
    order: int = 0
    stamp: float = 0.0
    priority: float = LOWEST
    floor: float = LOWEST


class Ranking(abc.ABC):
    """Order in which the leaves of a pool go.

    Parameters
    ----------
    capacity_bytes
        Size of the pool, for rankings that divide it.

    Attributes
    ----------
    name
        Its name in settings and counters.
    half_life_s
        Time in which a use loses half its weight; infinite where uses are plain counts.
    clock
        What `Item.stamp` takes at each use.
    """

    name: ClassVar[str]
    half_life_s: float = math.inf
    clock: float = 0.0

    def __init__(self, capacity_bytes: int) -> None:
        self.resize(capacity_bytes)

    # Most rankings need none of these five.

    def resize(self, capacity_bytes: int) -> None:  # noqa: B027
        """Take note of another size of the pool, in bytes."""

    def adopt(self, items: Collection[Item]) -> None:  # noqa: B027
        """Begin with the items another ranking has kept, parents first; none is enlisted yet."""

    def admit(self, item: Item) -> None:  # noqa: B027
        """Take note of a new item, before it is enlisted."""

    def use(self, item: Item, *, alone: bool) -> None:  # noqa: B027
        """Take note of a use, and of that of all ancestors unless ``alone``."""

    def forget(self, item: Item, *, evicted: bool) -> None:  # noqa: B027
        """Take note that an item has left, after it was delisted."""

    @abc.abstractmethod
    def enlist(self, item: Item) -> None:
        """Rank a leaf, or rank it anew after a use."""

    @abc.abstractmethod
    def delist(self, item: Item) -> None:
        """Take out an item that is not a leaf any more, or that leaves."""

    @abc.abstractmethod
    def set_eligible(self, item: Item, eligible: bool) -> None:
        """Let an enlisted leaf be the lowest, or not."""

    @abc.abstractmethod
    def lowest(self) -> int | None:
        """Return the key of the eligible leaf that goes first; the same until something changes."""


class QueueRanking(Ranking):
    """A ranking by one number per item; of equals, the one longest unused goes first."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._queue = _native.EvictionQueue()

    @abc.abstractmethod
    def priority(self, item: Item) -> float:
        """Return what a leaf is worth, from its uses, order, stamp, cost and size."""

    def enlist(self, item: Item) -> None:
        """Rank a leaf, or rank it anew after a use."""
        item.priority = max(item.floor, self.priority(item))
        self._queue.set(item.key, item.priority, item.order)

    def delist(self, item: Item) -> None:
        """Take out an item that is not a leaf any more, or that leaves."""
        self._queue.remove(item.key)

    def set_eligible(self, item: Item, eligible: bool) -> None:
        """Let an enlisted leaf be the lowest, or not."""
        self._queue.set_eligible(item.key, eligible)

    def lowest(self) -> int | None:
        """Return the key of the eligible leaf that goes first."""
        found = self._queue.lowest()
        return None if found is None else found[0]
