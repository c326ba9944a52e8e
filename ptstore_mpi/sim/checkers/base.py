"""What every checker is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptstore_mpi.cache.replicas import Replica
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.sim.observer import InvariantError, Observer
from ptstore_mpi.sim.prompts import book_of
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.types import ServerIndex

__all__ = ["EVERY", "Checker"]

EVERY = 16
"""The dearer checks look at every so many changes of a server."""


class Checker(Observer):
    """Watches one invariant of one simulation."""

    number = 0
    reads_bytes = False

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        self.sim = sim
        books = [book_of(salt, sim.layout) for salt in salts]
        self.books = {book.digest: book for book in books}

    def require(self, holds: object, text: str) -> None:
        """Raise unless something holds."""
        if not holds:
            raise InvariantError(f"{self.number}: {text}")

    def expect(self, check: Callable[..., None], *arguments: Any) -> None:
        """Run a check that raises AssertionError, under this checker's number."""
        try:
            check(*arguments)
        except AssertionError as error:
            raise InvariantError(f"{self.number}: {error}") from None

    def is_right(self, server: ServerIndex, copy: Segment | Replica) -> bool:
        """Tell whether the bytes of a segment or a replica are those of its tokens, everywhere."""
        image = self.books[copy.namespace].image_of(copy.hashes)
        found = []
        if not isinstance(copy, Segment) or copy.has_bytes:
            found.append(self.sim.memories[server][copy.offset :])
        if isinstance(copy, Segment) and server in self.sim.tiers:
            in_file = self.sim.tiers[server].payload_of(copy)
            if in_file is not None:
                found.append(in_file)
        return all(np.array_equal(each[: len(image)], image) for each in found)
