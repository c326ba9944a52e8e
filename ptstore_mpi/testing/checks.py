"""What must hold in a `Cluster` at every step, read from the state itself.

Each check raises AssertionError with what it found. They know the inside of the cache on purpose:
they recompute from the segments what the cache keeps as running totals.
"""

from __future__ import annotations

import itertools

from ptstore_mpi.cache.owned import OwnedCache, metadata_bytes_of
from ptstore_mpi.cache.replicas import ReplicaState
from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.handler import ServerHandler
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.types import segment_owner

__all__ = [
    "check_links",
    "check_quiet",
    "check_reachable",
    "check_server_space",
    "check_space",
    "segments_of",
]


def segments_of(cache: OwnedCache, *states: SegmentState) -> list[Segment]:
    """Return a server's segments, in these states where any are given."""
    return [segment for segment in cache.slots if not states or segment.state in states]


def check_space(cluster: Cluster) -> None:
    """Check that extents are disjoint and that the totals are those of the segments (7)."""
    for handler in cluster.servers:
        check_server_space(handler)


def check_server_space(handler: ServerHandler) -> None:
    """Check the same of one server."""
    cache, replicas = handler.cache, handler.replicas.replicas
    in_memory = [segment for segment in segments_of(cache) if segment.in_memory]
    extents = sorted((copy.offset, copy.offset + copy.nbytes) for copy in [*in_memory, *replicas])
    for (_, end), (start, _) in itertools.pairwise(extents):
        assert end <= start, f"extents overlap at {start}"
    assert all(end <= cache.room.capacity_bytes for _, end in extents), extents
    totals = {
        SegmentState.PUBLISHED: cache.owned_bytes,
        SegmentState.RESERVED: cache.reserved_bytes,
        SegmentState.ZOMBIE: cache.zombie_bytes,
    }
    for state, total in totals.items():
        found = sum(segment.nbytes for segment in in_memory if segment.state is state)
        assert found == total, f"{state}: {found} bytes in segments, {total} counted"
    metadata = sum(
        metadata_bytes_of(s.block_count, 0 if s.index else s.record.own_start)
        + cache.slot_metadata_bytes
        for s in segments_of(cache)
    )
    assert metadata == cache.metadata_bytes, (metadata, cache.metadata_bytes)
    kept = sum(replica.charged_bytes for replica in replicas)
    assert kept == replicas.used_bytes <= replicas.most_bytes, (kept, replicas.counters())
    used = sum(totals.values()) + metadata + kept
    assert cache.room.free_bytes == cache.room.capacity_bytes - used >= 0, cache.counters()
    for segment in segments_of(cache, SegmentState.PUBLISHED):
        assert segment.in_memory or segment.slot is not None, f"{segment.id:#x} is nowhere"
    blocks = {
        segment.block_hash(i)
        for segment in segments_of(cache, SegmentState.PUBLISHED)
        for i in range(segment.block_count)
    }
    assert cache.counters()["block_count"] == len(blocks), "index and segments differ"


def check_reachable(cluster: Cluster) -> None:
    """Check that every segment on the path of a published one is published (5).

    Holds whenever no message between servers is under way.
    """
    for handler in cluster.servers:
        for segment in segments_of(handler.cache, SegmentState.PUBLISHED):
            for ref in segment.record.refs[: segment.place]:
                owner = cluster.servers[segment_owner(ref.segment)]
                assert owner.cache.find(ref) is not None, (
                    f"segment {segment.id:#x} hangs on {ref.segment:#x}, which is gone"
                )


def check_links(cluster: Cluster) -> None:
    """Check that links are exactly those of live children (P7).

    Holds whenever no message between servers is under way.
    """
    expected: dict[int, set[int]] = {}
    for handler in cluster.servers:
        live = segments_of(handler.cache, SegmentState.PUBLISHED)
        for segment in live:
            if segment.parent is not None:
                expected.setdefault(segment.parent.segment, set()).add(segment.serial)
    for handler in cluster.servers:
        for segment in segments_of(handler.cache, SegmentState.PUBLISHED):
            wanted = expected.get(segment.id, set())
            missing = wanted - set(segment.links)
            assert not missing, f"{segment.id:#x} misses the links {missing}"
            for serial in set(segment.links) - wanted:
                child = cluster.servers[segment_owner(segment.links[serial])].cache.slots.get(
                    segment.links[serial]
                )
                assert child is not None, f"{segment.id:#x} has a link to a dead child"
                assert child.state is SegmentState.RESERVED, child
                assert child.serial == serial, child


def check_quiet(cluster: Cluster) -> None:
    """Check that nothing is held for anybody: what must be true after all clients left (7)."""
    for handler in cluster.servers:
        counters = handler.counters()
        for name in ("leased_bytes", "reserved_bytes", "zombie_bytes", "live_reservation_count"):
            assert counters[name] == 0, (name, counters)
        replicas = handler.replicas.replicas
        assert counters["replica_leased_bytes"] == counters["reading_bytes"] == 0, counters
        assert all(r.state is ReplicaState.COMPLETE for r in replicas), list(replicas)
        used = counters["owned_bytes"] + counters["metadata_bytes"] + counters["replica_bytes"]
        assert counters["free_bytes"] == counters["capacity_bytes"] - used, counters
