"""Models of eviction policies: every use counts at once at all it concerns, all is searched."""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_LIFE_S = 1.0  # with whole seconds, sizes and costs that are powers of two: exact sums


@dataclass
class Node:
    nbytes: int
    cost_s: float
    parent: int | None
    uses: float = 0.0
    used_s: float = 0.0
    order: int = 0
    stamp: float = 0.0
    floor: float = -math.inf
    pins: int = 0


class Model:
    """The tree; the victim is any eligible leaf, which one is for the subclasses to say."""

    name = ""

    def __init__(self):
        self.nodes: dict[int, Node] = {}
        self.tick = 0
        self.clock = 0.0

    def path(self, key):
        while key is not None:
            yield key
            key = self.nodes[key].parent

    def children(self, key):
        return [other for other, node in self.nodes.items() if node.parent == key]

    def leaves(self):
        inner = {node.parent for node in self.nodes.values()}
        return [key for key in self.nodes if key not in inner]

    def eligible(self):
        return [key for key in self.leaves() if not self.nodes[key].pins]

    def add(self, key, node, now):
        self.nodes[key] = node
        self.touch(key, now, is_new=True)

    def use(self, key, now):
        self.touch(key, now, is_new=False)

    def touch(self, key, now, *, is_new):
        """Use ``key``; what leads to it was counted already where it is new."""
        self.tick += 1
        for each in self.path(key):
            node = self.nodes[each]
            left = 2.0 ** (-(now - node.used_s) / HALF_LIFE_S) if self.name == "gdsf" else 1.0
            node.uses = node.uses * left + (each == key or not is_new)
            node.used_s, node.order, node.stamp = now, self.tick, self.clock

    def leave(self, key, *, evicted):
        del self.nodes[key]

    def allows(self, victim):
        eligible = self.eligible()
        return victim in eligible if eligible else victim is None


class RankedModel(Model):
    """By a number: that of its own last use, of any child's, or of any child's that has gone."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def worth(self, key):
        node = self.nodes[key]
        own = {
            "lru": float(node.order),
            "lfu": node.uses,
            "gdsf": node.stamp + node.uses * node.cost_s / node.nbytes,
        }[self.name]
        return max([own, node.floor, *(self.worth(child) for child in self.children(key))])

    def leave(self, key, *, evicted):
        worth, parent = self.worth(key), self.nodes[key].parent
        super().leave(key, evicted=evicted)
        if parent is not None:
            self.nodes[parent].floor = max(self.nodes[parent].floor, worth)
        if evicted:
            self.clock = max(self.clock, worth)

    def allows(self, victim):
        ranks = ((self.worth(key), self.nodes[key].order, key) for key in self.eligible())
        return victim == min(ranks, default=(0, 0, None))[2]


class S3FifoModel(Model):
    """Lists in the order of their turns, walked from the front."""

    def __init__(self, capacity):
        super().__init__()
        self.small_most, self.ghost_most = int(capacity * 0.1), int(capacity * 0.9)
        self.main_most = capacity - self.small_most
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[tuple[int, int]] = []
        self.seen: dict[int, int] = {}
        self.spent: dict[int, float] = {}
        self.passed: set[int] = set()
        self.has_evicted = False
        self.chosen: tuple[list[int], int | None] | None = None

    def nbytes(self, queue):
        return sum(self.nodes[key].nbytes for key in queue)

    def own_uses(self, key):
        """Uses but for those of the children that are still there."""
        return self.nodes[key].uses - sum(self.nodes[child].uses for child in self.children(key))

    def add(self, key, node, now):
        super().add(key, node, now)
        known = [each for each in self.ghost if each[0] == key]
        self.ghost = [each for each in self.ghost if each[0] != key]
        while sum(nbytes for _, nbytes in self.ghost) > self.ghost_most:
            self.ghost.pop(0)
        filling = not self.has_evicted and self.nbytes(self.small) >= self.small_most
        large = node.nbytes >= self.small_most
        (self.main if known or filling or large else self.small).append(key)
        self.seen[key], self.spent[key] = 0, node.uses
        self.chosen = None

    def use(self, key, now):
        super().use(key, now)
        for each in self.path(key):
            self.seen[each] += 1
        for each in self.path(key):
            if each in self.passed and self.seen[each] >= 2:
                self.move(each)
        if key in self.leaves():
            self.chosen = None

    def move(self, key):
        self.passed.discard(key)
        self.small.remove(key)
        self.main.append(key)
        self.spent[key] = self.own_uses(key)

    def leave(self, key, *, evicted):
        if evicted and key in self.small and self.nodes[key].nbytes <= self.ghost_most:
            self.ghost.append((key, self.nodes[key].nbytes))
        self.has_evicted |= evicted
        for queue in (self.small, self.main):
            if key in queue:
                queue.remove(key)
        super().leave(key, evicted=evicted)
        self.chosen = None

    def allows(self, victim):
        eligible = sorted(self.eligible())
        if self.chosen is None or self.chosen[0] != eligible:
            turns = [self.turn_of_small, self.turn_of_main]
            if self.nbytes(self.main) > self.main_most:
                turns.reverse()
            found = turns[0]()
            self.chosen = (eligible, turns[1]() if found is None else found)
        return victim == self.chosen[1]

    def turn_of_small(self):
        leaves, eligible = self.leaves(), self.eligible()
        self.passed -= set(leaves)
        for key in list(self.small):
            if key in leaves and key not in eligible:
                continue
            if self.seen[key] >= 2:
                self.move(key)
            elif key in eligible:
                return key
            else:
                self.passed.add(key)
        return None

    def turn_of_main(self):
        eligible = set(self.eligible())
        while turns := [key for key in self.main if key in eligible]:
            key = turns[0]
            uses = min(self.own_uses(key) - self.spent[key], 3)
            if uses < 1:
                return key
            self.main.remove(key)
            self.main.append(key)
            self.spent[key] = self.own_uses(key) - (uses - 1)
        return None
