"""The dict that the store is compared with, and a watcher of leases and of regions being written.

The model knows tokens and outcomes only; the watcher reads the messages that pass by.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.messages import (
    AcquireReply,
    ByeRequest,
    ReleaseRequest,
    ReserveReply,
)


class Model:
    """Which blocks are known: certainly (copies by hash), or perhaps (a store without an end)."""

    def __init__(self):
        self.copies: Counter[bytes] = Counter()
        self.perhaps: dict[object, list[bytes]] = {}
        self._doubtful: set[object] = set()

    def begin_store(self, key, hashes):
        """A store is under way: each of its blocks may become known at any step."""
        self.perhaps[key] = [bytes(block) for block in hashes]

    def end_store(self, key, stored):
        """A store has ended; None where its client does not know how."""
        if stored is None or stored.reason == "late" or key in self._doubtful:
            return
        hashes = self.perhaps.pop(key)
        if stored.reason == "stored":
            self.copies.update(hashes[len(hashes) - stored.block_count :])

    def drop(self, hashes, running, *, certain):
        """One copy of each of these blocks is gone, or no answer came: perhaps it is."""
        for block in hashes:
            if self.copies[block]:
                self.copies[block] -= 1
        if not certain:
            self.perhaps[object()] = list(hashes)
        self._doubt(running)

    def clear(self, running, *, certain):
        """Nothing is known, and only stores that are still under way can change that."""
        if not certain:
            self.perhaps[object()] = list(self.copies.elements())
        else:
            self.perhaps = {key: value for key, value in self.perhaps.items() if key in running}
        self.copies.clear()
        self._doubt(running)

    def _doubt(self, running):
        """What is under way may have been published, and removed again, without its client."""
        self._doubtful |= set(running)

    def bounds(self, hashes):
        """Return the least and the largest depth, in blocks, that a match may find."""
        perhaps = {block for blocks in self.perhaps.values() for block in blocks}
        least = most = 0
        for depth, block in enumerate(map(bytes, hashes), 1):
            if self.copies[block]:
                least = most = depth
            elif block in perhaps:
                most = depth
        return least, most


@dataclass
class Lease:
    server: int
    client: int
    op: int
    segment: Segment
    expiry: float


@dataclass
class Region:
    server: int
    client: int
    op: int
    segments: list[Segment]


class Watcher:
    """Sees every request and reply; knows what is leased and what may still be written."""

    def __init__(self, cluster):
        self._cluster = cluster
        self.leases: list[Lease] = []
        self.regions: list[Region] = []

    def request(self, server, message):
        """A request is about to be handled by ``server``."""
        low = float("inf") if isinstance(message, ByeRequest) else message.low
        self.regions = [
            region
            for region in self.regions
            if (region.server, region.client) != (server, message.client) or region.op >= low
        ]
        released = message.op if isinstance(message, ReleaseRequest) else None
        self.leases = [
            lease
            for lease in self.leases
            if (lease.server, lease.client) != (server, message.client)
            or not (lease.op < low or lease.op == released)
        ]

    def reply(self, client, reply):
        """A reply has left its server."""
        cache = self._cluster.servers[reply.server].cache
        by_offset = {segment.offset: segment for segment in cache.slots}
        if isinstance(reply, AcquireReply):
            expiry = self._cluster.now + reply.granted_s
            for grant in reply.grants:
                segment = by_offset[grant.offset]
                self.leases.append(Lease(reply.server, client, reply.op, segment, expiry))
        elif isinstance(reply, ReserveReply) and reply.status == "reserved":
            segments = [by_offset[offset] for offset in reply.offsets]
            self.regions.append(Region(reply.server, client, reply.op, segments))

    def check(self):
        """Check that nothing leased and nothing that may still be written was freed (4)."""
        for lease in self.leases:
            if lease.expiry > self._cluster.now:
                held = self._cluster.servers[lease.server].cache.slots.get(lease.segment.id)
                assert held is lease.segment, f"freed under a lease: {lease}"
        for region in self.regions:
            slots = self._cluster.servers[region.server].cache.slots
            for segment in region.segments:
                if segment.state is SegmentState.RESERVED:
                    assert slots.get(segment.id) is segment, f"freed under its writer: {region}"
