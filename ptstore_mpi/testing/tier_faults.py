"""A file tier to put faults in: the real system calls with faults among them, and no threads.

Everything else is the code that a job runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ptstore_mpi.tiers.directory import Leftovers, TierDirectory
from ptstore_mpi.tiers.file_system import examine
from ptstore_mpi.tiers.files import Files
from ptstore_mpi.tiers.settings import TierSettings
from ptstore_mpi.tiers.slab_store import SlabStore
from ptstore_mpi.tiers.workers import Scratch, Task, Workers
from ptstore_mpi.types import whole_pages

__all__ = ["Fault", "FaultyFiles", "HandWorkers", "open_store"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in one system call.

    Attributes
    ----------
    kind
        ``error``: it fails with the errno ``number``. ``short``: it moves at most ``number``
        bytes. ``stuck``: it moves none. Of writes, ``lost``: it claims to have written. Of reads
        and writes, ``bent``: the ``number``-th byte is another (modulo how many there are).
    number
        See ``kind``.
    """

    kind: Literal["error", "short", "stuck", "lost", "bent"]
    number: int = 0


class FaultyFiles(Files):
    """The system calls, with faults as planned.

    Attributes
    ----------
    planned
        Faults of the next calls of each method, by its name: one per call.
    fired_count
        Faults that have come about.
    """

    def __init__(self, *, direct: bool = False) -> None:
        super().__init__(direct=direct)
        self.planned: defaultdict[str, deque[Fault | None]] = defaultdict(deque)
        self.fired_count = 0

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """As in `Files`."""
        self._next("allocate")
        super().allocate(descriptor, offset, nbytes)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """As in `Files`."""
        nbytes = sum(view.nbytes for view in views)
        match self._next("write"):
            case Fault("stuck"):
                return 0
            case Fault("lost"):
                return nbytes
            case Fault("short", number):
                return min(super().write(descriptor, self._cut(views, number), offset), number)
            case Fault("bent", number):
                wrote = super().write(descriptor, views, offset)
                _bend(descriptor, offset + number % nbytes)
                return wrote
        return super().write(descriptor, views, offset)

    def read(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """As in `Files`."""
        match self._next("read"):
            case Fault("stuck"):
                return 0
            case Fault("short", number):
                return min(super().read(descriptor, self._cut(views, number), offset), number)
            case Fault("bent", number):
                done = super().read(descriptor, views, offset)
                at = number % max(done, 1)
                for view in _first(views, done):
                    if at < view.nbytes:
                        view[at] ^= 1
                        break
                    at -= view.nbytes
                return done
        return super().read(descriptor, views, offset)

    def _cut(self, views: Sequence[memoryview], most: int) -> list[memoryview]:
        """Return the first ``most`` bytes, or as many pages as direct I/O needs for these."""
        return _first(views, whole_pages(most) if self.direct else most)

    def _next(self, method: str) -> Fault | None:
        planned = self.planned[method]
        fault = planned.popleft() if planned else None
        if fault is not None:
            self.fired_count += 1
            if fault.kind == "error":
                raise OSError(fault.number, os.strerror(fault.number))
        return fault


class HandWorkers(Workers):
    """No threads: tasks are carried out one at a time when `run_one` says so."""

    def __init__(self) -> None:
        super().__init__(thread_count=0)
        self.waiting: list[Task] = []
        self._scratch = Scratch()

    def submit(self, task: Task) -> None:
        """Keep a task until its turn."""
        self.waiting.append(task)

    def run_one(self, pick: int = 0) -> Task:
        """Carry out the ``pick``-th of the waiting tasks."""
        task = self.waiting.pop(pick)
        self._carry_out(task, self._scratch)
        return task

    def close(self) -> None:
        """Cancel what waits."""
        super().close()
        while self.waiting:
            self.run_one()


def open_store(
    settings: TierSettings,
    *,
    files: Files | None = None,
    workers: Workers | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SlabStore:
    """Open a tier with system calls, threads and a clock of one's own.

    Parameters
    ----------
    settings
        Of the tier.
    files, workers, clock
        As in `SlabStore`; default: the real ones.
    """
    facts = examine(settings.directory, settings.direct)
    return SlabStore(
        settings,
        TierDirectory.create(settings.directory, "test"),
        files=Files(direct=facts.direct) if files is None else files,
        workers=Workers(settings.io_threads) if workers is None else workers,
        facts=facts,
        leftovers=Leftovers(),
        clock=clock,
    )


def _first(views: Sequence[memoryview], most: int) -> list[memoryview]:
    """Return the first ``most`` bytes of ``views``."""
    first = []
    for view in views:
        first.append(view[:most])
        most -= first[-1].nbytes
    return [view for view in first if view.nbytes]


_bending = threading.Lock()


def _bend(descriptor: int, offset: int) -> None:
    """Flip a bit of a file; direct I/O or not."""
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    with _bending:
        plain = os.open(path, os.O_RDWR)
        byte = os.pread(plain, 1, offset)
        os.pwrite(plain, bytes([byte[0] ^ 1]), offset)
        os.fsync(plain)
        os.close(plain)
