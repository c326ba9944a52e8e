"""What servers have promised to clients, as seen from the messages alone.

A reader was promised that leased bytes stay until a time (P10, P11), a writer that its region
stays until its watermark has passed (P3).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ptstore_mpi.cache.replicas import Replica
from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.messages import (
    AcquireReply,
    AwaitReply,
    ByeRequest,
    ReleaseRequest,
    ReplicaPlace,
    Reply,
    Request,
    ReserveReply,
)
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.types import ServerIndex

__all__ = ["Lease", "Promises"]

_REMEMBERED_LEASES = 64


@dataclass(slots=True)
class Lease:
    """A copy that a client was granted until ``expiry_s``; ``held`` until it was released.

    ``offset`` is where its bytes were promised to stay.
    """

    client: int
    op: int
    copy: Segment | Replica = field(repr=False)
    offset: int
    expiry_s: float
    held: bool = True


class Promises:
    """Leases and regions of every server of a cluster.

    Attributes
    ----------
    leases
        By server: the newest leases, those that have ended included.
    regions
        By server, then by (client, op): the segments that a client may still be writing.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        servers = cluster.memories
        self.leases: dict[ServerIndex, list[Lease]] = {server: [] for server in servers}
        self.regions: dict[ServerIndex, dict[tuple[int, int], list[Segment]]] = {
            server: {} for server in servers
        }

    def request(self, server: ServerIndex, message: Request) -> None:
        """Take note of what a client lets go, before its server handles the message."""
        low = float("inf") if isinstance(message, ByeRequest) else message.low
        released = message.op if isinstance(message, ReleaseRequest) else None
        for lease in self.leases[server]:
            if lease.client == message.client and (lease.op < low or lease.op == released):
                lease.held = False
        regions = self.regions[server]
        for key in [k for k in regions if k[0] == message.client and k[1] < low]:
            del regions[key]

    def reply(self, client: int, reply: Reply) -> None:
        """Take note of what a server promises."""
        server = ServerIndex(reply.server)
        if isinstance(reply, AcquireReply | AwaitReply):
            ended = [x for x in self.leases[server] if not x.held][:-_REMEMBERED_LEASES]
            kept = self.leases[server] = [x for x in self.leases[server] if x not in ended]
            expiry_s = self._cluster.now + reply.granted_s
            copies: list[Segment | Replica] = [
                self._replica_at(server, p) for p in reply.places if p.status == "here"
            ]
            if isinstance(reply, AcquireReply):
                elsewhere = dict(reply.redirects)
                offsets = [g.offset for i, g in enumerate(reply.grants) if i not in elsewhere]
                copies += [self._segment_at(server, offset) for offset in offsets]
            for copy in copies:
                lease_s = copy.leases.get((client, reply.op), 0.0)
                assert lease_s >= expiry_s, f"promised until {expiry_s}, kept until {lease_s}"
                kept.append(Lease(client, reply.op, copy, copy.offset, expiry_s))
        elif isinstance(reply, ReserveReply) and reply.status == "reserved":
            segments = [self._segment_at(server, offset) for offset in reply.offsets]
            self.regions[server][client, reply.op] = segments

    def check(self, server: ServerIndex) -> None:
        """Raise AssertionError where a server freed what it had promised to keep."""
        slots = self._cluster.servers[server].cache.slots
        replicas = self._cluster.servers[server].replicas.replicas
        for lease in self.leases[server]:
            if lease.held and lease.expiry_s > self._cluster.now:
                copy = lease.copy
                if isinstance(copy, Segment):
                    kept = slots.get(copy.id) is copy and copy.offset == lease.offset
                else:
                    kept = copy in set(replicas)
                assert kept, f"freed under {lease}"
        for (client, op), segments in self.regions[server].items():
            for segment in segments:
                if segment.state is SegmentState.RESERVED:
                    assert slots.get(segment.id) is segment, (
                        f"freed {segment.id:#x}, which client {client} may still write, op {op}"
                    )

    def _replica_at(self, server: ServerIndex, place: ReplicaPlace) -> Replica:
        replicas = self._cluster.servers[server].replicas.replicas
        found = next(
            (replica for replica in replicas if replica.offset == place.grant.offset), None
        )
        assert found is not None, f"server {server} promised a replica that is not there: {place}"
        return found

    def _segment_at(self, server: ServerIndex, offset: int) -> Segment:
        slots = self._cluster.servers[server].cache.slots
        found = next((segment for segment in slots if segment.offset == offset), None)
        assert found is not None, f"server {server} promised offset {offset}: nothing is there"
        return found
