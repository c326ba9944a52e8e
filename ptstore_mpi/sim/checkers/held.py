"""Promises: what is kept for readers and writers, and what is read too late (invariant 4)."""

from __future__ import annotations

from typing import Any

from ptstore_mpi.cache.replicas import Replica
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.protocol import effects
from ptstore_mpi.protocol.messages import (
    AcquireReply,
    AcquireRequest,
    AwaitReply,
    AwaitRequest,
    Reply,
    Request,
    ReserveRequest,
)
from ptstore_mpi.sim.checkers.base import Checker
from ptstore_mpi.sim.promises import Promises
from ptstore_mpi.sim.prompts import Prompt
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.workloads import Player
from ptstore_mpi.types import LoadResult, Match, ServerIndex

__all__ = ["Held"]

_ROUNDING_S = 1e-9


class Held(Checker):
    """4: neither what is leased nor what a client may still be writing is ever reused.

    And its other half (P12): what was read after its lease had ended is not trusted.
    """

    number = 4

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._promises = Promises(sim)
        # By client and token: operation, server, offset.
        self._gets: dict[tuple[int, int], tuple[int, ServerIndex, int]] = {}
        self._late: dict[int, set[str]] = {}  # by client: sources that were read past a lease
        self._loads: dict[int, int] = {}  # by client: its newest load

    def request(self, server: ServerIndex, message: Request) -> None:
        """Forget what a client lets go."""
        self._promises.request(server, message)

    def replied(self, client: int, reply: Reply) -> None:
        """Remember what a client was promised: never more than the cap (P11)."""
        if isinstance(reply, AcquireReply | AwaitReply):
            cap_s = self.sim.config.lease_cap_s
            self.require(
                reply.granted_s <= cap_s, f"a lease of {reply.granted_s} s, the cap is {cap_s} s"
            )
        self.expect(self._promises.reply, client, reply)

    def freed(self, server: ServerIndex, segment: Segment) -> None:
        """Check that nobody was promised these bytes."""
        self.expect(self._promises.check, server)

    def replica_freed(self, server: ServerIndex, replica: Replica) -> None:
        """Check the same of a replica, and that no Get of its filler is still under way (P3)."""
        self.expect(self._promises.check, server)
        slot = self.sim.memories[server][replica.offset : replica.offset + replica.nbytes]
        writers = self.sim.writers_into(slot)
        self.require(not writers, f"freed a slot of server {server} that {writers} are filling")

    # -- reads and writes that come late -------------------------------------------------------

    def effect(self, client: int, effect: effects.Effect) -> None:
        """Note reads and writes that come too late."""
        if isinstance(effect, effects.Send):
            self._check_time_left(effect.message)
        match effect:
            case effects.Send(_, AcquireRequest(op=op)) if self._loads.get(client) != op:
                self._loads[client] = op
                self._late.pop(client, None)  # of Gets that an earlier load left behind
            case effects.Unpack(_, _, image) if image.server is not None:
                self._note_read(image.server, client, image.offset)
            case effects.StartGet(server, offset, _, _, _):
                token = self.sim.transports[client].started_count + 1
                op = self.sim.contexts[client].ledger.newest_op
                self._gets[client, token] = (op, server, offset)
            case effects.Pack(_, _, image) if image.server is not None:
                self._note_write(image.server, client, image.offset)
            case effects.StartWrite(server, op, _, _):
                for segment in self._promises.regions[server].get((client, op), ()):
                    self._note_write(server, client, segment.offset)

    def _check_time_left(self, message: Request) -> None:
        """Check that a request asks for no more time than its operation has (P11)."""
        limits_s = {
            AcquireRequest: self.sim.config.load_timeout_s,
            AwaitRequest: self.sim.config.load_timeout_s,
            ReserveRequest: self.sim.config.store_timeout_s,
        }
        limit_s = limits_s.get(type(message))
        if limit_s is not None and isinstance(
            message, AcquireRequest | AwaitRequest | ReserveRequest
        ):
            left_s = message.remaining_s
            fits = 0 <= left_s <= limit_s + _ROUNDING_S
            self.require(fits, f"a request asks for {left_s} s of {limit_s} s")

    def transferred(self, client: int, token: int) -> None:
        """Note a Get that ended too late, unless it is left over from an earlier load."""
        op, server, offset = self._gets.pop((client, token), (0, ServerIndex(0), 0))
        if op == self.sim.contexts[client].ledger.newest_op:
            self._note_read(server, client, offset)

    def loaded(self, player: Player, prompt: Prompt, match: Match, **how: Any) -> None:
        """Check that nothing of a whole load was read late."""
        late = self._late.get(player.client, set())
        result: LoadResult | None = how["result"]
        if result is not None and result.reason == "loaded":
            trusted = {source for source, tokens in result.by_source.items() if tokens}
            self.require(
                not trusted & late,
                f"client {player.client} trusts bytes that it read after their lease",
            )

    def _note_read(self, server: ServerIndex, client: int, offset: int) -> None:
        op = self.sim.contexts[client].ledger.newest_op
        leases = [
            lease
            for lease in self._promises.leases[server]
            if (lease.client, lease.op) == (client, op)
            and 0 <= offset - lease.offset < lease.copy.nbytes
        ]
        if leases and max(lease.expiry_s for lease in leases) < self.sim.now:
            near = server in self.sim.contexts[client].near
            here = "owned" if isinstance(leases[0].copy, Segment) else "replica"
            self._late.setdefault(client, set()).add(here if near else "remote")
            self.sim.dice.fired["read_past_lease"] += 1

    def _note_write(self, server: ServerIndex, client: int, offset: int) -> None:
        write = self.sim.servers[server].writes.reservations.at(client, offset)
        self.sim.dice.fired["write_past_reservation"] += write is not None and not write.is_live
