"""The write path of a server: reservations, links, publish, and what ends them (P2-P8).

Life of a reservation::

    reserve --+-- full | gone | dedup | unconfirmed          nothing was reserved
              `-- reserved --+-- published                   the one step that makes it visible
                             +-- dedup                       its last block was there already
                             +-- corrupt                     its bytes fail their checksums
                             `-- gone | expired | abandoned  it can never be published any more

A region that can no longer be published is *quarantined*: its writer may still be writing into
it, so its bytes are freed only when the writer's watermark has passed (P3), never by time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from typing import Literal, get_args

import numpy as np

from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.segment import Record, Segment
from ptstore_mpi.protocol.actions import Action, Answer, CancelReceives, PostReceives, ToPeer
from ptstore_mpi.protocol.making_room import MakingRoom
from ptstore_mpi.protocol.messages import (
    PublishRequest,
    ReserveReply,
    ReserveRequest,
    WriteReply,
    WriteStatus,
)
from ptstore_mpi.protocol.peer_messages import Link, LinkResult, PeerMessage, Prune, Trim, Unlink
from ptstore_mpi.protocol.reservation import Reservation, Reservations
from ptstore_mpi.protocol.trim import Trimming
from ptstore_mpi.types import HASH_BYTES, SegmentRef, ServerIndex, segment_owner

__all__ = ["Verify", "WritePath"]

Verify = Literal["off", "remote", "always"]

_WAITING_SHARE = 0.5  # of the time of a store, that it may wait for room: it has yet to write


class WritePath:
    """Reservations and links of one server. Its methods return the actions they cause.

    Parameters
    ----------
    cache
        Owned cache of this server.
    making_room
        Makes room for reservations, and knows what takes whatever leaves.
    unconfirmed_count
        Unsettled regions a client may hold here (P2).
    is_intact
        Tells whether the bytes of a segment have these checksums.
    server_count
        Servers of the job; None: any.
    verify
        Increments that are verified before they become visible (P5): none, those whose bytes
        came over a wire, or all.

    Attributes
    ----------
    demotion
        Makes room over a file tier; None: there is none, and leaves are dropped.
    """

    def __init__(
        self,
        cache: OwnedCache,
        making_room: MakingRoom,
        *,
        unconfirmed_count: int,
        is_intact: Callable[[Segment, bytes], bool],
        server_count: int | None = None,
        verify: Verify = "remote",
    ) -> None:
        self._cache = cache
        self.making_room = making_room
        self.removal = removal = making_room.removal
        removal.end_write = self._end_write_of
        self._is_intact = is_intact
        self._server_count = math.inf if server_count is None else server_count
        self._verify = verify
        self._unconfirmed_count = unconfirmed_count
        self.trimming = Trimming(cache, removal)
        self.reservations = Reservations()
        self._by_serial: dict[int, Reservation] = {}
        self._waiting: list[tuple[ReserveRequest, float]] = []  # and when each came
        self.status_counts = dict.fromkeys(get_args(WriteStatus), 0)

    # -- requests of clients ---------------------------------------------------------------

    def reserve(
        self, request: ReserveRequest, now: float, *, came_s: float | None = None
    ) -> Iterator[Action | ToPeer]:
        """Reserve a region that was asked for at ``came_s`` (now), or say why not, once (P2)."""
        came_s = now if came_s is None else came_s
        known = self.reservations.find(request.client, request.op)
        if known is None:
            is_late = now - came_s >= _WAITING_SHARE * request.remaining_s
            known = yield from self._reserve_anew(request, now, may_wait=not is_late)
            if known is None:
                self._waiting.append((request, came_s))
                return
            self.reservations.add(known)
            if known.is_live:
                yield from self._open(known, request)
        offsets = tuple(segment.offset for segment in known.segments)
        yield Answer(
            request.client,
            ReserveReply(
                self._cache.server,
                request.op,
                request.attempt,
                known.status,
                offsets if known.is_live else (),
            ),
        )

    def publish(self, request: PublishRequest, now: float) -> Iterator[Action | ToPeer]:
        """Publish when bytes and link are complete; until then the answer waits (P5, P7)."""
        known = self.reservations.find(request.client, request.op)
        if known is None:
            yield Answer(
                request.client,
                WriteReply(self._cache.server, request.op, request.attempt, "expired"),
            )
            return
        known.publish = request
        if known.segments and not known.receives_open:
            known.complete = True
        yield from self._advance(known, now)

    def abandon(self, client: int, op: int, now: float) -> Iterator[Action | ToPeer]:
        """End a reservation's publishability; late, it changes nothing that is published."""
        known = self.reservations.find(client, op)
        if known is not None and known.is_live:
            yield from self._end(known, "abandoned", now)

    def raise_low(self, client: int, low: float, now: float) -> Iterator[Action | ToPeer]:
        """Free what the client confirms that it will not write any more (P3)."""
        self._waiting = [w for w in self._waiting if w[0].client != client or w[0].op >= low]
        for known in self.reservations.below(client, low):
            if known.is_live:
                yield from self._end(known, "abandoned", now)
            if not known.holds_region:
                self.reservations.forget(known)
            elif known.receives_open:
                if not known.freeing:
                    known.freeing = True
                    yield CancelReceives(client, known.op)
            else:
                self._free(known)
                self.reservations.forget(known)

    # -- events of the transport and of time -----------------------------------------------

    def received(
        self, client: int, op: int, now: float, *, intact: bool
    ) -> Iterator[Action | ToPeer]:
        """All data messages of a write have arrived (``intact``: with the expected sizes)."""
        known = self.reservations.find(client, op)
        if known is None:
            return
        known.receives_open = False
        if known.freeing:
            self.settled(client, op)
        elif not intact and known.is_live:
            yield from self._end(known, "abandoned", now)
        else:
            known.complete = True
            yield from self._advance(known, now)

    def settled(self, client: int, op: int) -> None:
        """No receive of this write is open any more: free the region that waited for it."""
        known = self.reservations.find(client, op)
        if known is not None and known.freeing:
            known.receives_open = False
            self._free(known)
            self.reservations.forget(known)

    def expire(self, now: float) -> Iterator[Action | ToPeer]:
        """End the reservations whose time has passed."""
        for known in self.reservations:
            if known.is_live and known.expiry_s <= now:
                yield from self._end(known, "expired", now)

    def retry_waiting(self, now: float) -> Iterator[Action | ToPeer]:
        """Try again the requests that waited for pages of the arena, or for room in it."""
        waiting, self._waiting = self._waiting, []
        for request, came_s in waiting:
            yield from self.reserve(request, now, came_s=came_s)

    # -- links between servers -------------------------------------------------------------

    def handle_peer(
        self, sender: ServerIndex, message: PeerMessage, now: float
    ) -> Iterator[Action | ToPeer]:
        """Handle one message of another server."""
        match message:
            case Link(serial, parent, child):
                segment = self._cache.find(parent)
                path: tuple[SegmentRef, ...] = ()
                if segment is not None:
                    self._cache.link(segment, serial, child)
                    path = segment.path
                yield ToPeer(sender, LinkResult(serial, segment is not None, path))
            case LinkResult(serial, linked, path):
                known = self._by_serial.pop(serial, None)
                if known is not None and known.is_live:
                    yield from self._link_result(known, path if linked else None, now)
            case Unlink(serial, parent, _):
                # By id alone: the parent may be a zombie, and serials are never reused.
                segment = self._cache.slots.get(parent.segment)
                if segment is not None:
                    self._cache.unlink(segment, serial)
            case Prune(serial, child):
                yield from self.removal.prune(child, serial, now)
            case Trim(serial, child):
                yield from self.trimming.trim(child, serial, now)

    def clear(self, namespace: bytes, now: float) -> Generator[Action | ToPeer, None, int]:
        """End every reservation of a namespace, remove its segments and return their count."""
        for known in self.reservations:
            if known.is_live and known.segments[0].record.namespace == namespace:
                yield from self._end(known, "gone", now)
        return (yield from self.removal.remove_namespace(namespace, now))

    @property
    def remembered_count(self) -> int:
        """Writes and requests that are not forgotten yet."""
        known = sum(1 for _ in self.reservations)
        return known + len(self._by_serial) + len(self._waiting)

    # -- internals -------------------------------------------------------------------------

    def _reserve_anew(
        self, request: ReserveRequest, now: float, *, may_wait: bool = True
    ) -> Generator[Action | ToPeer, None, Reservation | None]:
        """Return the new reservation, or None where there will be more room soon."""

        def refused(status: WriteStatus) -> Reservation:
            self.status_counts[status] += 1
            return Reservation(request.client, request.op, status, now)

        if len(self.reservations.regions_of(request.client)) >= self._unconfirmed_count:
            return refused("unconfirmed")
        if self._cache.is_published(request.hashes[-HASH_BYTES:]):
            return refused("dedup")
        ancestors = request.ancestors
        parent = ancestors[-1] if ancestors else None
        own_parent: Segment | None = None
        if parent is not None and segment_owner(parent.segment) >= self._server_count:
            return refused("gone")
        if parent is not None and segment_owner(parent.segment) == self._cache.server:
            own_parent = self._cache.find(parent)
            if own_parent is None:
                return refused("gone")
            ancestors = (*own_parent.path, parent)  # that of its own links, never mixed (P8)
        record = Record(request.namespace, request.tensor_bytes, ancestors, len(ancestors))
        if own_parent is not None:
            self._cache.hold(own_parent)
        segments = yield from self._find_room(request, record, now)
        if own_parent is not None:
            if segments is not None:
                self._cache.link(own_parent, segments[0].serial, segments[0].id)
            self._cache.let_go(own_parent)
        if segments is None:
            demotion = self.making_room.demotion
            waits = may_wait and demotion is not None and demotion.is_freeing
            waits &= self._cache.could_fit(record, request.segment_block_counts)
            return None if waits or not self._cache.room.is_populated else refused("full")
        return Reservation(
            request.client,
            request.op,
            "reserved",
            now + request.remaining_s,
            segments,
            linked=parent is None or own_parent is not None,
            mapped=request.mapped,
        )

    def _find_room(
        self, request: ReserveRequest, record: Record, now: float
    ) -> Generator[Action | ToPeer, None, list[Segment] | None]:
        """Reserve a region, making as much room as that takes, nothing in vain; None: no room."""
        cache, counts = self._cache, request.segment_block_counts
        hashes = np.frombuffer(request.hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
        segments = cache.reserve(record, hashes, counts)
        if segments is None and cache.room.is_populated:
            kept_bytes = self.making_room.replicas.kept_bytes
            could_fit = cache.could_fit(record, counts, others_bytes=kept_bytes)
            need_bytes = cache.needed_bytes(record, counts)
            while (
                segments is None
                and could_fit
                and (yield from self.making_room.make_room(need_bytes, now))
            ):
                segments = cache.reserve(record, hashes, counts)
            demotion = self.making_room.demotion
            if segments is None and could_fit and not (demotion and demotion.is_freeing):
                yield from self.trimming.ask(now)
        return segments

    def _open(self, known: Reservation, request: ReserveRequest) -> Iterator[Action | ToPeer]:
        first = known.segments[0]
        if not known.linked:
            parent = request.ancestors[-1]
            self._by_serial[first.serial] = known
            yield ToPeer(segment_owner(parent.segment), Link(first.serial, parent, first.id))
        if not request.mapped:
            known.receives_open = True
            block_bytes = sum(request.tensor_bytes)
            sizes = (count * block_bytes for count in request.segment_block_counts)
            extents = tuple(
                (segment.offset, size) for segment, size in zip(known.segments, sizes, strict=True)
            )
            yield PostReceives(request.client, request.op, extents)

    def _advance(self, known: Reservation, now: float) -> Iterator[Action | ToPeer]:
        """Publish if everything is there; answer a waiting publish whose fate is known."""
        if known.is_live:
            if known.expiry_s <= now:
                yield from self._end(known, "expired", now)
                return
            if known.publish is None or not (known.complete and known.linked):
                return
            if self._cache.is_published(known.segments[-1].block_hash(-1)):
                yield from self._end(known, "dedup", now)
                return
            if not self._verified(known, known.publish.checksums):
                yield from self._end(known, "corrupt", now)
                return
            self._cache.publish(known.segments, known.publish.checksums, now)
            known.status = "published"
            self.status_counts["published"] += 1
        yield from self._answer(known)

    def _end_write_of(self, segment: Segment, now: float) -> Iterator[Action | ToPeer]:
        known = self.reservations.of_segment(segment)
        if known is not None and known.is_live:
            yield from self._end(known, "gone", now)

    def _end(
        self, known: Reservation, status: WriteStatus, now: float, *, unlink: bool = True
    ) -> Iterator[Action | ToPeer]:
        """Make a live reservation unpublishable: unlinked at once, its bytes quarantined."""
        assert known.is_live
        known.status = status
        self.status_counts[status] += 1
        self._by_serial.pop(known.segments[0].serial, None)
        if unlink:
            yield from self.removal.unlink(known.segments[0])
        yield from self._answer(known)

    def _link_result(
        self, known: Reservation, path: tuple[SegmentRef, ...] | None, now: float
    ) -> Iterator[Action | ToPeer]:
        """Take the parent's own path for the record: the client's may be an older one (P8)."""
        if path is None:
            yield from self._end(known, "gone", now, unlink=False)
        elif not self._cache.rebase(known.segments, path):
            yield from self._end(known, "full", now)
        else:
            known.linked = True
            yield from self._advance(known, now)

    def _verified(self, known: Reservation, checksums: bytes) -> bool:
        if not checksums:
            return True
        if len(checksums) != 4 * sum(segment.block_count for segment in known.segments):
            return False
        if self._verify == "off" or (known.mapped and self._verify == "remote"):
            return True
        start = 0
        for segment in known.segments:
            end = start + 4 * segment.block_count
            if not self._is_intact(segment, checksums[start:end]):
                return False
            start = end
        return True

    def _answer(self, known: Reservation) -> Iterator[Action | ToPeer]:
        if known.publish is not None:
            publish, known.publish = known.publish, None
            yield Answer(
                known.client,
                WriteReply(self._cache.server, publish.op, publish.attempt, known.status),
            )

    def _free(self, known: Reservation) -> None:
        self._cache.free_reserved(known.segments)
        known.segments = []
