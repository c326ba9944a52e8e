"""Tells the observers of a simulation what becomes of segments and replicas, at that very step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.replicas import Replica, ReplicaCache
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.types import ServerIndex

if TYPE_CHECKING:
    from ptstore_mpi.sim.simulation import Simulation

__all__ = ["watch_cache", "watch_replicas"]


def watch_cache(sim: Simulation, server: ServerIndex, cache: OwnedCache) -> None:
    """Tell the observers what becomes of each segment, at that very step."""
    publish, retire, free = cache.publish, cache.retire, cache._free
    free_memory = cache.free_memory

    def publish_and_tell(segments: list[Segment], checksums: bytes, now: float = 0.0) -> None:
        publish(segments, checksums, now)
        for hear in sim.hearers["published"]:
            for segment in segments:
                hear(server, segment)

    def retire_and_tell(segment: Segment, now: float, *, evicted: bool = False) -> None:
        for hear in sim.hearers["retired"]:
            hear(server, segment, evicted=evicted)
        retire(segment, now, evicted=evicted)

    def free_and_tell(segment: Segment) -> None:
        free(segment)
        for hear in sim.hearers["freed"]:
            hear(server, segment)

    def free_memory_and_tell(segment: Segment) -> None:
        free_memory(segment)
        sim.dice.fired["demoted"] += 1
        for hear in sim.hearers["freed"]:
            hear(server, segment)

    for name, watched in (
        ("free_memory", free_memory_and_tell),
        ("publish", publish_and_tell),
        ("retire", retire_and_tell),
        ("_free", free_and_tell),
    ):
        setattr(cache, name, watched)


def watch_replicas(sim: Simulation, server: ServerIndex, replicas: ReplicaCache) -> None:
    """Tell the observers what becomes of each replica, at that very step."""

    def tell_of(name: str, event: str) -> None:
        act = getattr(replicas, name)

        def act_and_tell(replica: Replica, *arguments: Any, **how: Any) -> None:
            act(replica, *arguments, **how)
            for hear in sim.hearers[event]:
                hear(server, replica)

        setattr(replicas, name, act_and_tell)

    tell_of("publish", "replica_kept")
    tell_of("drop", "replica_dropped")
    tell_of("_free", "replica_freed")
