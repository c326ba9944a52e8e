"""Use: where nothing goes wrong, everything has to work (liveness).

Without it a store that refuses everything would keep every invariant.
"""

from __future__ import annotations

from typing import Any

from ptstore_mpi.sim.checkers.base import Checker
from ptstore_mpi.sim.faults import FaultPlan
from ptstore_mpi.sim.prompts import Prompt
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.workloads import Player
from ptstore_mpi.types import LoadResult, Match, StoreResult

__all__ = ["Useful"]

_REFUSALS = ("stored", "known", "dedup", "full")
_RACES = ("gone",)  # of a client against another that removes


class Useful(Checker):
    """0: under a plan without faults no operation fails but for want of room, or to a removal."""

    number = 0

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._calm = sim.dice.plan == FaultPlan()

    def matched(self, player: Player, prompt: Prompt, match: Match, *, since: int) -> None:
        """Every server answers."""
        self.require(not self._calm or match.reason != "partial", f"{match}: nobody was silent")

    def loaded(self, player: Player, prompt: Prompt, match: Match, **how: Any) -> None:
        """What was just found is loaded, wholly."""
        result: LoadResult | None = how["result"]
        if self._calm and not how["held"]:
            fine = result is not None and result.reason in ("loaded", "nothing", *_RACES)
            self.require(fine, f"{match}: {result}")

    def stored(self, player: Player, prompt: Prompt, result: StoreResult, **how: Any) -> None:
        """What there is room for is stored."""
        if self._calm:
            self.require(result.reason in (*_REFUSALS, *_RACES), f"{prompt}: {result}")
