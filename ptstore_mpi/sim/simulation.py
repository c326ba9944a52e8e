"""A cluster that moves by itself: a seeded schedule on a virtual clock, under a fault plan.

Everything that takes time is an event in one queue, ordered by time and then by when it was
entered: a message or a part of a transfer that arrives, a client's next step, a server's tick. The
same seed gives the same run.

::

    client steps   one effect at a time, a copy block by block, stalls in between
    messages       encoded, then lost | doubled | delayed | bent, then decoded
    transfers      in up to three parts, each at a time of its own
    servers        handle what arrived, in order, unless they are paused
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from inspect import isfunction
from typing import Any

import msgspec
import numpy as np

from ptstore_mpi.arena import Memory
from ptstore_mpi.cache.replicas import Replica, ReplicaState
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.config import Config
from ptstore_mpi.layout import KVLayout
from ptstore_mpi.protocol import effects
from ptstore_mpi.protocol.messages import Reply, Request
from ptstore_mpi.protocol.peer_messages import PeerFrame
from ptstore_mpi.protocol.wire import decode_reply, decode_request, encode
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.sim.faults import FaultPlan
from ptstore_mpi.sim.network import Dice, Network
from ptstore_mpi.sim.observer import InvariantError, Observer
from ptstore_mpi.sim.processes import Process, Processes
from ptstore_mpi.sim.tiers import SimTier, make_sim_tier
from ptstore_mpi.sim.transport import SimTransport, Transfer
from ptstore_mpi.sim.watch import watch_cache, watch_replicas
from ptstore_mpi.testing.actor import SMALL
from ptstore_mpi.types import ServerIndex

__all__ = ["Simulation"]

_TICK_S = 0.5
_LONGEST_TRACE = 4000
CLOCK_DRIFT = 0.004  # of each client against the servers; P12 has a margin for twice of it


class Simulation(Cluster):
    """A cluster on a seeded schedule.

    Parameters
    ----------
    config, server_nodes, client_nodes, generation_bits
        As in `Cluster`.
    layout
        Layout of every namespace in it.
    plan
        Its faults.
    seed
        Decides everything else.

    Attributes
    ----------
    dice
        The faults, and how often each fault and each situation came about.
    hearers
        By name of a method of `Observer`: those who listen. An `InvariantError` ends the run.
    trace, on_note
        What happened lately, as (time, actor, what, detail), and who is told at once.
    bent
        Segments and replicas in whose bytes a bit was changed, or that a file tier was made
        unable to read.
    tiers
        File tiers by server, where there are any.
    """

    def __init__(
        self,
        config: Config,
        *,
        layout: KVLayout = SMALL,
        plan: FaultPlan | None = None,
        seed: int | str = 0,
        **places: Any,
    ) -> None:
        self.layout = layout
        self.dice = Dice(plan or FaultPlan(), seed)
        self.network = Network(self.dice)
        self.hearers: dict[str, list[Callable[..., None]]] = {
            name: [] for name, what in vars(Observer).items() if isfunction(what)
        }
        self.on_note: Callable[[float, str, str, Any], None] | None = None
        self.trace: deque[tuple[float, str, str, Any]] = deque(maxlen=_LONGEST_TRACE)
        self.processes = Processes(self)
        self.event_count = 0
        self.bent: set[Segment | Replica] = set()
        self.tiers: dict[ServerIndex, SimTier] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0
        self._paused_until: dict[ServerIndex, float] = {}
        self._moving: dict[int, list[Transfer]] = {}
        super().__init__(config, **places)
        for transport in self.transports.values():
            transport.rate = 1 + self.dice.rng.uniform(-CLOCK_DRIFT, CLOCK_DRIFT)
        self._eager_ticks = self.dice.rng.random() < 0.5
        for server in self.memories:
            watch_cache(self, server, self.servers[server].cache)
            watch_replicas(self, server, self.servers[server].replicas.replicas)
            self.at(self.now + self.dice.rng.random() * _TICK_S, partial(self._tick, server))

    def watch(self, observer: Observer) -> None:
        """Let an observer hear what it has methods of its own for."""
        for name, hearers in self.hearers.items():
            if getattr(type(observer), name) is not getattr(Observer, name):
                hearers.append(getattr(observer, name))

    def _make_tier(self, server: ServerIndex, memory: Memory) -> SimTier | None:
        tier = make_sim_tier(self, server, memory)
        if tier is not None:
            self.tiers[server] = tier
        return tier

    # -- the schedule ------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Enter an event."""
        self._entered += 1
        heapq.heappush(self._events, (max(when, self.now), self._entered, action))

    def step(self) -> None:
        """Carry out the next event."""
        when, _, action = heapq.heappop(self._events)
        self.now = when
        self.event_count += 1
        action()

    def advance_to(self, now: float) -> None:
        """Carry out all events until ``now``."""
        while self._events and self._events[0][0] <= now:
            self.step()
        self.now = max(self.now, now)

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        """Carry out events until ``ready()``, or all until ``until``."""
        while not ready() and self._events and self._events[0][0] <= until:
            self.step()
        if not ready():
            self.now = max(self.now, until)

    def run(self, *, limit_count: int = 100_000) -> None:
        """Carry out events until every process has ended or vanished.

        Raises
        ------
        InvariantError
            An observer saw one, or the processes do not end within ``limit_count`` events.
        """
        last = self.event_count + limit_count
        while self.processes.running_count:
            if self.event_count >= last:
                raise InvariantError(f"9: clients still at work after {limit_count} events")
            self.step()

    def note(self, actor: str, what: str, detail: Any = "") -> None:
        """Add a line to the trace."""
        self.trace.append((self.now, actor, what, detail))
        if self.on_note is not None:
            self.on_note(self.now, actor, what, detail)

    def spawn(self, client: int, script: Generator[Any, Any, None]) -> Process:
        """Let a client carry out a script of effects and `Sleep`, from now on."""
        return self.processes.spawn(client, script)

    # -- messages ----------------------------------------------------------------------------

    def send(self, server: ServerIndex, message: Request) -> None:
        """Put a request on its way."""
        wire = ("request", message.client, server)
        for data, when in self.network.fates(encode(message), wire, self.now):
            self.at(when, partial(self._request_arrives, server, data))

    def answer(self, client: int, reply: Reply) -> None:
        """Put a reply on its way."""
        for hear in self.hearers["replied"]:
            hear(client, reply)
        self.note(f"server {reply.server}", f"answers client {client}", reply)
        if getattr(reply, "status", "") == "full":
            self.dice.fired["full_arena"] += 1
        wire = ("reply", reply.server, client)
        for data, when in self.network.fates(encode(reply), wire, self.now):
            self.at(when, partial(self._reply_arrives, client, data))

    def send_frame(self, sender: ServerIndex, receiver: ServerIndex, frame: PeerFrame) -> None:
        """Put a frame on its way: in order and once, unless the plan says otherwise."""
        data = encode(frame)
        wire = ("frame", sender, receiver)
        if self.dice.plan.lossy_peers:
            fates = self.network.fates(data, wire, self.now)
            self.dice.fired["lossy_peers"] += len(fates) != 1
        else:
            fates = [(data, self.network.in_order(wire, self.now, self.dice.plan.peer_delay_s))]
        for each, when in fates:
            self.at(when, partial(self._frame_arrives, sender, receiver, each))

    def _bend_memory(self, memory: Memory) -> None:
        memory[self.dice.rng.randrange(len(memory))] ^= 1 << self.dice.rng.randrange(8)

    # -- servers -----------------------------------------------------------------------------

    def _at_server(self, server: ServerIndex, action: Callable[[], None]) -> None:
        """Let a server do something now, or when its pause ends."""
        if self.dice.strikes("pause", self.dice.plan.pause):
            until = self.now + self.dice.plan.pause_s * self.dice.rng.random()
            self._paused_until[server] = max(until, self._paused_until.get(server, 0.0))
            self.note(f"server {server}", "pauses until", until)
        until = self._paused_until.get(server, 0.0)
        if until > self.now:
            self.at(until, partial(self._at_server, server, action))
            return
        if self._eager_ticks:
            self._carry_out(server, self.servers[server].tick(self.now))
        action()
        self._stepped(server)

    def _request_arrives(self, server: ServerIndex, data: bytes) -> None:
        try:
            request = decode_request(data)
        except msgspec.DecodeError:
            self.servers[server].malformed_count += 1
            return

        def handle() -> None:
            for hear in self.hearers["request"]:
                hear(server, request)
            self.note(f"server {server}", f"takes from client {request.client}", request)
            self._carry_out(server, self.servers[server].handle(request, self.now))

        self._at_server(server, handle)

    def _frame_arrives(self, sender: ServerIndex, receiver: ServerIndex, data: bytes) -> None:
        def handle() -> None:
            self.note(f"server {receiver}", f"takes a frame of server {sender}")
            try:
                self.handle_frame(sender, receiver, data)
            except msgspec.DecodeError:
                self.servers[receiver].malformed_count += 1

        self._at_server(receiver, handle)

    def _reply_arrives(self, client: int, data: bytes) -> None:
        transport = self.transports[client]
        try:
            reply = decode_reply(data)
        except msgspec.DecodeError:
            transport.malformed_count += 1
            return
        if not self.contexts[client].ledger.is_open(reply.op):
            self.dice.fired["reply_after_giving_up"] += 1
        transport.replies.append(reply)
        self.processes.arrived(client, effects.Receive)

    def grow(self, server: ServerIndex, populated_bytes: int) -> None:
        """Let a server use more pages of its arena."""
        self._carry_out(server, self.servers[server].grow(populated_bytes, self.now))
        self._stepped(server)

    def tier_ended(self, server: ServerIndex) -> None:
        """Let a server see what has ended in its file tier."""

        def poll() -> None:
            self._carry_out(server, self.servers[server].poll_tier(self.now))

        self._at_server(server, poll)

    def _tick(self, server: ServerIndex) -> None:
        self.at(self.now + _TICK_S, partial(self._tick, server))
        if self._paused_until.get(server, 0.0) <= self.now:
            self._carry_out(server, self.servers[server].tick(self.now))
            self._stepped(server)

    def _stepped(self, server: ServerIndex) -> None:
        for hear in self.hearers["stepped"]:
            hear(server)

    def writers_into(self, memory: Memory) -> list[int]:
        """Return the clients whose transfers under way write into some memory."""
        return [
            client
            for client, transfers in self._moving.items()
            for transfer in transfers
            if transfer.target is not None and self._overlap(transfer.target, memory)
        ]

    def _overlap(self, one: Memory, other: Memory) -> bool:
        """Tell whether two memories share a byte; counted ones are all the same, and never do."""
        return not self.counts_only and np.may_share_memory(one, other)

    @property
    def peer_messages_under_way(self) -> int:
        """Messages between servers that are not known to have arrived."""
        return sum(handler.unconfirmed_count for handler in self.servers)

    def deliver_peers(self, count: int | None = None) -> int:
        """Frames arrive by themselves."""
        return 0

    # -- bytes -------------------------------------------------------------------------------

    def bend_arena(self) -> None:
        """Change a bit of a visible copy, where every reader verifies what it reads."""
        if self.config.verify != "always" or self.counts_only:
            return
        if not self.dice.strikes("bend_arena", self.dice.plan.bend_arena):
            return
        server = ServerIndex(self.dice.rng.randrange(len(self.servers)))
        handler = self.servers[server]
        segments = [segment for segment in handler.cache.published() if segment.has_bytes]
        copies: list[Segment | Replica] = [*segments]
        copies += [r for r in handler.replicas.replicas if r.state is ReplicaState.COMPLETE]
        if copies:
            copy = self.dice.rng.choice(copies)
            used_bytes = copy.block_count * sum(copy.tensor_bytes)
            self._bend_memory(self.memories[server][copy.offset : copy.offset + used_bytes])
            self.bent.add(copy)

    def move(self, transport: SimTransport, transfer: Transfer) -> None:
        """Let the parts of a transfer move one after the other."""
        for other in self._moving.get(transport.client, ()):
            if self._overlap(other.staging, transfer.staging):
                raise InvariantError("1: a transfer uses memory that is still in use (P13)")
        self._moving.setdefault(transport.client, []).append(transfer)
        rng, plan = self.dice.rng, self.dice.plan
        parts = rng.randint(1, 3)
        cuts = sorted(rng.randrange(transfer.nbytes + 1) for _ in range(parts - 1))
        slow = self.dice.strikes("slow_transfer", plan.slow_transfer)
        when = self.now
        if transfer.meet is not None:  # sends meet their receives in the order they were sent
            wire = ("data", transport.client, transfer.server)
            when = self.network.in_order(wire, self.now)
            self.at(when, partial(self._move_part, transfer, 0, 0))
        for start, end in zip([0, *cuts], [*cuts, transfer.nbytes], strict=True):
            when += self.dice.delay_s()
            if slow:
                when += plan.slow_transfer_s * rng.random() / parts
            self.at(when, partial(self._move_part, transfer, start, end))
        self.at(when, partial(self._end_transfer, transport, transfer))

    def tear_transfers(self, client: int) -> bool:
        """Stop what a client had in flight where it is; return whether any of it was a write."""
        torn = False
        for transfer in self._moving.pop(client, []):
            torn |= transfer.meet is not None
            transfer.torn = True
        return torn

    def _move_part(self, transfer: Transfer, start: int, end: int) -> None:
        if not transfer.torn:
            transfer.carry(start, end)

    def _end_transfer(self, transport: SimTransport, transfer: Transfer) -> None:
        moving = self._moving.get(transport.client, [])
        if transfer not in moving:
            return  # its client has vanished
        moving.remove(transfer)
        verified = self.config.verify != "off" and not self.counts_only
        bent = verified and self.dice.strikes("bend_data", self.dice.plan.bend_data)
        self.note(f"client {transport.client}", "a transfer ends", transfer.token)
        for hear in self.hearers["transferred"]:
            hear(transport.client, transfer.token)
        transport.done.append(transfer.token)
        self.processes.arrived(transport.client, effects.AwaitTokens)
        if transfer.meet is None:
            if bent:
                self._bend_memory(transfer.staging)
            return
        # A send has completed at its sender: the receiver may have the last bytes much later.
        sent = transfer.staging.copy()
        if bent:
            self._bend_memory(sent)
        slow = self.dice.strikes("slow_transfer", self.dice.plan.slow_transfer)
        delay = self.dice.delay_s() + (
            slow and self.dice.plan.slow_transfer_s * self.dice.rng.random()
        )
        self.at(self.now + delay, partial(self._land, transfer, sent))

    def _land(self, transfer: Transfer, sent: Memory) -> None:
        transfer.source = sent
        transfer.carry(0, transfer.nbytes)
        self._at_server(transfer.server, transfer.arrived)
