"""What a job that is killed must not leave behind: names in shared memory, ranks nobody waits for.

Never calls MPI: everything here is about this process and its host.

MPICH connects the ranks of a node through files ``/dev/shm/mpich_shm_*`` and takes their names
away only in ``MPI_Finalize``, which a job that is aborted or killed never reaches. The names can
go much earlier: inside ``MPI_Init`` every rank of the node marks in the shared memory itself that
it has mapped it, and none returns before it has seen the marks of all. From then on nobody opens
these files again, and finalizing without the names is clean.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

__all__ = ["LauncherWatch", "unlink_mpi_names"]

_MPICH_NAMES = "/dev/shm/mpich_shm_"
_LOOK_S = 1.0


def unlink_mpi_names() -> None:
    """Take away the names of the files through which MPICH shares memory with this process.

    Call it after ``MPI_Init``, on every rank or on some; doing it twice changes nothing. Without
    MPICH, or without ``/proc``, there is nothing to do. Collective: no.
    """
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for name in {line[line.index("/") :] for line in mapped if _MPICH_NAMES in line}:
        if not name.endswith(" (deleted)"):
            with contextlib.suppress(OSError):  # another rank of the node was faster
                Path(name).unlink()


class LauncherWatch:
    """Ends this process soon after the one that started it is gone.

    A launcher that dies takes its ranks along, but for one way to go: where the process that
    started a rank is itself killed without a chance to act, its ranks compute on, keep their
    memory, and wait for ever for each other. A thread looks once a second whether this process
    still has the parent it had at first; it never calls MPI. A rank that is stopped looks when
    it is continued.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ptstore-launcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            if os.getppid() != self._parent:
                with contextlib.suppress(OSError):
                    print(
                        f"ptstore: process {os.getpid()} ends: the one that started it "
                        f"({self._parent}) is gone",
                        file=sys.stderr,
                        flush=True,
                    )
                os._exit(1)
