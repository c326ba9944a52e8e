"""Fetches by messages: every ask is answered with its own bytes, or fails loudly."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from ptstore_mpi.errors import TransportError
from ptstore_mpi.transport.fetch import FetchServer, MessageFetcher
from ptstore_mpi.transport.mpi_channel import Channel

NBYTES = 1 << 20


class Ends:
    """Both ends in one process, over a communicator of one rank."""

    def __init__(self):
        self.comm = MPI.COMM_SELF.Dup()
        self.arena = np.random.default_rng(3).integers(0, 256, NBYTES, dtype=np.uint8)
        self.fetcher = MessageFetcher(self.comm)
        self.server = FetchServer(self.comm, self.arena)

    def serve(self):
        for _ in range(1000):
            self.server.step()


@pytest.fixture
def ends():
    both = Ends()
    yield both
    both.comm.Free()


def test_asks_are_answered_in_any_number_and_size(ends):
    pieces = [(0, 1), (4096, 4096), (17, 100_000), (NBYTES - 5, 5), (0, NBYTES)] * 20
    started = []
    for offset, nbytes in pieces:
        target = np.zeros(nbytes, np.uint8)
        started.append((ends.fetcher.start(0, offset, target), target))
    ends.serve()
    for (offset, nbytes), (request, target) in zip(pieces, started, strict=True):
        assert request.Test()
        assert np.array_equal(target, ends.arena[offset : offset + nbytes])
    assert ends.fetcher.flush()
    assert ends.server.flush()


def test_bytes_outside_the_arena(ends):
    request = ends.fetcher.start(0, NBYTES - 4, np.zeros(5, np.uint8))
    with pytest.raises(TransportError, match=f"5 bytes at {NBYTES - 4} of an arena of {NBYTES}"):
        ends.serve()
    request.Cancel()
    request.Wait()


@pytest.mark.parametrize("damage", [b"", b"x", bytes(24), bytes(23) + b"\x01", bytes(100)])
def test_a_damaged_ask(ends, damage):
    Channel(ends.comm).send(0, damage)
    with pytest.raises(TransportError, match=f"in {len(damage)} bytes that are not an ask"):
        ends.serve()
