"""What KV costs by where it comes from: seconds for a GB, as measured of late.

Owns means, never a clock. Times are for bytes, not tokens: a server sees bytes, and namespaces of
other shapes become comparable. A mean weighs each measurement by its bytes, older ones less.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GB_BYTES", "LONGEST_S", "MeanTime", "Times"]

GB_BYTES = 1e9
LONGEST_S = 1e6
"""Longest time for a GB that is believed, s."""
_SHARE_LEFT = 7 / 8


class Times(NamedTuple):
    """Seconds for 1 GB (10**9 bytes) of KV by where it comes from; 0: not known.

    ``local`` is this node's memory, ``remote`` another's, ``disk`` a lower tier, and
    ``recompute`` a prefill.
    """

    local_s: float = 0.0
    remote_s: float = 0.0
    disk_s: float = 0.0
    recompute_s: float = 0.0


class MeanTime:
    """Seconds for a GB, from measurements of any size."""

    __slots__ = ("_bytes", "_seconds")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._bytes = 0.0

    @property
    def value_s(self) -> float:
        """Seconds for a GB; 0: nothing was measured."""
        return min(GB_BYTES * self._seconds / self._bytes, LONGEST_S) if self._bytes else 0.0

    def add(self, nbytes: float, seconds: float) -> None:
        """Take in a measurement; one of nothing, or of no time, is none."""
        if nbytes > 0 and seconds > 0:
            self._bytes = _SHARE_LEFT * self._bytes + nbytes
            self._seconds = _SHARE_LEFT * self._seconds + seconds
