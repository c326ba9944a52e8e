"""What a server asks of a file tier below its memory. An interface: no I/O, no bytes.

The tier keeps slots; a slot holds the bytes of one segment. Nothing here waits: a read or write is
begun, and its end comes out of a later `Tier.poll`. In between the memory of the segment belongs
to the tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ptstore_mpi.cache.segment import Segment

__all__ = ["MoveEnded", "Tier", "TierRefusal"]

TierRefusal = Literal["full", "growing", "paused", "large"]
"""Why there is no slot: no capacity, a file is being made, a write failed lately, never fits."""


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A read or write of a segment is over; ``is_done``: all its bytes are there, and right."""

    segment: Segment
    kind: Literal["write", "read"]
    is_done: bool


class Tier(ABC):
    """A file tier of one server.

    Attributes
    ----------
    name
        What the counters of its uses begin with.
    """

    name: str

    @abstractmethod
    def reserve(self, segment: Segment) -> Any | TierRefusal:
        """Return a slot for a segment, or why there is none."""

    @abstractmethod
    def release(self, slot: Any) -> None:
        """Let a slot go; it is freed when no I/O is on it (P14)."""

    @abstractmethod
    def start_write(self, segment: Segment) -> bool:
        """Begin to write a segment's memory to its slot; False: busy, nothing has changed."""

    @abstractmethod
    def start_read(self, segment: Segment) -> bool:
        """Begin to read a segment's slot into its memory; False: busy, nothing has changed."""

    @abstractmethod
    def poll(self) -> tuple[MoveEnded, ...]:
        """Return what has ended since the last call; never waits."""

    @abstractmethod
    def take_change(self) -> bool:
        """Tell whether there may be room now that there was not when last asked."""

    @property
    @abstractmethod
    def is_growing(self) -> bool:
        """Whether there may be room for further slots soon, though nothing is let go."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """Most that the files may take."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Return sizes and events by name, in bytes and counts."""

    @abstractmethod
    def close(self) -> None:
        """Give everything up: wait for the I/O under way and remove the files."""
