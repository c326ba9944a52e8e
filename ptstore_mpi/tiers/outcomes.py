"""How things end in a file tier: transfers, and requests for room. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from ptstore_mpi.tiers.room import FileSlot

__all__ = ["OUTCOMES", "Ended", "Outcome", "Refusal"]

Outcome = Literal[
    "done", "no_space", "io_error", "short", "truncated", "foreign", "corrupt", "cancelled"
]
OUTCOMES: tuple[Outcome, ...] = (
    "done",
    "no_space",  # the disk, a quota or a limit of file sizes is full
    "io_error",  # any other error of the system
    "short",  # the system took or gave fewer bytes, and no more when asked again
    "truncated",  # the file ends before the slot does
    "foreign",  # a whole header, but not the slot's own
    "corrupt",  # header or blocks fail their checksums
    "cancelled",  # the tier was closed first
)


class Refusal(enum.Enum):
    """Why there is no slot now."""

    FULL = "full"
    """Capacity or disk are used up."""
    GROWING = "growing"
    """A slab is being made."""
    PAUSED = "paused"
    """A write has failed lately."""
    LARGE = "large"
    """It can never fit a slab."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A read or write that is over.

    Attributes
    ----------
    slot
        Of which slot.
    kind
        ``write`` or ``read``.
    outcome
        ``done``, or why not: one of `OUTCOMES`.
    detail
        The same in words, where there is more to say.
    seconds
        Time of the thread that did it.
    """

    slot: FileSlot
    kind: Literal["write", "read"]
    outcome: Outcome
    detail: str
    seconds: float
