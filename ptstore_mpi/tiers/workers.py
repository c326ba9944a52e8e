"""Threads that carry tasks out for one caller, who only submits and collects and never waits.

A task belongs to the caller before `Workers.submit` and after `Workers.ended` has returned it, to
a thread in between. The threads never call MPI, and no exception leaves a task.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections import deque
from typing import Protocol

from ptstore_mpi.types import whole_pages

__all__ = ["Scratch", "Task", "Workers"]


class Scratch:
    """Page-aligned memory of one thread, for headers.

    It is shared memory, like the arena: with `O_DIRECT`, private pages must not be forked while
    the kernel reads or writes them.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, whole_pages(1))

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` that stay as they are until the next call."""
        if len(self._memory) < nbytes:
            self._memory = mmap.mmap(-1, whole_pages(nbytes))
        return memoryview(self._memory)[:nbytes]


class Task(Protocol):
    """Something that a thread does; never raises."""

    def run(self, scratch: Scratch, stop: threading.Event) -> None:
        """Do it; once ``stop`` is set, not, or end as soon as the system call under way has."""


class Workers:
    """The threads and the two queues between them and the caller.

    Parameters
    ----------
    thread_count
        How many.
    """

    def __init__(self, thread_count: int) -> None:
        self._stop = threading.Event()
        self._waiting: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._ended: deque[Task] = deque()
        self._threads = [
            # Daemons: a process that is ended without `close` must not wait for them.
            threading.Thread(target=self._work, name=f"ptstore-tier-{i}", daemon=True)
            for i in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        """Have a task carried out."""
        self._waiting.put(task)

    def ended(self) -> list[Task]:
        """Return the tasks that have ended since the last call, in the order of their ends."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """End the threads: what waits is cancelled, the system calls under way are awaited."""
        self._stop.set()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        scratch = Scratch()
        while (task := self._waiting.get()) is not None:
            self._carry_out(task, scratch)

    def _carry_out(self, task: Task, scratch: Scratch) -> None:
        task.run(scratch, self._stop)
        self._ended.append(task)
