"""What one client measures of KV by where it comes from, for its node's servers.

Owns the means and how a mixed load is shared out; reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from operator import index

from ptstore_mpi.cache.times import GB_BYTES, MeanTime, Times

__all__ = ["ClientTimes", "checked_prefill"]

_SOURCES = {"owned": "local", "replica": "local", "remote": "remote", "disk": "disk"}
_DEAREST = ("disk", "remote", "local")
_MOST_TOKENS = 1 << 48


class ClientTimes:
    """Times of one client."""

    def __init__(self) -> None:
        self._means = {name.removesuffix("_s"): MeanTime() for name in Times._fields}

    @property
    def times(self) -> Times:
        """What is known."""
        return Times(*(mean.value_s for mean in self._means.values()))

    def loaded(self, bytes_by_source: Mapping[str, int], seconds: float) -> None:
        """Take in a load that brought all of these bytes, and how long it took.

        Of a mixed load all that its other sources usually take is subtracted: the rest is the
        time of the dearest. Where one of the others is not known yet, nothing is.
        """
        nbytes = dict.fromkeys(_DEAREST, 0)
        for source, count in bytes_by_source.items():
            if source in _SOURCES:
                nbytes[_SOURCES[source]] += count
        present = [name for name in _DEAREST if nbytes[name]]
        for name in present[1:]:
            usual_s = self._means[name].value_s
            if not usual_s:
                return
            seconds -= usual_s * nbytes[name] / GB_BYTES
        if present:
            self._means[present[0]].add(nbytes[present[0]], seconds)

    def prefilled(self, nbytes: float, seconds: float) -> None:
        """Take in how long an engine took to compute so many bytes of KV."""
        self._means["recompute"].add(nbytes, seconds)


def checked_prefill(tokens: int, seconds: float) -> tuple[int, float]:
    """Return tokens and seconds of a prefill as plain numbers.

    Raises
    ------
    TypeError, ValueError
        They are no numbers, below 0, or larger than any machine takes.
    """
    try:
        count, taken_s = index(tokens), float(seconds)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"expected an integer and a number, got {tokens!r:.80} and {seconds!r:.80}"
        ) from None
    if not 0 <= count <= _MOST_TOKENS or not 0 <= taken_s < inf:
        raise ValueError(
            f"expected tokens of 0 .. {_MOST_TOKENS} and finite seconds of 0 or more, "
            f"got {tokens!r:.80} and {taken_s}"
        )
    return count, taken_s
