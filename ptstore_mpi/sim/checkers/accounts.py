"""Accounts: tokens, memory and time (invariants 6, 7 and 9)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ptstore_mpi.protocol.messages import Reply, ReserveReply
from ptstore_mpi.sim.checkers.base import EVERY, Checker
from ptstore_mpi.sim.prompts import BLOCK_TOKENS, Prompt
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.workloads import Player
from ptstore_mpi.testing.checks import (
    check_quiet,
    check_server_space,
)
from ptstore_mpi.types import LoadResult, Match, ServerIndex, StoreResult

__all__ = ["Conservation", "InTime", "Limits"]


class Conservation(Checker):
    """6: hits by source and recomputed tokens add up to the tokens asked for."""

    number = 6

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._asked: Counter[int] = Counter()
        self._players: dict[int, Player] = {}
        self._crossed: Counter[int] = Counter()

    def loaded(self, player: Player, prompt: Prompt, match: Match, **how: Any) -> None:
        """Add up one request."""
        result: LoadResult | None = how["result"]
        if result is None:
            return
        self._players[player.client] = player
        self._asked[player.client] += match.prompt_tokens
        self.require(sum(result.by_source.values()) == result.tokens, f"sources of {result}")
        self.require(how["skip_tokens"] <= result.tokens <= match.tokens, f"{match}: {result}")
        whole = result.tokens == match.tokens
        self.require(whole == (result.reason in ("loaded", "nothing")), f"the reason of {result}")
        near = self.sim.contexts[player.client].near
        far = {server: n for server, n in result.by_server.items() if server not in near}
        self._crossed[player.client] += sum(far.values())

    def stored(self, player: Player, prompt: Prompt, result: StoreResult, **how: Any) -> None:
        """Check that a store built upon nothing that its client could not verify (P8)."""
        verified: int | None = how["verified_tokens"]
        whole = len(prompt.hashes) * BLOCK_TOKENS
        usable = (len(prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if result.reason == "stored" and verified is not None and verified < usable:
            self.require(
                result.tokens >= whole - verified,
                f"client {player.client} verified {verified} tokens and stored the last "
                f"{result.tokens} of {whole}",
            )

    def ended(self) -> None:
        """Add up all requests of each client."""
        for client, player in self._players.items():
            tokens = player.store.stats()["tokens"]
            asked, stored = tokens.pop("asked"), tokens.pop("stored")
            self.require(asked == self._asked[client] == sum(tokens.values()), f"{tokens}")
            self.require(stored >= 0, f"{tokens}")
            moved = player.store.stats()["bytes"]
            used = moved["rma_bytes"] - moved["discarded_bytes"]
            wanted = self._crossed[client] * self.sim.layout.bytes_per_token
            self.require(used == wanted, f"{used} bytes were used, {wanted} loaded from far")


class Limits(Checker):
    """7: memory stays within its budget, and everything comes back when the clients have left."""

    number = 7

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._changes: Counter[ServerIndex] = Counter()

    def replied(self, client: int, reply: Reply) -> None:
        """Check how many regions a client holds that was given another one."""
        if isinstance(reply, ReserveReply):
            count = len(self.sim.servers[reply.server].writes.reservations.regions_of(client))
            self.require(
                count <= self.sim.config.unconfirmed_count,
                f"client {client} holds {count} regions of server {reply.server} (P2)",
            )

    def stepped(self, server: ServerIndex) -> None:
        """Check the budget at every step, the whole account now and then."""
        cache = self.sim.servers[server].cache
        self.require(cache.room.free_bytes >= 0, f"server {server} is over its budget")
        tier = self.sim.tiers.get(server)
        if tier is not None:
            sizes = tier.store.counters()
            self.require(sizes["file_bytes"] <= sizes["capacity_bytes"], f"a tier of {sizes}")
        self._changes[server] += 1
        if self._changes[server] % EVERY == 0:
            self.expect(check_server_space, self.sim.servers[server])

    def ended(self) -> None:
        """Check that nothing is held but by clients that vanished, and these hold only regions."""
        for server, handler in enumerate(self.sim.servers):
            live_count = handler.writes.reservations.live_count
            self.require(not live_count, f"server {server}: {live_count} writes never expired (P6)")
            self.require(handler.peers_are_quiet, f"server {server} has words under way for ever")
        vanished = {
            p.client for p in self.sim.processes.by_client.values() if p.state == "vanished"
        }
        for handler in self.sim.servers:
            self.expect(check_server_space, handler)
        for server, tier in self.sim.tiers.items():
            sizes = tier.store.counters()
            kept = [x for x in self.sim.servers[server].cache.slots if x.slot is not None]
            right = sizes["slot_count"] == len(kept) and not sizes["in_flight_count"]
            self.require(right, f"{len(kept)} slots are in use of {sizes}")
        if not vanished:
            self.expect(check_quiet, self.sim)
            for server, handler in enumerate(self.sim.servers):
                left = handler.remembered_count
                self.require(not left, f"server {server} remembers {left} things of nobody (P2)")
        for client, context in self.sim.contexts.items():
            ledger = context.ledger
            free = client in vanished or ledger.borrow(ledger.staging_bytes) is not None
            self.require(free, f"staging memory of client {client} did not come back")
        for server, handler in enumerate(self.sim.servers):
            counters = handler.counters()
            names = ("leased_bytes", "zombie_bytes", "replica_leased_bytes", "reading_bytes")
            held = {name: counters[name] for name in names}
            self.require(not any(held.values()), f"server {server} still holds {held}")
            regions = [
                r for client in vanished for r in handler.writes.reservations.regions_of(client)
            ]
            owed = sum(segment.nbytes for region in regions for segment in region)
            self.require(counters["reserved_bytes"] == owed, f"server {server}: {counters}")


class InTime(Checker):
    """9: no operation outlives its deadline by more than one poll."""

    number = 9
    slack_s = 0.02

    def operated(self, player: Player, kind: str, took_s: float) -> None:
        """Compare the time it took with its deadline."""
        limit_s: float = getattr(self.sim.config, f"{kind}_timeout_s")
        self.require(
            took_s <= limit_s + self.slack_s,
            f"client {player.client} took {took_s:.3f} s to {kind}, its deadline is {limit_s} s",
        )
