"""Rankings compared while a pool works: a shadow pool for each, on a sample of its requests.

Owns the shadows, the sample and the scores; decides nothing. Metadata only, and bounded: when the
sample would hold more than ``item_count`` items, half of the branches leave it and the shadows
begin again from what is in the pool.

The sample is of whole branches: an item without a parent, or with a parent that many continue (a
*hub*: the end of a shared system prompt), is drawn by a hash of its content, and what continues
it goes with it. What leads to a drawn item comes along. So the sample is a workload of its own,
with prefixes intact, and a shadow is as large as the sample's share of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ptstore_mpi.cache.policies.base import Item
from ptstore_mpi.cache.policies.rankings import make_ranking
from ptstore_mpi.cache.policies.tree import EvictionPolicy
from ptstore_mpi.cache.shadow import ShadowPool

__all__ = ["Contest", "Score"]

_ALL = 1 << 64
_MIXER = 0x9E3779B97F4A7C15  # odd, its bits without pattern
_HUB_CHILD_COUNT = 16
_HUBS_MOST = 4096
_BRANCHES_ENOUGH = 64


@dataclass(slots=True)
class Score:
    """How one ranking did.

    Attributes
    ----------
    shadow
        Its pool.
    saved_s
        Seconds it saved, older ones counting less.
    squares
        Sum of the squared differences to what the first ranking saved, in seconds squared.
    """

    shadow: ShadowPool
    saved_s: float = 0.0
    squares: float = 0.0


class Contest:
    """Shadow pools that compete on the requests of one pool.

    Parameters
    ----------
    names
        Rankings that compete; the first is what the others are measured against.
    capacity_bytes
        Size of the pool they are shadows of.
    item_count
        Most items of the pool in the sample; each shadow holds about as many.
    """

    def __init__(self, names: Collection[str], capacity_bytes: int, *, item_count: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._item_count = item_count
        self._drawn_below = _ALL
        self._hubs: set[int] = set()  # contents
        self._branches: set[int] = set()  # keys of the items in the pool that were drawn ...
        self._drawn: set[int] = set()  # ... with what continues them ...
        self._sampled: set[int] = set()  # ... and with what leads to them
        self._sampled_bytes = 0
        self.asked_s = 0.0
        self.scores = {name: Score(self._new_shadow(name)) for name in names}
        self._first = next(iter(self.scores.values()))

    @property
    def sample_share(self) -> float:
        """Share of the branches that are drawn."""
        return self._drawn_below / _ALL

    @property
    def is_telling(self) -> bool:
        """Whether the sample is everything, or holds enough branches to go by."""
        return self._drawn_below == _ALL or len(self._branches) >= _BRANCHES_ENOUGH

    def saved_share(self, name: str) -> float:
        """Return the share of the cost asked for that a ranking saved."""
        return self.scores[name].saved_s / self.asked_s if self.asked_s else 0.0

    def gain_share(self, name: str) -> float:
        """Return by how much that is more than the first one's, less one error of sampling."""
        if not self.asked_s:
            return 0.0
        score = self.scores[name]
        error_s = math.sqrt((1.0 - self.sample_share) * score.squares)
        return (score.saved_s - self._first.saved_s - error_s) / self.asked_s

    def added(self, item: Item, items: Collection[Item], now: float) -> None:
        """Follow the addition of an item to the pool, which now holds ``items``."""
        self._enter(item)
        if len(self._sampled) > self._item_count:
            self._thin_out(items)
        self.used(item, now, alone=True)

    def used(self, item: Item, now: float, *, alone: bool) -> None:
        """Follow a use of an item of the pool."""
        if item.key not in self._drawn:
            return
        self.asked_s += item.cost_s if alone else item.path_cost_s
        first_s: float | None = None
        for score in self.scores.values():
            saved_s = _bring_in(score.shadow, item, now, alone=alone)
            first_s = saved_s if first_s is None else first_s
            score.saved_s += saved_s
            score.squares += (saved_s - first_s) ** 2

    def left(self, item: Item) -> None:
        """Follow an item that leaves the pool."""
        self._branches.discard(item.key)
        self._drawn.discard(item.key)
        if item.key in self._sampled:
            self._sampled.remove(item.key)
            self._sampled_bytes -= item.nbytes

    def resize(self, capacity_bytes: int, pool_bytes: int) -> None:
        """Give the shadows the sample's share of the pool, which now holds ``pool_bytes``."""
        self._capacity_bytes = capacity_bytes
        share = self._sampled_bytes / pool_bytes if pool_bytes else 1.0
        for score in self.scores.values():
            score.shadow.resize(int(capacity_bytes * share))

    def fade(self, share_left: float) -> None:
        """Let everything scored so far count less."""
        self.asked_s *= share_left
        for score in self.scores.values():
            score.saved_s *= share_left
            score.squares *= share_left**2

    # -- internals -------------------------------------------------------------------------

    def _new_shadow(self, name: str) -> ShadowPool:
        policy = EvictionPolicy(make_ranking(name, self._capacity_bytes))
        return ShadowPool(policy, self._capacity_bytes)

    def _enter(self, item: Item) -> None:
        """Draw an item, or not; take what leads to it along."""
        parent = item.parent
        if self._is_drawn(item):
            self._drawn.add(item.key)
            above: Item | None = item
            while above is not None and above.key not in self._sampled:
                self._sampled.add(above.key)
                self._sampled_bytes += above.nbytes
                above = above.parent
        if parent is not None and parent.child_count >= _HUB_CHILD_COUNT:
            if len(self._hubs) < _HUBS_MOST:
                self._hubs.add(parent.content)
            if self._drawn_below < _ALL:
                self._drawn.discard(parent.key)

    def _is_drawn(self, item: Item) -> bool:
        if self._drawn_below == _ALL:
            return True
        if item.content in self._hubs:
            return False  # what ends here is about to go on in a branch of its own
        parent = item.parent
        if parent is not None and parent.content not in self._hubs:
            return parent.key in self._drawn
        is_drawn = (item.content ^ (item.content >> 31)) * _MIXER % _ALL < self._drawn_below
        if is_drawn:
            self._branches.add(item.key)
        return is_drawn

    def _thin_out(self, items: Collection[Item]) -> None:
        while len(self._sampled) > self._item_count and self._drawn_below > 1:
            self._drawn_below >>= 1
            for chosen in (self._branches, self._drawn, self._sampled):
                chosen.clear()
            self._sampled_bytes = 0
            for item in items:  # parents first
                self._enter(item)
        for name, score in self.scores.items():
            score.shadow = self._new_shadow(name)
        self.resize(self._capacity_bytes, sum(item.nbytes for item in items))
        for item in sorted(items, key=lambda item: item.order):
            if item.key in self._drawn:
                for score in self.scores.values():
                    _bring_in(score.shadow, item, item.used_s, alone=True)


def _bring_in(shadow: ShadowPool, item: Item, now: float, *, alone: bool) -> float:
    """Use an item, and what leads to it, in a shadow; return the seconds that saved."""
    policy = shadow.policy
    missing: list[Item] = []
    at: Item | None = item
    while at is not None and at.content not in policy:
        missing.append(at)
        at = at.parent
    is_hit = at is item or (at is not None and not alone)
    if at is not None and is_hit:
        policy.hit(at.content, now, alone=alone)
    if missing:
        blocks = [(each.content, each.nbytes, each.cost_s) for each in reversed(missing)]
        shadow.extend(None if at is None else at.content, blocks, now)
    if at is None or not is_hit:
        return 0.0
    return at.cost_s if alone else at.path_cost_s
