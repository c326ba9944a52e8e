"""Faults at an exact step: a hook into the interpreter of effects, and processes that stop.

The other programs import it; it is none by itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ptstore_mpi import Store
from ptstore_mpi.protocol.effects import AwaitTokens, Effect, Send, StartGet, StartWrite
from ptstore_mpi.protocol.placement import place
from ptstore_mpi.testing.bench import Bench, Space, Tokens

PATIENCE_S = 20.0

Step = Callable[[Effect], bool]


def sends(kind: type) -> Step:
    """Return what recognises the sending of a request of this kind."""
    return lambda effect: isinstance(effect, Send) and isinstance(effect.message, kind)


def does(kind: type) -> Step:
    """Return what recognises an effect of this kind."""
    return lambda effect: isinstance(effect, kind)


@contextmanager
def at_step(
    store: Store, step: Step, act: Callable[[], None], *, after: bool = False
) -> Iterator[None]:
    """Call ``act`` once: just before, or just after, the first such effect is carried out."""
    transport = store._transport
    execute = transport._execute
    seen = []

    def hooked(effect):
        first = not seen and step(effect)
        if first:
            seen.append(effect)
            if not after:
                act()
        answer = execute(effect)
        if first and after:
            act()
        return answer

    transport._execute = hooked
    try:
        yield
    finally:
        del transport._execute
    assert seen, "the operation never came to this step"


def await_state(pid: int, states: str) -> None:
    """Wait until a process is in one of these states of ``/proc/<pid>/stat``."""
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in states:
        assert time.monotonic() < deadline, f"process {pid} never came to a state of {states!r}"
        time.sleep(1e-3)


def stop(pid: int) -> None:
    """Stop another process; it stands still when this returns."""
    os.kill(pid, signal.SIGSTOP)
    await_state(pid, "T")


def go_on(pid: int) -> None:
    """Continue a stopped process."""
    os.kill(pid, signal.SIGCONT)


def prompts_of_first_server(bench: Bench, space: Space, count: int, length: int) -> list[Tokens]:
    """Return random prompts whose increments go to server 0 of 2 under placement `random`."""
    found: list[Tokens] = []
    while len(found) < count:
        prompt = bench.tokens(length)
        first = space.namespace.block_hashes(prompt)[0].tobytes()
        if place("random", first, server_count=2, near=(), free_bytes={}) == 0:
            found.append(prompt)
    return found


class AbortError(Exception):
    """What an engine might raise in the middle of an operation."""


@contextmanager
def aborted_at(store: Store, number: int, *, after: bool) -> Iterator[list[str]]:
    """Raise `AbortError` at the effect of this number, if the operation comes that far.

    ``after`` raises once the effect was carried out, unless its answer names transfers: that must
    reach the operation. Yields the names of the effects so far.
    """
    transport = store._transport
    execute = transport._execute
    seen: list[str] = []

    def hooked(effect):
        kind = type(effect.message).__name__ if isinstance(effect, Send) else type(effect).__name__
        seen.append(kind)
        here = len(seen) > number
        if here and (not after or isinstance(effect, StartGet | StartWrite | AwaitTokens)):
            raise AbortError
        answer = execute(effect)
        if here:
            raise AbortError
        return answer

    transport._execute = hooked
    try:
        yield seen
    finally:
        del transport._execute
