"""An eviction policy: the tree of what a pool holds, and which of its leaves goes first.

Owns the items and their links, pins and uses; a `Ranking` orders the leaves. It never moves a
byte and never looks at a clock. Invariants:

- the victim is a leaf that nothing pins, so that contents stay closed under prefixes;
- an item is never worth less than an item that continues it, or did before it went;
- what is pinned, or has children, is not ranked and costs nothing to find.

A use of an item is a use of all its ancestors, yet it is noted in one place: where it ended.
Nobody compares an item before its last child has gone, and then the child hands on its uses, its
last use and its worth. So a use costs O(log n), however long the prefix::

    uses that ended here     root 1     after c has gone   root 1     as if all had been counted:
                              |-- a 2                       |-- a 2    root 1 + 2 + 0 + 3
                              '-- b 0                       '-- b 3    a    2
                                  '-- c 3                              b    3

A new child has been counted once with its parent, by whoever used that: the parent counts one
less, and gets it back when the child goes.
"""

from __future__ import annotations

from ptstore_mpi.cache.policies.base import LOWEST, Item, Ranking

__all__ = ["EvictionPolicy"]


class EvictionPolicy:
    """Which item of one pool is worth least.

    A caller reports, in this order for one request: the *deepest* item here that it used (`hit`;
    one per run of items that continue each other here), then what it adds, parents first.

    Parameters
    ----------
    ranking
        Order of the leaves.
    """

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._items: dict[int, Item] = {}
        self._use_count = 0
        self.nbytes = 0

    @property
    def name(self) -> str:
        """Name of the policy, as in the settings."""
        return self._ranking.name

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: int) -> bool:
        return key in self._items

    def add(
        self,
        key: int,
        nbytes: int,
        *,
        cost_s: float,
        parent: int | None = None,
        content: int | None = None,
        now: float = 0.0,
    ) -> None:
        """Take in a new item; its coming is its first use.

        Parameters
        ----------
        key
            Its name, 64 bits, not in the pool.
        nbytes
            Room it takes, in bytes.
        cost_s
            Expected seconds lost if it were absent.
        parent
            The item it continues, if that is in this pool.
        content
            64 bits that name what it holds, the same whenever it comes again, if ``key`` is not
            such a name. Two items may hold the same.
        now
            Any time in seconds that does not fall; only differences matter.
        """
        assert key not in self._items, f"item {key} is in the pool already"
        above = None if parent is None else self._items[parent]
        path_bytes, path_cost_s = nbytes, cost_s
        if above is not None:
            path_bytes += above.path_bytes
            path_cost_s += above.path_cost_s
        content = key if content is None else content
        item = Item(key, content, nbytes, cost_s, above, path_bytes, path_cost_s)
        self._items[key] = item
        self.nbytes += nbytes
        self._count(item, 1.0, now)
        if above is not None:
            self._count(above, -1.0, now, is_use=False)
            above.child_count += 1
            if above.child_count == 1:
                self._ranking.delist(above)
        self._ranking.admit(item)
        self._ranking.enlist(item)

    def hit(self, key: int, now: float = 0.0, *, alone: bool = False) -> None:
        """Note that a request used an item, and through it all its ancestors.

        Parameters
        ----------
        key
            The deepest item that was used.
        now
            Time in seconds, as for `add`.
        alone
            Whether the ancestors were reported before, for the same request.
        """
        item = self._items[key]
        self._count(item, 1.0, now)
        if alone and item.parent is not None:
            self._count(item.parent, -1.0, now, is_use=False)
        self._ranking.use(item, alone=alone)
        if not item.child_count:
            self._ranking.enlist(item)

    def pin(self, key: int) -> None:
        """Keep an item from being the victim, until as many `unpin`: a lease, a move, a link.

        One pin on the deepest item of a prefix keeps all of it. A child on another server is a
        link that pins its parent in the lowest tier, where eviction would drop it.
        """
        item = self._items[key]
        item.pin_count += 1
        if item.pin_count == 1 and not item.child_count:
            self._ranking.set_eligible(item, False)

    def unpin(self, key: int) -> None:
        """End one `pin`."""
        item = self._items[key]
        assert item.pin_count, f"item {key} is not pinned"
        item.pin_count -= 1
        if not item.pin_count and not item.child_count:
            self._ranking.set_eligible(item, True)

    def is_pinned(self, key: int) -> bool:
        """Tell whether anything keeps an item from being the victim, but for its children."""
        return self._items[key].pin_count > 0

    def last_use(self, key: int) -> int:
        """Return the number of an item's last use among all uses of the pool."""
        return self._items[key].order

    def victim(self) -> int | None:
        """Return the key of the leaf worth least that nothing pins; None: there is none."""
        return self._ranking.lowest()

    def evict(self, key: int) -> None:
        """Forget an item that has gone to make room; it must be a leaf."""
        self._leave(key, evicted=True)

    def remove(self, key: int) -> None:
        """Forget an item that has gone for another reason (cleared, lost); it must be a leaf."""
        self._leave(key, evicted=False)

    def counters(self) -> dict[str, float | str]:
        """Return what decides, by name."""
        return {"policy": self.name}

    def resize(self, capacity_bytes: int) -> None:
        """Take note of another size of the pool, in bytes; nothing is evicted by that."""
        self._ranking.resize(capacity_bytes)

    # -- internals -------------------------------------------------------------------------

    def _leave(self, key: int, *, evicted: bool) -> None:
        item = self._items[key]
        assert not item.child_count, f"item {key} goes before the {item.child_count} that need it"
        del self._items[key]
        self.nbytes -= item.nbytes
        self._ranking.delist(item)
        self._ranking.forget(item, evicted=evicted)
        if item.parent is not None:
            self._hand_on(item, item.parent)

    def _hand_on(self, child: Item, parent: Item) -> None:
        """Give a child's uses to its parent; rank the parent if that was its last child."""
        later_s = max(child.used_s, parent.used_s)
        uses = child.uses * self._share_left(later_s - child.used_s)
        parent.uses = parent.uses * self._share_left(later_s - parent.used_s) + uses
        parent.used_s = later_s
        parent.order = max(parent.order, child.order)
        parent.stamp = max(parent.stamp, child.stamp)
        parent.floor = max(parent.floor, child.priority)
        parent.child_count -= 1
        if not parent.child_count:
            self._enlist(parent)

    def _enlist(self, item: Item) -> None:
        self._ranking.enlist(item)
        if item.pin_count:
            self._ranking.set_eligible(item, False)

    def _count(self, item: Item, uses: float, now: float, *, is_use: bool = True) -> None:
        item.uses = item.uses * self._share_left(now - item.used_s) + uses
        item.used_s = now
        if is_use:
            self._use_count += 1
            item.order = self._use_count
            item.stamp = self._ranking.clock

    def _share_left(self, age_s: float) -> float:
        return 1.0 if age_s <= 0.0 else 2.0 ** (-age_s / self._ranking.half_life_s)

    def _rank_by(self, ranking: Ranking) -> None:
        """Go on with another ranking; what was learned of the items stays."""
        self._ranking = ranking
        for item in self._items.values():
            item.priority = item.floor = LOWEST
            item.stamp = ranking.clock
        ranking.adopt(self._items.values())
        for item in self._items.values():
            if not item.child_count:
                self._enlist(item)
