"""Replicas: right bytes, right names, only while somebody may have them (invariants 2, 4 and 7)."""

from __future__ import annotations

from ptstore_mpi.cache.replicas import Replica, ReplicaState
from ptstore_mpi.protocol.messages import AcquireReply, AwaitReply, Reply
from ptstore_mpi.sim.checkers.base import EVERY, Checker
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.types import ServerIndex

__all__ = ["Copies", "RightReplicas"]


class RightReplicas(Checker):
    """2: what a replica shows is complete, and stays what it is as long as anybody may read it."""

    number = 2
    reads_bytes = True

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._found: dict[ServerIndex, dict[Replica, None]] = {}
        self._changes = 0

    def replica_kept(self, server: ServerIndex, replica: Replica) -> None:
        """Compare its bytes with those of its tokens."""
        self._compare(server, replica)
        self._found.setdefault(server, {})[replica] = None

    def replica_freed(self, server: ServerIndex, replica: Replica) -> None:
        """Forget it."""
        self._found.get(server, {}).pop(replica, None)

    def stepped(self, server: ServerIndex) -> None:
        """Look at all of them now and then."""
        self._changes += 1
        if self._changes % EVERY == 0:
            self._compare_all(server)

    def ended(self) -> None:
        """Look at every one once more."""
        for server in self._found:
            self._compare_all(server)

    def _compare_all(self, server: ServerIndex) -> None:
        for replica in self._found.get(server, ()):
            self._compare(server, replica)

    def _compare(self, server: ServerIndex, replica: Replica) -> None:
        if replica not in self.sim.bent:
            right = self.is_right(server, replica)
            self.require(right, f"replica of {replica.ref} on server {server} has other bytes")


class Copies(Checker):
    """7: replicas keep their limit; each is of another server's segment, and there only once."""

    number = 7

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._kept: list[Replica] = []
        config = sim.config
        shares = (config.replica_min_share, config.replica_max_share)
        self._limits = [int(share * config.arena_bytes) for share in shares]

    def replica_kept(self, server: ServerIndex, replica: Replica) -> None:
        """Check its name, and count what it brought about."""
        replicas = self.sim.servers[server].replicas.replicas
        same = [r for r in replicas if r.ref.segment == replica.ref.segment and r.holds(r.ref)]
        self.require(len(same) == 1, f"server {server} shows {len(same)} copies of {replica.ref}")
        book = self.books[replica.namespace]
        chain = book.chain_to(replica.ref.last_hash) or []
        right = chain[-replica.block_count :] == [row.tobytes() for row in replica.hashes]
        self.require(right, f"server {server} takes the replica of {replica.ref} for other blocks")
        self.sim.dice.fired["replica"] += 1
        self._kept.append(replica)

    def stepped(self, server: ServerIndex) -> None:
        """Check the limit, and that who waited for a replica has a lease on it at once (P17)."""
        kept, self._kept = self._kept, []
        for replica in kept:
            waited = {key for key, (ref, _) in replica.waiters.items() if replica.holds(ref)}
            self.require(waited <= replica.leases.keys(), f"{waited} wait for {replica.ref} yet")
        replicas = self.sim.servers[server].replicas.replicas
        self.require(
            replicas.used_bytes <= replicas.most_bytes, f"replicas pass their limit on {server}"
        )
        self.require(
            self._limits[0] <= replicas.least_bytes <= replicas.most_bytes == self._limits[1],
            f"the share for replicas leaves its limits on {server}",
        )

    def replied(self, client: int, reply: Reply) -> None:
        """Count what came about."""
        if isinstance(reply, AcquireReply | AwaitReply):
            here = sum(place.status == "here" for place in reply.places)
            waiting = sum(place.status == "wait" for place in reply.places)
            self.sim.dice.fired["replica_hit"] += here
            self.sim.dice.fired["fill_awaited"] += waiting
            if isinstance(reply, AcquireReply):
                self.sim.dice.fired["redirect"] += len(reply.redirects)

    def ended(self) -> None:
        """Check that no fill goes on for ever; add up what was in vain."""
        for server, handler in enumerate(self.sim.servers):
            filling = [r for r in handler.replicas.replicas if r.state is ReplicaState.FILLING]
            self.require(not filling, f"server {server} waits for fills of nobody: {filling}")
        failed = sum(h.replicas.replicas.failed_count for h in self.sim.servers)
        self.sim.dice.fired["fill_failed"] += failed
        stale = sum(handler.reads.fan_out.stale_hint_count for handler in self.sim.servers)
        self.sim.dice.fired["stale_redirect"] += stale
        deferred = sum(handler.reads.fan_out.deferred_count for handler in self.sim.servers)
        self.sim.dice.fired["deferred"] += deferred
