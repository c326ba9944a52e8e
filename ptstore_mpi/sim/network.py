"""What becomes of a message on its way: lost, doubled, late, overtaken, bent."""

from __future__ import annotations

import random
from collections import Counter

from ptstore_mpi.sim.faults import FaultPlan

__all__ = ["Dice", "Network"]


class Dice:
    """The random numbers of one run, and the count of the faults they brought about.

    Attributes
    ----------
    plan
        The faults, and how likely they are.
    rng
        Decides everything.
    fired
        How often each fault and each situation came about.
    """

    def __init__(self, plan: FaultPlan, seed: int | str) -> None:
        self.plan = plan
        self.rng = random.Random(seed)
        self.fired: Counter[str] = Counter()

    def strikes(self, fault: str, probability: float) -> bool:
        """Decide whether a fault strikes, and count it."""
        if not probability or self.rng.random() >= probability:
            return False
        self.fired[fault] += 1
        return True

    def delay_s(self, mean_s: float | None = None) -> float:
        """Draw the time of a message or a transfer on its way."""
        return (self.plan.delay_s if mean_s is None else mean_s) * 2 * self.rng.random()


class Network:
    """Decides what arrives of a message, and when.

    Parameters
    ----------
    dice
        Those of the run.
    """

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._last_s: dict[tuple[str, int, int], float] = {}

    def fates(
        self, data: bytes, wire: tuple[str, int, int], now: float
    ) -> list[tuple[bytes, float]]:
        """Return the copies of a message that arrive, each with its time, s.

        Without a fault, the messages of one wire keep their order, as MPI's do.
        """
        dice, plan = self._dice, self._dice.plan
        if dice.strikes("lose", plan.lose):
            return []
        copies = 2 if dice.strikes("duplicate", plan.duplicate) else 1
        fates: list[tuple[bytes, float]] = []
        for _ in range(copies):
            if dice.strikes("reorder", plan.reorder):
                when = now + dice.delay_s() + plan.reorder_s * dice.rng.random()
            elif dice.strikes("late", plan.late):
                when = now + dice.delay_s() + plan.late_s * dice.rng.random()
            else:
                when = self.in_order(wire, now)
            bent = dice.strikes("bend_message", plan.bend_message)
            fates.append((self._bend(data) if bent else data, when))
        return fates

    def in_order(
        self, wire: tuple[str, int, int], now: float, mean_s: float | None = None
    ) -> float:
        """Return when the next message on a wire arrives that loses and reorders nothing."""
        when = max(now + self._dice.delay_s(mean_s), self._last_s.get(wire, 0.0))
        self._last_s[wire] = when
        return when

    def _bend(self, data: bytes) -> bytes:
        bent = bytearray(data)
        bent[self._dice.rng.randrange(len(bent))] ^= 1 << self._dice.rng.randrange(8)
        return bytes(bent)
