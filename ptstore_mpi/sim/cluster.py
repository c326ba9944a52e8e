"""Servers and clients of a whole job in one process, moved by hand: the protocol without MPI.

The handler, the cache and the client generators are the ones that run over MPI; only the carrier
is replaced. The clock stands still until somebody turns it, the network is perfect until a hook
loses, doubles or keeps a message, and an operation can be stopped before any of its effects.
Messages pass through their wire form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np

from ptstore_mpi import _native
from ptstore_mpi.client import Store
from ptstore_mpi.config import Config
from ptstore_mpi.protocol.actions import Action, Answer, CancelReceives, PostReceives, ToPeer
from ptstore_mpi.protocol.context import ClientContext, Ledger
from ptstore_mpi.protocol.effects import Effect, Operation
from ptstore_mpi.protocol.messages import (
    PeerMessage,
    Reply,
    Request,
    decode_peer,
    decode_reply,
    decode_request,
    encode,
)
from ptstore_mpi.topology import Topology
from ptstore_mpi.transport.base import ClientTransport
from ptstore_mpi.transport.server_parts import make_handler
from ptstore_mpi.types import ServerIndex

__all__ = ["Cluster", "Stepper", "VirtualTransport"]

T = TypeVar("T")
E = TypeVar("E")
_Key = tuple[ServerIndex, int, int]  # server, client, op


class Stepper(Generic[T]):
    """One client operation, performed effect by effect.

    Attributes
    ----------
    effect
        The effect that comes next; None once the operation has ended.
    result
        What the operation returned, once it has ended.
    """

    def __init__(self, transport: VirtualTransport, operation: Operation[T]) -> None:
        self._transport = transport
        self._operation = operation
        self.effect: Effect | None = None
        self.result: T | None = None
        self._resume(None)

    @property
    def done(self) -> bool:
        """Whether the operation has ended."""
        return self.effect is None

    def step(self) -> None:
        """Carry out the next effect."""
        assert self.effect is not None, "the operation has ended"
        self._resume(self._transport.execute(self.effect))

    def run_to(self, kind: type[E]) -> E:
        """Carry out effects until one of this kind comes next, and return that one."""
        while (effect := self.effect) is not None:
            if isinstance(effect, kind):
                return effect
            self.step()
        raise AssertionError(f"the operation ended with {self.result} before a {kind.__name__}")

    def finish(self) -> T:
        """Carry out everything that is left and return the result."""
        while self.effect is not None:
            self.step()
        return cast("T", self.result)

    def stop(self) -> None:
        """End the operation where it stands, as an exception in the engine would."""
        self._operation.close()
        self.effect = None

    def _resume(self, answer: Any) -> None:
        try:
            self.effect = self._operation.send(answer)
        except StopIteration as stop:
            self.effect, self.result = None, stop.value


@dataclass(slots=True)
class _Transfer:
    token: int
    carry: Callable[[], None]


class VirtualTransport(ClientTransport):
    """The carrier of one client of a `Cluster`.

    Attributes
    ----------
    hold_transfers
        While true, transfers that are started stay in flight until `land`.
    """

    name = "virtual"

    def __init__(self, cluster: Cluster, client: int) -> None:
        self._cluster = cluster
        self.client = client
        self.replies: deque[Reply] = deque()
        self.hold_transfers = False
        self._in_flight: deque[_Transfer] = deque()
        self._done: list[int] = []
        self._next_token = 0
        near = cluster.topology.servers_of(cluster.topology.nodes[client])
        super().__init__(
            {server: cluster.memories[server] for server in near},
            staging_bytes=cluster.config.staging_bytes,
            copy_threads=1,
        )

    def execute(self, effect: Effect) -> Any:
        """Carry out one effect and return its answer."""
        return self._execute(effect)

    def now(self) -> float:
        """Return the cluster's time, s."""
        return self._cluster.now

    def send(self, server: ServerIndex, message: Request) -> None:
        """Hand a request to the network."""
        self._cluster.send(server, message)

    def receive(self, until: float) -> Reply | None:
        """Return the next reply; with none there, let time pass until ``until``."""
        if not self.replies:
            self._cluster.advance_to(until)
        return self.replies.popleft() if self.replies else None

    def start_get(
        self, server: ServerIndex, offset: int, *, staging_offset: int, nbytes: int
    ) -> int:
        """Start reading: the bytes are taken when the transfer lands."""
        target = self._staging(staging_offset, nbytes)
        arena = self._cluster.memories[server]

        def carry() -> None:
            target[:] = arena[offset : offset + nbytes]

        return self._start(carry)

    def start_write(self, server: ServerIndex, op: int, *, staging_offset: int, nbytes: int) -> int:
        """Start writing into the next receive posted for ``op``."""
        source = self._staging(staging_offset, nbytes)
        return self._start(lambda: self._cluster.take_data(server, self.client, op, source))

    def await_tokens(self, until: float) -> tuple[int, ...]:
        """Return the transfers that have landed; with none, let time pass until ``until``."""
        if not self._done:
            self._cluster.advance_to(until)
        done, self._done = tuple(self._done), []
        return done

    def land(self, count: int | None = None) -> None:
        """Let the first ``count`` transfers in flight arrive; default all."""
        for _ in range(len(self._in_flight) if count is None else count):
            transfer = self._in_flight.popleft()
            transfer.carry()
            self._done.append(transfer.token)

    @property
    def in_flight_count(self) -> int:
        """Transfers that have not landed."""
        return len(self._in_flight)

    def close(self) -> None:
        """Nothing is held."""

    def _start(self, carry: Callable[[], None]) -> int:
        self._next_token += 1
        self._in_flight.append(_Transfer(self._next_token, carry))
        if not self.hold_transfers:
            self.land()
        return self._next_token


