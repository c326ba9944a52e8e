"""What a measurement is, and the tools of all parts: memcpy as a reference, buffers in rotation.

Ours and the reference always take turns, so that other load falls on both. Nothing is averaged
here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from experiments.record import TEXT, Table

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

MEASUREMENTS = Table(
    "measurements",
    {
        "name": (TEXT, "text"),
        "parameter": (TEXT, "text"),
        "value": ("i8", "see parameter"),
        "repeat": ("i4", "1"),
        "ours": ("f8", "see unit"),
        "reference": ("f8", "see unit"),
        "unit": (TEXT, "text"),
        "against": (TEXT, "text"),
    },
)
RATE_UNITS = ("bytes/s", "tokens/s")
"""Units of which more is better; of all others less is."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One repeat of one measurement.

    Attributes
    ----------
    name
        Such as ``local_load/heads``.
    parameter, value
        ``size_bytes`` or ``tokens``, and how many.
    ours, reference
        In ``unit``.
    against
        What the reference is.
    """

    name: str
    parameter: str
    value: int
    repeat: int
    ours: float
    reference: float
    unit: str
    against: str

    def row(self) -> dict[str, object]:
        """Return it as a row of `MEASUREMENTS`."""
        return {name: getattr(self, name) for name in MEASUREMENTS.columns}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured against what; both calls return seconds.

    With ``amount`` the result is a rate, ``amount`` per second, else it is the time itself.
    """

    name: str
    parameter: str
    value: int
    ours: Callable[[], float]
    reference: Callable[[], float]
    unit: str
    against: str
    amount: int = 0

    def measure(self, repeats: int) -> Iterator[Measurement]:
        """Measure both in turn, once unrecorded and then ``repeats`` times."""
        for repeat in range(-1, repeats):
            ours_s, reference_s = self.ours(), self.reference()
            if repeat >= 0:
                ours = self.amount / ours_s if self.amount else ours_s
                reference = self.amount / reference_s if self.amount else reference_s
                yield Measurement(
                    self.name, self.parameter, self.value, repeat,
                    ours, reference, self.unit, self.against,
                )  # fmt: skip


def timed(action: Callable[[], object]) -> float:
    """Return how long an action takes, s."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def power(number: int) -> str:
    """Return a round number in powers of ten: ``1e6``."""
    return f"{number:.0e}".replace("e+0", "e")


class Rotation(Generic[T]):
    """Hands out the same things in turn, so that none is in a cache when it comes again."""

    def __init__(self, things: Sequence[T]) -> None:
        self._things = itertools.cycle(things)

    def next(self) -> T:
        """Return the next one."""
        return next(self._things)


def rotation_count(nbytes: int, *, cold_bytes: int) -> int:
    """Return how many buffers of ``nbytes`` exceed every cache together."""
    return max(2, -(-cold_bytes // nbytes))


class Memcpy:
    """The reference: plain copies between populated buffers by a number of threads."""

    def __init__(self, thread_count: int) -> None:
        self._pool = ThreadPoolExecutor(thread_count) if thread_count > 1 else None
        self._thread_count = thread_count

    def copy(self, target: Bytes, source: Bytes) -> None:
        """Copy all bytes."""
        if self._pool is None:
            np.copyto(target, source)
            return
        cuts = [len(target) * part // self._thread_count for part in range(self._thread_count + 1)]
        parts = [slice(start, end) for start, end in itertools.pairwise(cuts)]
        for done in [self._pool.submit(np.copyto, target[p], source[p]) for p in parts]:
            done.result()
