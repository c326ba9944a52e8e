"""The RMA window over all arenas, in one passive epoch from open to close.

Owns the epoch, and what to do at the end with a Get that never completed. Never waits for one:
that is the caller's, under a deadline.
"""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

from ptstore_mpi.arena import Memory
from ptstore_mpi.idle import Idle
from ptstore_mpi.transport.ending import end_without_finalize

__all__ = ["Window"]


class Window:
    """One window over the arenas of all servers. Construction and `close` are collective.

    Parameters
    ----------
    memory
        This rank's arena; None on a client.
    comm
        The job's communicator.
    """

    def __init__(self, memory: Memory | None, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._memory = memory
        self._unended: list[tuple[MPI.Request, Memory]] = []
        self._window = MPI.Win.Create(memory, 1, comm=comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def get(self, rank: int, offset: int, target: Memory) -> MPI.Request:
        """Start an `MPI_Rget` of ``len(target)`` bytes at ``offset`` of the arena of ``rank``."""
        return self._window.Rget([target, len(target), MPI.BYTE], rank, offset)

    def set_aside(self, request: MPI.Request, target: Memory) -> None:
        """Keep a Get that outlived its deadline, and where it may still land."""
        self._unended.append((request, target))

    def close(self, idle: Idle) -> None:
        """Free the window, or leave it where a Get never ended.

        `MPI_Win_unlock_all` waits for every Get, without a deadline, and `MPI_Win_free` for every
        rank. So the ranks first agree that no Get is left over. Where one is, the window stays
        as it is, with the memory it may still write, until the process ends. `MPI_Finalize`
        would wait for it too, or fail (MPICH over OFI does): the processes meet once more at
        their very end, when nothing is left to be lost, and end without it.
        """
        left = np.array([sum(not request.Test() for request, _ in self._unended)], np.int64)
        most = np.empty_like(left)
        idle.until(self._comm.Iallreduce(left, most, op=MPI.MAX).Test)
        if not most[0]:
            self._window.Unlock_all()
            self._window.Free()
            return
        if self._comm.Get_rank() == 0:
            print(
                "ptstore: a Get of the probe has never ended: its window cannot be freed, and "
                "the processes will end without MPI_Finalize",
                file=sys.stderr,
                flush=True,
            )
        if not _left_over and self._comm.Get_size() == MPI.COMM_WORLD.Get_size():
            end_without_finalize(self._comm)
        _left_over.append(self)


_left_over: list[Window] = []
