"""Small messages over one communicator: non-blocking both ways, in order per sender."""

from __future__ import annotations

from collections import deque

from mpi4py import MPI

__all__ = ["Channel"]

_TAG = 1


class Channel:
    """Sends and receives byte strings of any length between the ranks of ``comm``.

    Nothing here blocks: a long message may take the rendezvous path, and waiting for its sender
    would freeze the server behind a client that computes.

    Parameters
    ----------
    comm
        A communicator that carries nothing else.
    synchronous
        Let a send complete only when its receiver has taken it. Then "all my sends are complete"
        means that nothing is under way.
    """

    def __init__(self, comm: MPI.Comm, *, synchronous: bool = False) -> None:
        self._comm = comm
        self._start_send = comm.Issend if synchronous else comm.Isend
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._receives: deque[tuple[int, bytearray, MPI.Request]] = deque()
        self._status = MPI.Status()
        self.sent_count = 0
        self.received_count = 0

    def send(self, rank: int, data: bytes) -> None:
        """Start sending ``data``; it is kept alive until it has left."""
        if self._sends:
            self.flush()
        request = self._start_send([data, MPI.BYTE], rank, _TAG)
        self.sent_count += 1
        if not request.Test():
            self._sends.append((request, data))

    def flush(self) -> bool:
        """Make progress on sends; return whether all have completed."""
        self._sends = [(request, data) for request, data in self._sends if not request.Test()]
        return not self._sends

    def poll(self) -> tuple[int, bytearray] | None:
        """Return (source rank, data) of the next message, or None where none is complete."""
        message = self._comm.Improbe(MPI.ANY_SOURCE, _TAG, self._status)
        if message is not None:
            data = bytearray(self._status.Get_count(MPI.BYTE))
            source = self._status.Get_source()
            self._receives.append((source, data, message.Irecv([data, MPI.BYTE])))
        if self._receives and self._receives[0][2].Test():
            source, data, _ = self._receives.popleft()
            self.received_count += 1
            return source, data
        return None
