"""What may go wrong in a simulated job, as data.

A `FaultPlan` says how likely each fault is at each message, transfer and step; `plan_of` draws one
from a seed. Each seed has other faults, and some have few: a plan of all faults at once hides what
only one of them would show.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import msgspec

__all__ = ["FAULTS", "SITUATIONS", "TIER_FAULTS", "FaultPlan", "plan_of", "with_tier_faults"]


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Probabilities per message, per transfer, or per step of a client or server; times in s.

    Attributes
    ----------
    delay_s
        Mean time of a message or a transfer on its way.
    lose, duplicate
        A message between client and server never arrives, or arrives twice.
    reorder, reorder_s
        It is held up for at most this long, while later ones overtake it.
    late, late_s
        It is held up for much longer: past what its sender waits.
    bend_message
        One of its bits changes on the way.
    slow_transfer, slow_transfer_s
        The bytes of a Get or of a store take this long, in parts.
    bend_data
        One of these bits changes on the way.
    bend_arena
        A bit of a published segment changes, per operation of a client.
    stall, stall_s
        A client stands still between two steps.
    vanish
        A client stands still for ever; data that it was sending is torn.
    abort
        An operation ends between two steps, as by an exception in the engine.
    pause, pause_s
        A server stands still.
    peer_delay_s
        Mean time of a message between servers on its way.
    tier_bend
        A bit of what is read from a file tier changes.
    tier_short
        A read or write of a file tier moves nothing.
    tier_error
        A read or write of a file tier, or the making of a file, fails.
    tier_slow, tier_slow_s
        One takes this long.
    lossy_peers
        These messages suffer as those of clients do; else they arrive in order and once.
    """

    delay_s: float = 0.0005
    lose: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.02
    late: float = 0.0
    late_s: float = 5.0
    bend_message: float = 0.0
    slow_transfer: float = 0.0
    slow_transfer_s: float = 3.0
    bend_data: float = 0.0
    bend_arena: float = 0.0
    stall: float = 0.0
    stall_s: float = 5.0
    vanish: float = 0.0
    abort: float = 0.0
    pause: float = 0.0
    pause_s: float = 2.0
    peer_delay_s: float = 0.0005
    tier_bend: float = 0.0
    tier_short: float = 0.0
    tier_error: float = 0.0
    tier_slow: float = 0.0
    tier_slow_s: float = 2.0
    lossy_peers: bool = False

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            most = float("inf") if name.endswith("_s") else 1.0
            if not 0 <= value <= most:
                raise ValueError(f"{name}: expected a number from 0 to {most:g}, got {value}")


TIER_FAULTS = ("tier_bend", "tier_short", "tier_error", "tier_slow")

FAULTS = (
    "lose",
    "duplicate",
    "reorder",
    "late",
    "bend_message",
    "slow_transfer",
    "bend_data",
    "bend_arena",
    "stall",
    "vanish",
    "abort",
    "pause",
    "lossy_peers",
    *TIER_FAULTS,
)
"""Every kind of fault, by the name of its probability."""

SITUATIONS = (
    "reply_after_giving_up",
    "read_past_lease",
    "write_past_reservation",
    "torn_write",
    "full_arena",
    "held_match",
    "peer_resend",
    "replica",
    "replica_hit",
    "fill_awaited",
    "fill_failed",
    "redirect",
    "stale_redirect",
    "deferred",
    "share_moved",
    "trimmed",
    "demoted",
    "promoted",
    "tier_read_failed",
    "tier_full",
)
"""What the faults are there to bring about; counted when it happens."""

_RANGES: dict[str, tuple[float, float]] = {
    "lose": (0.005, 0.2),
    "duplicate": (0.01, 0.3),
    "reorder": (0.05, 0.5),
    "late": (0.005, 0.1),
    "bend_message": (0.002, 0.05),
    "slow_transfer": (0.05, 0.5),
    "bend_data": (0.01, 0.1),
    "bend_arena": (0.02, 0.2),
    "stall": (0.002, 0.05),
    "vanish": (0.0005, 0.003),
    "abort": (0.002, 0.03),
    "pause": (0.002, 0.03),
}

_TIER_RANGES: dict[str, tuple[float, float]] = {
    "tier_bend": (0.05, 0.4),
    "tier_short": (0.01, 0.2),
    "tier_error": (0.01, 0.2),
    "tier_slow": (0.1, 0.6),
}


def plan_of(rng: random.Random, faults: Collection[str] = FAULTS) -> FaultPlan:
    """Draw a plan of these faults: each is there or not, and more or less likely.

    Every eighth plan has none: then nothing may fail that need not.
    """
    if rng.random() < 1 / 8:
        return FaultPlan()
    return FaultPlan(
        **_draw(rng, _RANGES, faults),
        reorder_s=rng.choice([0.02, 0.4]),
        stall_s=rng.choice([0.5, 3.0, 8.0]),
        peer_delay_s=rng.choice([0.0005, 0.0005, 0.05, 0.4]),
        lossy_peers="lossy_peers" in faults and rng.random() < 0.25,
    )


def with_tier_faults(plan: FaultPlan, rng: random.Random, faults: Collection[str]) -> FaultPlan:
    """Return a plan with those of these faults that only a job with file tiers can meet."""
    if plan == FaultPlan():
        return plan
    return msgspec.structs.replace(plan, **_draw(rng, _TIER_RANGES, faults))


def _draw(
    rng: random.Random, ranges: dict[str, tuple[float, float]], faults: Collection[str]
) -> dict[str, float]:
    drawn: dict[str, float] = {}
    for name, (low, high) in ranges.items():
        if name in faults and rng.random() < 0.5:
            drawn[name] = math.exp(rng.uniform(math.log(low), math.log(high)))
    return drawn
