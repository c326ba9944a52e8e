"""Transports `mpi` and `p2p`, server side: the loop that feeds the handler and makes progress.

Only non-blocking calls: probe, matched receive, send, test. Over TCP and shared memory the target
of a Get must enter MPI for the Get to progress; this loop does, and naps in between. With `p2p`
it also answers the asks for bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from mpi4py import MPI

from ptstore_mpi.arena import Arena
from ptstore_mpi.config import Config
from ptstore_mpi.idle import Idle
from ptstore_mpi.protocol.actions import Action, Answer, CancelReceives, PostReceives, SendFrame
from ptstore_mpi.protocol.handler import ServerHandler
from ptstore_mpi.protocol.wire import decode_frame, decode_request, encode
from ptstore_mpi.transport.fetch import FetchServer
from ptstore_mpi.transport.mpi_channel import Channel
from ptstore_mpi.transport.stall import StallWatch
from ptstore_mpi.types import ServerIndex

__all__ = ["MpiServer"]

_TICK_S = 0.02
_BATCH_COUNT = 64


class _Incoming:
    """The posted receives of one write."""

    def __init__(self, requests: list[MPI.Request], sizes: list[int]) -> None:
        self._pending = list(zip(requests, sizes, strict=True))
        self.intact = True
        self.cancelled = False

    def test(self) -> bool:
        """Make progress; return whether every receive has ended."""
        status = MPI.Status()
        still = []
        for request, size in self._pending:
            if not request.Test(status):
                still.append((request, size))
            elif status.Is_cancelled() or status.Get_count(MPI.BYTE) != size:
                self.intact = False
        self._pending = still
        return not still

    def cancel(self) -> None:
        """Withdraw the receives that no message has matched yet."""
        self.cancelled = True
        for request, _ in self._pending:
            request.Cancel()


class MpiServer:
    """One server rank of an MPI job.

    Parameters
    ----------
    handler, arena
        The server's state and memory.
    control, peers, data
        Communicators: clients' requests, server to server, data of stores.
    server_ranks, client_ranks
        Ranks in all of these.
    near_ranks
        Ranks of this node: they map the arena and do not need the server to read it.
    config
        Settings of the job.
    stall
        Told that the server gets on.
    fetches
        Who answers asks for bytes; None where clients read the window.
    """

    def __init__(
        self,
        handler: ServerHandler,
        arena: Arena,
        *,
        control: MPI.Comm,
        peers: MPI.Comm,
        data: MPI.Comm,
        server_ranks: tuple[int, ...],
        client_ranks: tuple[int, ...],
        near_ranks: tuple[int, ...],
        config: Config,
        stall: StallWatch,
        fetches: FetchServer | None = None,
    ) -> None:
        self._fetches = fetches
        self._stall = stall
        self._handler = handler
        self._arena = arena
        self._channel = Channel(control)
        self._peers = Channel(peers, synchronous=True)
        self._data = data
        self._tag_count = (data.Get_attr(MPI.TAG_UB) or 32767) + 1
        self._server_ranks = server_ranks
        self._server_of = {rank: ServerIndex(i) for i, rank in enumerate(server_ranks)}
        self._clients = frozenset(client_ranks)
        self._near = frozenset(near_ranks)
        self._idle = Idle(config)
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._next_tick_s = 0.0

    def serve(self) -> None:
        """Serve until every client has said goodbye. Collective over the servers and clients."""
        with self._stall.busy("serving"):
            self.serve_until(lambda: self._handler.gone_clients >= self._clients)

    def serve_until(self, done: Callable[[], bool]) -> None:
        """Serve until ``done()``."""
        self._idle.reset()
        while not done():
            if self.step():
                self._idle.reset()
            else:
                self._idle.wait()

    def step(self) -> bool:
        """Do what there is to do now; return whether there was anything."""
        self._stall.beat()
        active = self._take_requests()
        active |= self._take_peer_messages()
        active |= self._take_data()
        if self._fetches is not None:
            active |= self._fetches.step()
        now = time.monotonic()
        if now >= self._next_tick_s:
            self._next_tick_s = now + _TICK_S
            self._carry_out(self._handler.tick(now))
        if not self._handler.cache.room.is_populated:
            self._carry_out(self._handler.grow(self._arena.populated_bytes, now))
        if self._handler.lower is not None:
            actions = self._handler.poll_tier(now)
            self._carry_out(actions)
            active |= bool(actions)
        self._channel.flush()
        self._peers.flush()
        # A lease of another node means fetches, and these progress only while this loop turns.
        return active or not self._handler.lease_holders <= self._near

    def close_tier(self) -> None:
        """Give the file tier up; it waits for the I/O under way."""
        self._handler.close_tier()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that this server sent or waits for is under way."""
        sent = self._channel.flush() and self._peers.flush()
        if self._fetches is not None:
            sent = self._fetches.flush() and sent
        return sent and not self._incoming and self._handler.peers_are_quiet

    @property
    def peer_counts(self) -> tuple[int, int]:
        """Messages to and from other servers so far."""
        return self._peers.sent_count, self._peers.received_count

    # -- what arrives ----------------------------------------------------------------------

    # The clock is read after a message was taken: a lease must not begin before it was asked for.

    def _take_requests(self) -> bool:
        for taken in range(_BATCH_COUNT):
            arrived = self._channel.poll()
            if arrived is None:
                return taken > 0
            try:
                request = decode_request(arrived[1])
            except msgspec.DecodeError:
                self._handler.malformed_count += 1
                continue
            self._carry_out(self._handler.handle(request, time.monotonic()))
        return True

    def _take_peer_messages(self) -> bool:
        for taken in range(_BATCH_COUNT):
            arrived = self._peers.poll()
            if arrived is None:
                return taken > 0
            rank, data = arrived
            try:
                frame = decode_frame(data)
            except msgspec.DecodeError:
                self._handler.malformed_count += 1
                continue  # its sender will repeat it
            now = time.monotonic()
            self._carry_out(self._handler.handle_peer(self._server_of[rank], frame, now))
        return True

    def _take_data(self) -> bool:
        ended = [key for key, incoming in self._incoming.items() if incoming.test()]
        for client, op in ended:
            incoming = self._incoming.pop((client, op))
            if incoming.cancelled:
                self._handler.settled(client, op)
            else:
                self._carry_out(
                    self._handler.received(client, op, time.monotonic(), intact=incoming.intact)
                )
        return bool(ended)

    # -- what the handler wants ------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Answer(client, reply):
                    self._channel.send(client, encode(reply))
                case SendFrame(server, frame):
                    self._peers.send(self._server_ranks[server], encode(frame))
                case PostReceives(client, op, extents):
                    self._post_receives(client, op, extents)
                case CancelReceives(client, op):
                    self._incoming[client, op].cancel()

    def _post_receives(self, client: int, op: int, extents: tuple[tuple[int, int], ...]) -> None:
        memory = self._arena.memory
        requests = [
            self._data.Irecv(
                [memory[offset : offset + nbytes], nbytes, MPI.BYTE], client, op % self._tag_count
            )
            for offset, nbytes in extents
        ]
        self._incoming[client, op] = _Incoming(requests, [nbytes for _, nbytes in extents])
