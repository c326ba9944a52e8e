"""S3-FIFO: a small queue that most items leave at once, a main one, and a memory of who left.

New items enter *small* (a tenth of the pool); an item used twice there moves to *main* when its
turn comes, the others leave and are remembered in *ghost*: who comes back from there enters main.
In main the oldest item goes, unless it was used since: then it comes in again, with one use less
(of three at most). Until the first eviction, what small has no room for enters main.

In a pool with prefixes the turn passes over whatever has children or is pinned; it keeps its
place. But an item with children that was used twice moves to main, at its turn or once that has
passed: else small would fill up with what cannot go, and the newest leaves would go for it. To
know it, a use is noted at all that leads to the item, up to the first that has been used twice
already: no item is visited more than twice for that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from ptstore_mpi import _native
from ptstore_mpi.cache.policies.base import Item, Ranking

__all__ = ["S3FifoRanking"]

_SMALL_SHARE = 0.1
_GHOST_SHARE = 0.9
_USES_TO_MAIN = 2
_USES_MOST = 3


@dataclass(slots=True, eq=False)
class _Place:
    """Where an item stands.

    ``seen`` are its uses since it came, two at most; ``spent`` those of `Item.uses` that do not
    count any more in main; ``has_passed`` tells that it had children when its turn in small came.
    """

    item: Item
    in_main: bool
    turn: int
    spent: float
    seen: float = 0
    is_leaf: bool = False
    has_passed: bool = False


class _Fifo:
    """One queue: items by turn (of main the leaves only), and the bytes of all its items."""

    def __init__(self) -> None:
        self.turns = _native.EvictionQueue()
        self.nbytes = 0


class S3FifoRanking(Ranking):
    """Small, main and ghost queues, sized in bytes."""

    name: ClassVar[str] = "s3fifo"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._queues = (_Fifo(), _Fifo())  # small, main
        self._places: dict[int, _Place] = {}
        self._ghost: dict[int, int] = {}  # content -> bytes, oldest first
        self._ghost_bytes = 0
        self._turn = 0
        self._has_evicted = False
        self._chosen: int | None = None

    def resize(self, capacity_bytes: int) -> None:
        """Divide the pool anew."""
        self._small_bytes = int(capacity_bytes * _SMALL_SHARE)
        self._main_bytes = capacity_bytes - self._small_bytes
        self._ghost_most_bytes = int(capacity_bytes * _GHOST_SHARE)

    def adopt(self, items: Collection[Item]) -> None:
        """Put the items used last into small, the others into main, in the order of their use."""
        self._has_evicted = True
        room = sum(item.nbytes for item in items) - self._small_bytes
        uses: dict[int, float] = {}  # with those of all children
        for item in reversed(list(items)):
            uses[item.key] = uses.get(item.key, 0.0) + item.uses
            if item.parent is not None:
                above = item.parent.key
                uses[above] = uses.get(above, 0.0) + uses[item.key]
        for item in sorted(items, key=lambda item: item.order):
            place = self._enter(item, in_main=room > 0, spent=1.0)
            place.seen = uses[item.key] - 1
            room -= item.nbytes

    def admit(self, item: Item) -> None:
        """Let an item enter small, or main where it is remembered."""
        known_bytes = self._ghost.pop(item.content, None)
        if known_bytes is not None:
            self._ghost_bytes -= known_bytes
        self._trim_ghost()
        small = self._queues[False]
        filling = not self._has_evicted and small.nbytes >= self._small_bytes
        too_large = item.nbytes >= self._small_bytes
        in_main = known_bytes is not None or filling or too_large
        self._enter(item, in_main=in_main, spent=item.uses)

    def use(self, item: Item, *, alone: bool) -> None:
        """Note a use of an item and, unless alone, of what leads to it."""
        at: Item | None = item
        while at is not None and (place := self._places[at.key]).seen < _USES_TO_MAIN:
            place.seen += 1
            if place.seen >= _USES_TO_MAIN and place.has_passed:
                self._move_to_main(place)
            at = None if alone else at.parent

    def forget(self, item: Item, *, evicted: bool) -> None:
        """Remember who was evicted from small."""
        place = self._places.pop(item.key)
        self._leave(place)
        self._has_evicted = self._has_evicted or evicted
        if evicted and not place.in_main and item.nbytes <= self._ghost_most_bytes:
            self._ghost_bytes += item.nbytes - self._ghost.pop(item.content, 0)
            self._ghost[item.content] = item.nbytes

    def enlist(self, item: Item) -> None:
        """Let a leaf take its turn; a use changes nothing but what happens then."""
        place = self._places[item.key]
        place.is_leaf, place.has_passed = True, False
        self._queues[place.in_main].turns.set(item.key, float(place.turn))
        self._chosen = None

    def delist(self, item: Item) -> None:
        """Pass over an item from now on; look at it once, at its turn in small."""
        place = self._places[item.key]
        place.is_leaf = False
        if place.in_main:
            self._queues[True].turns.remove(item.key)
        elif item.key in self._queues[False].turns:
            self._queues[False].turns.set_eligible(item.key, True)
        self._chosen = None

    def set_eligible(self, item: Item, eligible: bool) -> None:
        """Pass over an enlisted leaf, or not."""
        self._queues[self._places[item.key].in_main].turns.set_eligible(item.key, eligible)
        self._chosen = None

    def lowest(self) -> int | None:
        """Return the key of the leaf that goes first, after those that are moved have moved."""
        if self._chosen is None:
            main = self._queues[True]
            main_first = main.nbytes > self._main_bytes
            for in_main in (main_first, not main_first):
                self._chosen = self._turns_of_main() if in_main else self._turns_of_small()
                if self._chosen is not None:
                    break
        return self._chosen

    # -- internals -------------------------------------------------------------------------

    def _turns_of_small(self) -> int | None:
        turns = self._queues[False].turns
        while (found := turns.lowest()) is not None:
            place = self._places[found[0]]
            if place.seen >= _USES_TO_MAIN:
                self._move_to_main(place)
            elif place.is_leaf:
                return found[0]
            else:
                place.has_passed = True
                turns.remove(found[0])
        return None

    def _move_to_main(self, place: _Place) -> None:
        self._leave(place)
        moved = self._enter(place.item, in_main=True, spent=place.item.uses)
        moved.seen, moved.is_leaf = place.seen, place.is_leaf
        if moved.is_leaf:
            self._queues[True].turns.set(place.item.key, float(moved.turn))

    def _turns_of_main(self) -> int | None:
        while (found := self._queues[True].turns.lowest()) is not None:
            place = self._places[found[0]]
            uses = min(place.item.uses - place.spent, _USES_MOST)
            if uses < 1:
                return found[0]
            place.spent = place.item.uses - (uses - 1)
            self._turn += 1
            place.turn = self._turn
            self._queues[True].turns.set(found[0], float(place.turn))
        return None

    def _enter(self, item: Item, *, in_main: bool, spent: float) -> _Place:
        self._turn += 1
        place = self._places[item.key] = _Place(item, in_main, self._turn, spent)
        queue = self._queues[in_main]
        queue.nbytes += item.nbytes
        if not in_main:
            queue.turns.set(item.key, float(place.turn))
        return place

    def _leave(self, place: _Place) -> None:
        queue = self._queues[place.in_main]
        queue.turns.remove(place.item.key)
        queue.nbytes -= place.item.nbytes

    def _trim_ghost(self) -> None:
        # Only when an item comes in: what was evicted to make room for it must not push it out.
        while self._ghost_bytes > self._ghost_most_bytes:
            oldest = next(iter(self._ghost))
            self._ghost_bytes -= self._ghost.pop(oldest)
