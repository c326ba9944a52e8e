"""Deadlines for collective phases: a call that hangs inside MPI has no other one."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from mpi4py import MPI

__all__ = ["abort", "abort_after", "before_abort"]

_LAST_WORDS_S = 0.3  # launchers forward what was printed some time after the abort, or never
_KILL_AFTER_S = 3.0

_last_act: Callable[[str], None] | None = None


def before_abort(act: Callable[[str], None] | None) -> None:
    """Have ``act(message)`` called by `abort` first, on the rank that aborts; None: nothing."""
    global _last_act
    _last_act = act


def abort(message: str, *, code: int = 1) -> NoReturn:
    """Print ``message`` and end the whole job with an exit code.

    A call that hangs inside MPI may hold the lock that `MPI_Abort` wants: then the process ends
    without it, and its launcher ends the others.
    """
    if _last_act is not None:
        with contextlib.suppress(Exception):
            _last_act(message)
    killer = threading.Timer(_KILL_AFTER_S, os._exit, (code,))
    killer.daemon = True
    killer.start()
    print(f"ptstore: rank {MPI.COMM_WORLD.Get_rank()}: {message}", file=sys.stderr, flush=True)
    time.sleep(_LAST_WORDS_S)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # some launchers let the caller of Abort run on for a while


@contextmanager
def abort_after(
    seconds: float,
    phase: str,
    advice: str = "close_timeout_s sets this limit",
    *,
    evidence: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Abort the job, with a message that names ``phase``, if the block takes too long.

    ``evidence`` is called before, with the message.
    """
    message = (
        f"phase {phase!r} did not end within {seconds:g} s: a rank is missing, stopped or hangs "
        f"inside MPI; the job is aborted ({advice})"
    )

    def give_up() -> None:
        if evidence is not None:
            evidence(message)
        abort(message)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
