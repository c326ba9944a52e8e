"""The end of processes that must not call `MPI_Finalize`: all together, or at once where one fails.

Owns the last meeting, and what is known of this process's exit code by then. Never lets a process
that fails wait for the others.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from types import TracebackType

from mpi4py import MPI

__all__ = ["end_without_finalize"]

_POLL_S = 1e-3
_LAST_WORDS_S = 0.3  # launchers forward what was printed some time after the abort, or never


def end_without_finalize(comm: MPI.Intracomm) -> None:
    """End every process of the job with exit code 0 once all have come to their end. Collective.

    One that ends with an error aborts the job at once, with its own code. Under
    ``python -m mpi4py`` every error is known; without it only uncaught exceptions are, and not
    `sys.exit`.

    Parameters
    ----------
    comm
        All processes of ``COMM_WORLD``; it is duplicated.
    """
    _exit_code.listen()
    atexit.register(_end_together, comm.Dup())


class _ExitCode:
    """The code that this process will end with: an exit hook is not told."""

    def __init__(self) -> None:
        self.value = 0

    def listen(self) -> None:
        """Learn it from who knows: ``python -m mpi4py`` says so to mpi4py, Python to a hook."""
        tell, show = getattr(MPI, "_set_abort_status", None), sys.excepthook

        def set_abort_status(status: int) -> None:
            self.value = status
            if tell is not None:
                tell(status)

        def excepthook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self.value = self.value or 1
            show(kind, error, trace)

        MPI._set_abort_status = set_abort_status
        sys.excepthook = excepthook


_exit_code = _ExitCode()


def _end_together(comm: MPI.Intracomm) -> None:
    if MPI.Is_finalized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if _exit_code.value:
        time.sleep(_LAST_WORDS_S)
        MPI.COMM_WORLD.Abort(_exit_code.value)
    request = comm.Ibarrier()  # no deadline: somebody may still be writing results
    while not request.Test():
        time.sleep(_POLL_S)
    # What MPI says about an abort would look like a crash.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    MPI.COMM_WORLD.Abort(0)
