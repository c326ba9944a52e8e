"""Which segments of other nodes are worth a replica: asked about each that a client must fetch.

An admission sees names of contents and nothing else, and answers at once. ``second_hit`` asks a
count-min sketch: four rows of counters, of which the least is at most too high; it halves them
all now and then, so that what was asked for long ago is forgotten (TinyLFU: Einziger, Friedman,
Manes, 2017).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

__all__ = ["Admission", "AdmissionName", "make_admission"]

AdmissionName = Literal["second_hit", "always", "never"]

_ROWS = 4
_COLUMN_BITS = 14
_AGE_COUNT = 8 << _COLUMN_BITS
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MASK = (1 << 64) - 1


class Admission(ABC):
    """Decides what is kept."""

    @abstractmethod
    def admits(self, content: int) -> bool:
        """Take note that ``content``, 64 bits, was asked for; return whether to keep it."""


class Always(Admission):
    """Keeps everything."""

    def admits(self, content: int) -> bool:
        """Return True."""
        return True


class Never(Admission):
    """Keeps nothing."""

    def admits(self, content: int) -> bool:
        """Return False."""
        return False


class SecondHit(Admission):
    """Keeps what was asked for before, as far as the sketch remembers."""

    def __init__(self) -> None:
        self._counts = np.zeros((_ROWS, 1 << _COLUMN_BITS), dtype=np.uint8)
        self._noted_count = 0

    def admits(self, content: int) -> bool:
        """Count it; return whether it had been counted before."""
        places = [(content * odd & _MASK) >> (64 - _COLUMN_BITS) for odd in _ODD]
        rows = list(zip(range(_ROWS), places, strict=True))
        least = min(int(self._counts[place]) for place in rows)
        for place in rows:
            if self._counts[place] == least < 255:
                self._counts[place] += 1
        self._noted_count += 1
        if self._noted_count == _AGE_COUNT:
            self._counts >>= 1
            self._noted_count = 0
        return least > 0


def make_admission(name: AdmissionName) -> Admission:
    """Return a fresh admission; an unknown name is a KeyError."""
    kinds: dict[str, type[Admission]] = {
        "second_hit": SecondHit,
        "always": Always,
        "never": Never,
    }
    return kinds[name]()