class _Alone:
    """Stands in for a communicator of one rank."""

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 1


class Cluster:
    """Servers, arenas, clients and the network between them.

    Parameters
    ----------
    config
        Settings; ``arena_bytes`` is the size of each arena.
    server_nodes, client_nodes
        Node of each server and of each client.
    generation_bits
        As in `SlotTable`; 0 reuses every id at once, which safety must survive.

    Attributes
    ----------
    now
        Time, s.
    hold_peers
        While true, messages between servers wait for `deliver_peers`.
    on_request, on_reply
        Hooks that return the messages that really arrive: none, one, two or others.
    """

    def __init__(
        self,
        config: Config,
        *,
        server_nodes: Sequence[int] = (0, 1),
        client_nodes: Sequence[int] = (0, 1),
        generation_bits: int = 0,
    ) -> None:
        self.config = config
        self.now = 1000.0
        servers = len(server_nodes)
        self.topology = Topology(
            (*server_nodes, *client_nodes),
            tuple(range(servers)),
            tuple(range(servers, servers + len(client_nodes))),
        )
        self.memories = {
            ServerIndex(i): np.zeros(config.arena_bytes, np.uint8) for i in range(servers)
        }
        self.servers = [
            make_handler(
                server,
                memory,
                config,
                populated_bytes=config.arena_bytes,
                generation_bits=generation_bits,
            )
            for server, memory in self.memories.items()
        ]
        self.hold_peers = False
        self.on_request: Callable[[ServerIndex, Request], Iterable[Request]] | None = None
        self.on_reply: Callable[[int, Reply], Iterable[Reply]] | None = None
        self._peers: dict[tuple[ServerIndex, ServerIndex], deque[PeerMessage]] = {}
        self._posted: dict[_Key, deque[tuple[int, int]]] = {}
        self.transports = {
            client: VirtualTransport(self, client) for client in self.topology.client_ranks
        }
        self.contexts = {client: self._context(client) for client in self.topology.client_ranks}

    @property
    def clients(self) -> tuple[int, ...]:
        """Numbers of the clients, as they stand in every key."""
        return self.topology.client_ranks

    def start(self, client: int, operation: Operation[T]) -> Stepper[T]:
        """Return an operation of ``client`` that stands before its first effect."""
        return Stepper(self.transports[client], operation)

    def store(self, client: int) -> Store:
        """Return the public face of the store for one client."""
        return Store(
            self.transports[client],
            self.contexts[client],
            topology=self.topology,
            comm=cast("Any", _Alone()),
        )

    # -- time ------------------------------------------------------------------------------

    def advance_to(self, now: float) -> None:
        """Turn the clock forward, never back, and let every server know."""
        self.now = max(self.now, now)
        for index, handler in enumerate(self.servers):
            self._carry_out(ServerIndex(index), handler.tick(self.now))

    def advance(self, seconds: float) -> None:
        """Turn the clock forward by ``seconds``."""
        self.advance_to(self.now + seconds)

    # -- network ---------------------------------------------------------------------------

    def send(self, server: ServerIndex, message: Request) -> None:
        """Carry a request to a server, through the hook."""
        arriving = [message] if self.on_request is None else self.on_request(server, message)
        for each in list(arriving):
            self.handle(server, each)

    def handle(self, server: ServerIndex, message: Request) -> None:
        """Let a server handle a request now."""
        request = decode_request(encode(message))
        self._carry_out(server, self.servers[server].handle(request, self.now))

    def take_data(self, server: ServerIndex, client: int, op: int, data: Any) -> None:
        """Let a data message arrive in the next receive posted for it."""
        posted = self._posted[server, client, op]
        offset, expected = posted.popleft()
        self.memories[server][offset : offset + len(data)] = data
        intact = len(data) == expected
        if not posted or not intact:
            del self._posted[server, client, op]
            actions = self.servers[server].received(client, op, self.now, intact=intact)
            self._carry_out(server, actions)

    def deliver_peers(self, count: int | None = None) -> int:
        """Deliver messages between servers, oldest link first; return how many."""
        delivered = 0
        while count is None or delivered < count:
            link = next((link for link, queue in self._peers.items() if queue), None)
            if link is None:
                break
            self.deliver_peer(*link)
            delivered += 1
        return delivered

    def deliver_peer(self, sender: ServerIndex, receiver: ServerIndex) -> None:
        """Deliver the oldest message on its way from one server to another."""
        message = decode_peer(encode(self._peers[sender, receiver].popleft()))
        actions = self.servers[receiver].handle_peer(sender, message, self.now)
        self._carry_out(receiver, actions)

    @property
    def peers_on_their_way(self) -> list[tuple[ServerIndex, ServerIndex]]:
        """Pairs (sender, receiver) of servers with messages under way."""
        return [link for link, queue in self._peers.items() if queue]

    def _carry_out(self, server: ServerIndex, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Answer(client, reply):
                    answer = decode_reply(encode(reply))
                    arriving = [answer] if self.on_reply is None else self.on_reply(client, answer)
                    self.transports[client].replies.extend(arriving)
                case ToPeer(receiver, message):
                    self._peers.setdefault((server, receiver), deque()).append(message)
                case PostReceives(client, op, extents):
                    self._posted[server, client, op] = deque(extents)
                case CancelReceives(client, op):
                    del self._posted[server, client, op]
                    self.servers[server].settled(client, op)
        if not self.hold_peers:
            self.deliver_peers()

    def _context(self, client: int) -> ClientContext:
        return ClientContext(
            self.config,
            Ledger(client, _native.RegionAllocator(self.config.staging_bytes)),
            server_count=len(self.servers),
            near=self.topology.servers_of(self.topology.nodes[client]),
        )
