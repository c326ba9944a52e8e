"""The machines of transport `sim`: servers, arenas, clients and the network between them.

Here they are moved by hand: the clock stands still until somebody turns it, the network is perfect
until a hook loses, doubles or keeps a message, and an operation can be stopped before any of its
effects. `simulation` overrides what moves. Messages pass through their wire form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ptstore_mpi import _native
from ptstore_mpi.arena import Memory, anonymous_memory
from ptstore_mpi.cache.tier import Tier
from ptstore_mpi.client import Store
from ptstore_mpi.config import Config
from ptstore_mpi.protocol.actions import Action, Answer, CancelReceives, PostReceives, SendFrame
from ptstore_mpi.protocol.context import ClientContext, Ledger
from ptstore_mpi.protocol.effects import Operation
from ptstore_mpi.protocol.messages import Reply, Request
from ptstore_mpi.protocol.peer_messages import PeerFrame
from ptstore_mpi.protocol.wire import decode_frame, decode_reply, decode_request, encode
from ptstore_mpi.sim.observer import InvariantError
from ptstore_mpi.sim.trace import START_S
from ptstore_mpi.sim.transport import SimTransport, Stepper, Transfer, counted_memory
from ptstore_mpi.topology import Topology
from ptstore_mpi.transport.server_parts import make_handler
from ptstore_mpi.types import ServerIndex

__all__ = ["Cluster"]

T = TypeVar("T")


@dataclass(slots=True)
class _Incoming:
    """Receives posted for one write: what is still unmatched, and how many have not ended."""

    unmatched: deque[tuple[int, int]]
    open_count: int
    intact: bool = True
    cancelled: bool = False


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
    peer_resend_s
        As in `ServerHandler`.
    counts_only
        Move no bytes, only count them: an arena may then be of any size.
    populated_bytes
        Pages that each arena may use from the beginning; default: all.

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
        peer_resend_s: float = 1.0,
        counts_only: bool = False,
        populated_bytes: int | None = None,
    ) -> None:
        self.config = config
        self.now = START_S
        servers = len(server_nodes)
        self.topology = Topology(
            (*server_nodes, *client_nodes),
            tuple(range(servers)),
            tuple(range(servers, servers + len(client_nodes))),
        )
        self.counts_only = counts_only
        self.memories = {
            ServerIndex(i): counted_memory(config.arena_bytes)
            if counts_only
            else anonymous_memory(config.arena_bytes)
            for i in range(servers)
        }
        self.servers = [
            make_handler(
                server,
                None if counts_only else memory,
                config,
                server_count=servers,
                populated_bytes=config.arena_bytes if populated_bytes is None else populated_bytes,
                generation_bits=generation_bits,
                peer_resend_s=peer_resend_s,
                tier=self._make_tier(server, memory),
            )
            for server, memory in self.memories.items()
        ]
        self.hold_peers = False
        self.on_request: Callable[[ServerIndex, Request], Iterable[Request]] | None = None
        self.on_reply: Callable[[int, Reply], Iterable[Reply]] | None = None
        self._peers: dict[tuple[ServerIndex, ServerIndex], deque[PeerFrame]] = {}
        self._incoming: dict[tuple[ServerIndex, int, int], _Incoming] = {}
        self.transports = {
            client: SimTransport(self, client) for client in self.topology.client_ranks
        }
        self.contexts = {client: self._context(client) for client in self.topology.client_ranks}

    def _make_tier(self, server: ServerIndex, memory: Memory) -> Tier | None:
        """Return the file tier of a server. Moved by hand there is none."""
        return None

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

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        """Let time pass until ``ready()`` or ``until``, whichever comes first."""
        if not ready():
            self.advance_to(until)

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

    def answer(self, client: int, reply: Reply) -> None:
        """Carry a reply to a client, through the hook."""
        arriving = [reply] if self.on_reply is None else self.on_reply(client, reply)
        for each in arriving:
            self.transports[client].replies.append(decode_reply(encode(each)))

    def move(self, transport: SimTransport, transfer: Transfer) -> None:
        """Move the bytes of a transfer that was started."""
        transfer.carry(0, transfer.nbytes)
        transfer.arrived()
        transport.done.append(transfer.token)

    def take_posted(self, server: ServerIndex, client: int, op: int, nbytes: int) -> Memory:
        """Match a data message with the next receive posted for it; return where it goes."""
        incoming = self._incoming.get((server, client, op))
        if incoming is None or not incoming.unmatched:
            raise InvariantError(
                f"4: client {client} sends data of op {op} to server {server}, which has given "
                "the region up"
            )
        offset, expected = incoming.unmatched.popleft()
        incoming.intact &= nbytes == expected
        return self.memories[server][offset : offset + nbytes]

    def end_data(self, server: ServerIndex, client: int, op: int) -> None:
        """Take note that a data message has arrived wholly."""
        incoming = self._incoming[server, client, op]
        incoming.open_count -= 1
        if incoming.open_count:
            return
        del self._incoming[server, client, op]
        handler = self.servers[server]
        if incoming.cancelled:
            handler.settled(client, op)
        else:
            actions = handler.received(client, op, self.now, intact=incoming.intact)
            self._carry_out(server, actions)

    def _cancel(self, server: ServerIndex, client: int, op: int) -> None:
        """Withdraw what is unmatched; what is matched arrives yet."""
        incoming = self._incoming[server, client, op]
        incoming.cancelled = True
        incoming.open_count -= len(incoming.unmatched)
        incoming.unmatched.clear()
        if not incoming.open_count:
            del self._incoming[server, client, op]
            self.servers[server].settled(client, op)

    def send_frame(self, sender: ServerIndex, receiver: ServerIndex, frame: PeerFrame) -> None:
        """Put a frame on its way to another server."""
        self._peers.setdefault((sender, receiver), deque()).append(frame)

    def deliver_peers(self, count: int | None = None) -> int:
        """Deliver frames between servers, oldest link first; return how many."""
        delivered = 0
        while count is None or delivered < count:
            link = next(iter(self._peers), None)
            if link is None:
                break
            self.deliver_peer(*link)
            delivered += 1
        return delivered

    def deliver_peer(self, sender: ServerIndex, receiver: ServerIndex) -> None:
        """Deliver the oldest frame on its way from one server to another."""
        queue = self._peers[sender, receiver]
        frame = queue.popleft()
        if not queue:
            del self._peers[sender, receiver]  # idle links, of which there are many, cost nothing
        self.handle_frame(sender, receiver, encode(frame))

    def handle_frame(self, sender: ServerIndex, receiver: ServerIndex, data: bytes) -> None:
        """Let a server handle a frame of another one now."""
        actions = self.servers[receiver].handle_peer(sender, decode_frame(data), self.now)
        self._carry_out(receiver, actions)

    @property
    def peers_on_their_way(self) -> list[tuple[ServerIndex, ServerIndex]]:
        """Pairs (sender, receiver) of servers with frames under way."""
        return list(self._peers)

    def _carry_out(self, server: ServerIndex, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Answer(client, reply):
                    self.answer(client, reply)
                case SendFrame(receiver, frame):
                    self.send_frame(server, receiver, frame)
                case PostReceives(client, op, extents):
                    self._incoming[server, client, op] = _Incoming(deque(extents), len(extents))
                case CancelReceives(client, op):
                    self._cancel(server, client, op)
        if not self.hold_peers:
            self.deliver_peers()

    def _context(self, client: int) -> ClientContext:
        return ClientContext(
            self.config,
            Ledger(client, _native.RegionAllocator(self.config.staging_bytes)),
            server_count=len(self.servers),
            near=self.topology.servers_of(self.topology.nodes[client]),
        )
