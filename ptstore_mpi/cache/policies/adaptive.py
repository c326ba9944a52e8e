"""A policy that changes to the ranking whose shadow pool saves most.

It compares whenever an eighth of the pool has been added anew, by what each ranking would have
saved over about the last turnover, and changes when another one is ahead by a margin twice in a
row. The first ranking (`lru`) is where it begins, and where it returns to: with a smaller margin,
or when the sample is too small to tell. So it is never much worse than that.
"""

from __future__ import annotations

from collections.abc import Collection

from ptstore_mpi.cache.contest import Contest
from ptstore_mpi.cache.policies.rankings import RANKING_NAMES, make_ranking
from ptstore_mpi.cache.policies.tree import EvictionPolicy

__all__ = ["AdaptivePolicy"]

_PERIODS_PER_TURNOVER = 8
_SHARE_LEFT = 0.5 ** (1 / _PERIODS_PER_TURNOVER)
_MARGIN_SHARE = 0.004
_MARGIN_BACK_SHARE = 0.001
_TIMES_AHEAD = 2


class AdaptivePolicy(EvictionPolicy):
    """Eviction by whichever ranking would have done best of late.

    Parameters
    ----------
    capacity_bytes
        Size of the pool.
    names
        Rankings to choose from; the first is the one to fall back on.
    shadow_item_count
        Most items of the pool that the shadows follow.

    Attributes
    ----------
    switch_count
        How often the ranking was changed.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        names: Collection[str] = RANKING_NAMES,
        shadow_item_count: int = 8192,
    ) -> None:
        self._names = tuple(names)
        super().__init__(make_ranking(self._names[0], capacity_bytes))
        self._capacity_bytes = capacity_bytes
        self._contest = Contest(self._names, capacity_bytes, item_count=shadow_item_count)
        self._added_bytes = 0
        self._ahead = self.choice
        self._ahead_count = 0
        self.switch_count = 0

    @property
    def name(self) -> str:
        """Name of the policy, as in the settings."""
        return "adaptive"

    @property
    def choice(self) -> str:
        """Name of the ranking in use."""
        return self._ranking.name

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
        """Take in a new item, as `EvictionPolicy.add`; compare when it is time."""
        super().add(key, nbytes, cost_s=cost_s, parent=parent, content=content, now=now)
        self._contest.added(self._items[key], self._items.values(), now)
        self._added_bytes += nbytes
        if self._added_bytes * _PERIODS_PER_TURNOVER >= self._capacity_bytes:
            self._added_bytes = 0
            self._compare()

    def hit(self, key: int, now: float = 0.0, *, alone: bool = False) -> None:
        """Note a use, as `EvictionPolicy.hit`."""
        super().hit(key, now, alone=alone)
        self._contest.used(self._items[key], now, alone=alone)

    def resize(self, capacity_bytes: int) -> None:
        """Take note of another size of the pool, in bytes; nothing is evicted by that."""
        super().resize(capacity_bytes)
        self._capacity_bytes = capacity_bytes
        self._contest.resize(capacity_bytes, self.nbytes)

    def counters(self) -> dict[str, float | str]:
        """Return the choice and what it rests on, by name.

        ``saved_share_*`` is the share of the cost asked for of late that a ranking would have
        saved, ``shadow_items_*`` what its shadow holds, ``sample_share`` the share of the
        branches that the shadows follow.
        """
        scores = self._contest.scores
        return {
            **super().counters(),
            "choice": self.choice,
            "switch_count": self.switch_count,
            "sample_share": self._contest.sample_share,
            **{f"saved_share_{name}": self._contest.saved_share(name) for name in scores},
            **{f"shadow_items_{name}": len(scores[name].shadow.policy) for name in scores},
        }

    # -- internals -------------------------------------------------------------------------

    def _leave(self, key: int, *, evicted: bool) -> None:
        item = self._items[key]
        super()._leave(key, evicted=evicted)
        self._contest.left(item)

    def _compare(self) -> None:
        self._contest.resize(self._capacity_bytes, self.nbytes)
        best = self._best()
        self._ahead_count = self._ahead_count + 1 if best == self._ahead else 1
        self._ahead = best
        if best != self.choice and self._ahead_count >= _TIMES_AHEAD:
            self._rank_by(make_ranking(best, self._capacity_bytes))
            self.switch_count += 1
        self._contest.fade(_SHARE_LEFT)

    def _best(self) -> str:
        first = self._names[0]
        if not self._contest.is_telling:
            return first
        gains = {name: self._contest.gain_share(name) for name in self._names}
        best = max(self._names, key=lambda name: gains[name])  # of equals the first
        margin = _MARGIN_BACK_SHARE if best == first else _MARGIN_SHARE
        return best if gains[best] - gains[self.choice] > margin else self.choice
