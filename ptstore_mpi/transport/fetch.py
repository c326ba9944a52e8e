"""How the bytes of another node's arena get here: the one difference between `mpi` and `p2p`.

::

    mpi   client <== MPI_Rget ==== window            the server only makes progress
    p2p   client --- ask --------> server            its receive is posted already
                 <== Isend ======= arena             straight from the arena, no copy

Nothing here blocks, and nothing judges: whether bytes that were read late may be trusted is the
load's affair (P12). Every ask is answered, after its lease's end too, because the receive behind
it holds staging memory (P13); one that cannot be answered ends the job.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod

import numpy as np
from mpi4py import MPI

from ptstore_mpi import _native
from ptstore_mpi.arena import Memory
from ptstore_mpi.errors import TransportError
from ptstore_mpi.transport.mpi_channel import Channel
from ptstore_mpi.transport.window import Window

__all__ = ["FetchServer", "Fetcher", "MessageFetcher", "WindowFetcher"]

_ASK = struct.Struct("<QQI")  # offset, bytes, tag of the answer; a CRC-32C of these follows
_CRC_BYTES = 4
_BATCH_COUNT = 64
_FIRST_TAG = 2  # below are those of channels


class Fetcher(ABC):
    """Starts reads of arenas that are not mapped here.

    Attributes
    ----------
    name
        Name of the transport it makes.
    """

    name: str

    @abstractmethod
    def start(self, rank: int, offset: int, target: Memory) -> MPI.Request:
        """Start reading ``len(target)`` bytes at ``offset`` of the arena of ``rank``."""

    @abstractmethod
    def flush(self) -> bool:
        """Make progress on what was sent; return whether all of it has left."""


class WindowFetcher(Fetcher):
    """Reads by `MPI_Rget`."""

    name = "mpi"

    def __init__(self, window: Window) -> None:
        self._window = window

    def start(self, rank: int, offset: int, target: Memory) -> MPI.Request:
        """Start an `MPI_Rget`."""
        return self._window.get(rank, offset, target)

    def flush(self) -> bool:
        """Return True: nothing is sent."""
        return True


class MessageFetcher(Fetcher):
    """Reads by asking the owner.

    Parameters
    ----------
    comm
        A communicator that carries nothing else: asks one way, bytes the other.
    """

    name = "p2p"

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._asks = Channel(comm)
        self._tag_count: int = (comm.Get_attr(MPI.TAG_UB) or 32767) + 1 - _FIRST_TAG
        self._started_count = 0

    def start(self, rank: int, offset: int, target: Memory) -> MPI.Request:
        """Post the receive, then ask for its bytes."""
        # Answers of one owner come in the order of the asks, so a tag that comes round again
        # while its first use is still under way cannot be taken for it either.
        tag = _FIRST_TAG + self._started_count % self._tag_count
        self._started_count += 1
        request = self._comm.Irecv([target, MPI.BYTE], rank, tag)
        ask = _ASK.pack(offset, len(target), tag)
        self._asks.send(rank, ask + _crc(ask))
        return request

    def flush(self) -> bool:
        """Make progress on asks; return whether all have left."""
        return self._asks.flush()


class FetchServer:
    """Answers the asks of `MessageFetcher`.

    Parameters
    ----------
    comm
        The communicator of the fetchers.
    memory
        The arena's bytes.
    """

    def __init__(self, comm: MPI.Comm, memory: Memory) -> None:
        self._comm = comm
        self._asks = Channel(comm)
        self._memory = memory
        # MPI reads the arena until a send is complete: a request holds on to its bytes.
        self._requests: list[MPI.Request] = []
        self._sending: list[Memory] = []

    def step(self) -> bool:
        """Answer what was asked and make progress on answers; return whether there was an ask."""
        self.flush()
        for taken in range(_BATCH_COUNT):
            arrived = self._asks.poll()
            if arrived is None:
                return taken > 0
            self._answer(*arrived)
        return True

    def flush(self) -> bool:
        """Make progress on answers; return whether none is under way."""
        ended = MPI.Request.Testsome(self._requests) if self._requests else None
        if ended:
            gone = set(ended)
            kept = [place for place in range(len(self._requests)) if place not in gone]
            self._requests = [self._requests[place] for place in kept]
            self._sending = [self._sending[place] for place in kept]
        return not self._requests

    def _answer(self, client: int, data: bytearray) -> None:
        ask = bytes(data[: _ASK.size])
        if len(data) != _ASK.size + _CRC_BYTES or data[_ASK.size :] != _crc(ask):
            raise TransportError(
                f"rank {client} asked for bytes in {len(data)} bytes that are not an ask; the "
                f"receive behind it can never end"
            )
        offset, nbytes, tag = _ASK.unpack(ask)
        size = len(self._memory)
        if offset + nbytes > size:
            raise TransportError(
                f"rank {client} asked for {nbytes} bytes at {offset} of an arena of {size}"
            )
        part = self._memory[offset : offset + nbytes]
        self._requests.append(self._comm.Isend([part, MPI.BYTE], client, tag))
        self._sending.append(part)


def _crc(ask: bytes) -> bytes:
    return _native.crc32c(np.frombuffer(ask, np.uint8)).to_bytes(_CRC_BYTES, "little")
