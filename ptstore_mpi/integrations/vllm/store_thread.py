"""One thread that performs the store's operations of an engine, most urgent first.

Owns their order. An engine must not wait for the store: it submits an operation and looks for its
end later. Work comes in slices: whatever is more urgent goes between two slices of a long save.
Never knows an engine, nor what an operation does.

::

    submit --> [held] --> waiting --> a slice --> a slice ... --> done: result, or error
                  |          |            `--- between slices: waiting again
                  `----------`---- abandon, cancel -------------> done: cancelled
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from ptstore_mpi.errors import ClosedError

__all__ = ["LOAD", "MATCH", "NOTE", "SAVE", "Slices", "StoreThread", "Task", "at_once"]

T = TypeVar("T")

MATCH, LOAD, SAVE, NOTE = range(4)
"""Urgencies: what the next token waits for comes first."""

LONGEST_HOLD_S = 0.005
"""A held task goes on after this time: an engine that never says that its step ended loses
nothing but the order."""

Slices = Generator[None, None, T]
"""Work that yields wherever something more urgent may go first, and returns its result."""


class Task(Generic[T]):
    """One submitted operation.

    Attributes
    ----------
    is_done
        Whether it has ended, in whatever way; nothing of it runs any more.
    is_unwanted
        Whether somebody has asked for its end.
    is_cancelled
        Whether it was ended before it was through.
    submitted_s
        When it was, on the monotonic clock.
    error
        What it raised; None where it did not.
    """

    def __init__(self, work: Slices[T], urgency: int) -> None:
        self.urgency = urgency
        self.is_done = False
        self.is_cancelled = False
        self.is_unwanted = False
        self.error: BaseException | None = None
        self.submitted_s = time.monotonic()
        self._work = work
        self._value: T | None = None

    @property
    def result(self) -> T | None:
        """What it returned; None where it was cancelled. Raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._value

    def run_slice(self) -> bool:
        """Run one slice and tell whether it was the last. The thread alone calls it."""
        try:
            next(self._work)
        except StopIteration as stop:
            self._value = stop.value
        except BaseException as error:
            self.error = error
        else:
            return False
        return True

    def drop(self) -> None:
        """Close the work at the slice boundary where it stands."""
        self.is_cancelled = True
        try:
            self._work.close()
        except BaseException as error:
            self.error = error


class StoreThread:
    """The thread; it lives until `close`.

    Collective: nothing here is. Any thread may call.
    """

    def __init__(self, name: str = "ptstore") -> None:
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, Task[Any]]] = []
        self._held: list[Task[Any]] = []
        self._running: Task[Any] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Slices[T], urgency: int, *, hold: bool = False) -> Task[T]:
        """Perform ``work`` after everything more urgent, and after what came before it.

        Parameters
        ----------
        work
            A generator; it is closed at a slice boundary where the task is cancelled.
        urgency
            `MATCH`, `LOAD`, `SAVE` or `NOTE`.
        hold
            Not before `release_held`, or `LONGEST_HOLD_S`.

        Raises
        ------
        ClosedError
            The thread was closed.
        """
        task = Task(work, urgency)
        with self._changed:
            if self._closing:
                raise ClosedError(
                    "expected a store that is attached, it was detached: use engines within "
                    "`with attach(store):`"
                )
            if hold:
                self._held.append(task)
            else:
                self._push(task)
            self._changed.notify_all()
        return task

    def release_held(self) -> None:
        """Let all held tasks go on."""
        with self._changed:
            if self._held:
                self._release(self._held)
                self._changed.notify_all()

    def abandon(self, tasks: list[Task[Any]]) -> None:
        """End tasks that have not ended: at once, but the one that runs after its slice."""
        with self._changed:
            self._abandon(tasks)

    def cancel(self, tasks: list[Task[Any]]) -> None:
        """End tasks that have not ended; return when nothing of them runs any more."""
        with self._changed:
            self._abandon(tasks)
            self._changed.wait_for(lambda: all(task.is_done for task in tasks))

    def wait(self, tasks: list[Task[Any]], timeout_s: float) -> bool:
        """Wait until all of them have ended, at most ``timeout_s``; tell whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: all(task.is_done for task in tasks), timeout_s)

    def wait_for_any(self, tasks: list[Task[Any]], timeout_s: float) -> None:
        """Wait until one of them has ended, at most ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: any(task.is_done for task in tasks), timeout_s)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition()`` holds, which `notify` or the end of a task makes true."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was submitted so far has ended, held or not; False: not in time."""
        self.release_held()
        last = self.submit(at_once(lambda: None), NOTE)  # nothing is less urgent
        return self.wait([last], timeout_s)

    def notify(self) -> None:
        """Wake who waits in `wait_until`: work that gets on calls it."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel what has not ended and end the thread."""
        with self._changed:
            self._closing = True
            running = [] if self._running is None else [self._running]
            self._abandon([*self._held, *(entry[2] for entry in self._waiting), *running])
        self._thread.join()

    def _abandon(self, tasks: list[Task[Any]]) -> None:
        for task in tasks:
            task.is_unwanted = not task.is_done
            if task is not self._running and not task.is_done:
                task.drop()
                task.is_done = True
        self._held = [task for task in self._held if not task.is_done]
        self._waiting = [entry for entry in self._waiting if not entry[2].is_done]
        heapq.heapify(self._waiting)
        self._changed.notify_all()

    def _push(self, task: Task[Any]) -> None:
        heapq.heappush(self._waiting, (task.urgency, next(self._order), task))

    def _release(self, tasks: list[Task[Any]]) -> None:
        released, self._held = set(tasks), [task for task in self._held if task not in tasks]
        for task in sorted(released, key=lambda task: task.submitted_s):
            self._push(task)

    def _run(self) -> None:
        while True:
            task = self._next()
            if task is None:
                return
            ended = task.run_slice()
            with self._changed:
                self._running = None
                if task.is_unwanted and not ended:
                    task.drop()
                    ended = True
                task.is_done = ended
                if ended:
                    self._changed.notify_all()
                else:
                    self._push(task)

    def _next(self) -> Task[Any] | None:
        with self._changed:
            while True:
                now = time.monotonic()
                self._release(
                    [task for task in self._held if now - task.submitted_s >= LONGEST_HOLD_S]
                )
                if self._waiting:
                    self._running = heapq.heappop(self._waiting)[2]
                    return self._running
                if self._closing:
                    return None
                self._changed.wait(LONGEST_HOLD_S if self._held else None)


def at_once(work: Callable[[], T]) -> Slices[T]:
    """Return work of one slice."""
    result = work()
    yield from ()
    return result
