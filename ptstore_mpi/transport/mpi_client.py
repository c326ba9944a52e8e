"""Transports `mpi` and `p2p`, client side: typed messages, data of stores, and a `Fetcher`.

The routing rule is not an optimisation: what lies on this node is read and written through the
mapped arena by the shared interpreter; only another node's bytes come this way. A Get from the
own node would wait for the server to enter MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from mpi4py import MPI

from ptstore_mpi.arena import Memory
from ptstore_mpi.config import Config
from ptstore_mpi.errors import TransportError
from ptstore_mpi.idle import Idle
from ptstore_mpi.protocol.effects import Operation
from ptstore_mpi.protocol.messages import Reply, Request
from ptstore_mpi.protocol.wire import decode_reply, encode
from ptstore_mpi.transport.base import ClientTransport
from ptstore_mpi.transport.fetch import Fetcher
from ptstore_mpi.transport.mpi_channel import Channel
from ptstore_mpi.transport.stall import StallWatch
from ptstore_mpi.types import ServerIndex

__all__ = ["MpiClientTransport"]

T = TypeVar("T")

# Over TCP the bytes of a Get move only while *both* ends turn in MPI: napping between its
# fragments halves the rate. A transfer that has been silent for this long is not moving anyway.
_TRANSFER_SPIN_S = 0.1


class MpiClientTransport(ClientTransport):
    """One client rank of an MPI job.

    Parameters
    ----------
    arenas
        Mapped arenas of this node's servers.
    fetcher
        Reads what is not mapped here; its name is the transport's.
    control, data
        Communicators of requests and replies, and of the data of stores.
    server_ranks
        Rank of each server in all of these.
    config
        Settings of the job.
    copy_threads
        Threads of a copy.
    stall
        Told that operations get on.
    is_populated
        Whether all pages of the arenas exist.
    """

    def __init__(
        self,
        arenas: dict[ServerIndex, Memory],
        *,
        fetcher: Fetcher,
        control: MPI.Comm,
        data: MPI.Comm,
        server_ranks: tuple[int, ...],
        config: Config,
        copy_threads: int,
        stall: StallWatch,
        is_populated: Callable[[], bool],
    ) -> None:
        super().__init__(
            arenas,
            staging_bytes=config.staging_bytes,
            copy_threads=copy_threads,
            is_populated=is_populated,
        )
        self.name = fetcher.name
        self._fetcher = fetcher
        self._channel = Channel(control)
        self._data = data
        self._tag_count = (data.Get_attr(MPI.TAG_UB) or 32767) + 1
        self._server_ranks = server_ranks
        self._close_timeout_s = config.close_timeout_s
        self._idle = Idle(config)
        self._transfer_idle = Idle(config, spin_s=_TRANSFER_SPIN_S)
        self._in_flight: dict[int, tuple[MPI.Request, Memory]] = {}
        self._next_token = 0
        self._stall = stall

    def _perform(self, operation: Operation[T]) -> T:
        with self._stall.busy("an operation of the store"):
            return super()._perform(operation)

    def now(self) -> float:
        """Return monotonic time, s."""
        return time.monotonic()

    def send(self, server: ServerIndex, message: Request) -> None:
        """Send a request; never blocks."""
        self._channel.send(self._server_ranks[server], encode(message))

    def receive(self, until: float) -> Reply | None:
        """Return the next reply of any server, or None once ``until`` has passed."""
        self._idle.reset()
        while True:
            self._stall.beat()
            arrived = self._channel.poll()
            if arrived is not None:
                reply = self._decoded(arrived[1])
                if reply is not None:
                    return reply
                continue
            self._channel.flush()
            if self.now() >= until:
                return None
            self._idle.wait()

    def _decoded(self, data: bytearray) -> Reply | None:
        try:
            return decode_reply(data)
        except msgspec.DecodeError:
            self.malformed_count += 1
            return None  # as if it had been lost: the request is repeated

    def start_get(self, server: ServerIndex, offset: int, target: Memory) -> int:
        """Start to fetch from another node's arena."""
        return self._track(self._fetcher.start(self._server_ranks[server], offset, target), target)

    def start_write(self, server: ServerIndex, op: int, *, staging_offset: int, nbytes: int) -> int:
        """Start a synchronous-mode send into the receive that the owner posted for ``op``."""
        source = self._staging(staging_offset, nbytes)
        request = self._data.Issend(
            [source, nbytes, MPI.BYTE], self._server_ranks[server], op % self._tag_count
        )
        return self._track(request, source)

    def await_tokens(self, until: float) -> tuple[int, ...]:
        """Return transfers that have completed: at least one, or () once ``until`` has passed."""
        self._transfer_idle.reset()
        while True:
            self._stall.beat()
            done = tuple(token for token, (request, _) in self._in_flight.items() if request.Test())
            if done:
                for token in done:
                    del self._in_flight[token]
                return done
            self._flush()
            if self.now() >= until:
                return ()
            self._transfer_idle.wait()

    def discard_replies(self) -> None:
        """Take, and forget, answers that came too late: their senders wait for that at the end."""
        while self._channel.poll() is not None:
            pass

    def close(self) -> None:
        """Flush what was sent; raise if transfers are still in flight.

        Raises
        ------
        TransportError
            A transfer has not ended, so its memory cannot be given back; or a server does not
            take the last messages within ``close_timeout_s``.
        """
        until = self.now() + self._close_timeout_s
        self._idle.until(lambda: self._flush() or self.now() >= until)
        if not self._flush():
            raise TransportError(
                f"a server has not taken the last messages within {self._close_timeout_s:g} s "
                f"(close_timeout_s): it is stopped or hangs"
            )
        if self._in_flight:
            raise TransportError(f"{len(self._in_flight)} transfer(s) still in flight at close")
        self._let_memory_go()

    def _flush(self) -> bool:
        requests_left, asks_left = self._channel.flush(), self._fetcher.flush()
        return requests_left and asks_left

    def _track(self, request: MPI.Request, memory: Memory) -> int:
        self._next_token += 1
        self._in_flight[self._next_token] = (request, memory)
        return self._next_token
