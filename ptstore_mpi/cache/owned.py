"""The owned cache of one server: segments, index, leases and links.

It decides nothing about messages: the handler calls it, it keeps the state true. Invariants:

- only published segments are in the index, and every published segment is;
- an extent is freed only when its segment has left the index and no lease on it is valid;
- ``owned + reserved + zombie + metadata`` bytes are charged to the arena's `Room`, at every step;
- a segment with links (children) is dropped only together with them;
- over a file tier a published segment may be without memory: ``owned_bytes`` are those that have
  it. What describes a slot is charged from the beginning, so that it never lacks room.

Metadata is charged to the same budget as the bytes it describes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ptstore_mpi import _native
from ptstore_mpi.cache.eviction import Eviction
from ptstore_mpi.cache.leases import Leases
from ptstore_mpi.cache.memory_copies import MemoryCopies
from ptstore_mpi.cache.room import Room
from ptstore_mpi.cache.segment import Record, Segment, SegmentState, SlotTable
from ptstore_mpi.cache.sides import Watch
from ptstore_mpi.cache.tier import Tier
from ptstore_mpi.types import (
    GENERATION_BITS,
    BlockHashes,
    SegmentRef,
    ServerIndex,
    segment_owner,
    whole_pages,
)

__all__ = ["OwnedCache", "metadata_bytes_of"]

_SEGMENT_METADATA_BYTES = 1024  # Segment, its ref, dictionaries, slot
_BLOCK_METADATA_BYTES = 80  # index entry at its load factor, hash, checksum
_SLOT_METADATA_BYTES = 512  # place and content of a file slot
_INHERITED_METADATA_BYTES = 16  # one entry of a flat record


def metadata_bytes_of(block_count: int, inherited_count: int = 0) -> int:
    """Return what describing a segment costs; the first of an increment bears what it inherits."""
    return (
        _SEGMENT_METADATA_BYTES
        + _BLOCK_METADATA_BYTES * block_count
        + _INHERITED_METADATA_BYTES * inherited_count
    )


class OwnedCache(Leases[Segment]):
    """Segments owned by one server.

    Parameters
    ----------
    server
        This server.
    room
        Room of its arena, shared with whoever else keeps something there.
    generation_bits
        As in `SlotTable`.
    eviction
        Names what is dropped where there is no room; None: nothing is.
    copies, tier
        Order of the memory copies over a file tier, and that tier; both or none.

    Attributes
    ----------
    watch
        Hears what becomes of published segments, where somebody wants to know.
    """

    def __init__(
        self,
        server: ServerIndex,
        room: Room,
        *,
        generation_bits: int = GENERATION_BITS,
        eviction: Eviction | None = None,
        copies: MemoryCopies | None = None,
        tier: Tier | None = None,
    ) -> None:
        super().__init__()
        self.server = server
        self.room = room
        self._eviction = eviction
        self.tier = tier
        self.slot_metadata_bytes = 0 if tier is None else _SLOT_METADATA_BYTES
        self.copies = copies
        if copies is not None:
            copies.parent_of = self._parent_of
        self.watch: Watch[Segment] | None = None
        self.slots = SlotTable(server, generation_bits=generation_bits)
        self._index = _native.PrefixIndex()
        self._zombies: set[Segment] = set()
        self._next_serial = (int(server) << 48) + 1
        self.owned_bytes = 0
        self.reserved_bytes = 0
        self.zombie_bytes = 0
        self.metadata_bytes = 0

    # -- reading ---------------------------------------------------------------------------

    def match(self, hashes: BlockHashes) -> tuple[SegmentRef, ...]:
        """Return the flat record of the deepest block known here, cut to its depth."""
        found = self._index.deepest(hashes)
        if found is None:
            return ()
        _, segment_id, position = found
        segment = self.slots.get(segment_id)
        assert segment is not None, "the index names a segment that does not exist"
        return (*segment.path, _ref(segment, position + 1))

    def find(self, ref: SegmentRef) -> Segment | None:
        """Return the published segment that ``ref`` names, compared by id *and* hash (P4)."""
        segment = self.slots.get(ref.segment)
        if segment is None or segment.state is not SegmentState.PUBLISHED:
            return None
        if not 1 <= ref.block_count <= segment.block_count:
            return None
        return segment if segment.block_hash(ref.block_count - 1) == ref.last_hash else None

    def is_published(self, block_hash: bytes) -> bool:
        """Tell whether a block of this chained hash is published here."""
        return block_hash in self._index

    # -- writing ---------------------------------------------------------------------------

    def reserve(
        self, record: Record, hashes: BlockHashes, block_counts: Sequence[int]
    ) -> list[Segment] | None:
        """Reserve a region for new segments, or return None: no room.

        It is contiguous where there is such room, so that it can be read in one go, and in
        pieces of whole segments otherwise. ``record`` carries namespace and inherited refs; its
        own refs are filled in here.
        """
        sizes, metadata = _needs(record, block_counts, self.slot_metadata_bytes)
        offsets = self.room.take(sizes, metadata_bytes=sum(metadata))
        if offsets is None:
            return None
        segments: list[Segment] = []
        first_block = 0
        shapes = zip(block_counts, offsets, sizes, metadata, strict=True)
        for count, offset, nbytes, overhead in shapes:
            segment = Segment(
                self.slots.take(),
                record,
                index=len(segments),
                offset=offset,
                nbytes=nbytes,
                metadata_bytes=overhead,
                hashes=hashes[first_block : first_block + count],
                serial=self._next_serial,
            )
            self._next_serial += 1
            self.slots.put(segment)
            segments.append(segment)
            first_block += count
        record.refs += tuple(_ref(segment, segment.block_count) for segment in segments)
        for parent, child in itertools.pairwise(segments):
            parent.links[child.serial] = child.id  # not held: they come and go together
        self.reserved_bytes += sum(sizes)
        self.metadata_bytes += sum(metadata)
        return segments

    def rebase(self, segments: Sequence[Segment], path: tuple[SegmentRef, ...]) -> bool:
        """Replace what a reserved increment inherits before its parent; False: no room for it."""
        record, first = segments[0].record, segments[0]
        more = _INHERITED_METADATA_BYTES * (len(path) + 1 - record.own_start)
        if not self.room.charge(more):
            return False
        record.refs = (*path, *record.refs[record.own_start - 1 :])
        record.own_start = len(path) + 1
        first.metadata_bytes += more
        self.metadata_bytes += more
        return True

    def publish(self, segments: Iterable[Segment], checksums: bytes, now: float = 0.0) -> None:
        """Make reserved segments visible, all in one step."""
        start = 0
        for segment in segments:
            segment.state = SegmentState.PUBLISHED
            segment.checksums = checksums[start : start + 4 * segment.block_count]
            start += 4 * segment.block_count
            self._index.insert(segment.hashes, segment.id)
            self.reserved_bytes -= segment.nbytes
            self.owned_bytes += segment.nbytes
            if self.copies is not None:
                self.copies.enter(segment, now)
            if self.watch is not None:
                self.watch.kept(segment)
            if self._eviction is not None:
                parent = self._parent_of(segment)
                self._eviction.published(segment, parent, now)
                if parent is not None and not segment.index:
                    self._eviction.let_go(parent)  # it is held by its child itself from now on

    def link(self, parent: Segment, serial: int, child: int) -> None:
        """Note that a segment is continued by one that is not visible here (P7).

        It cannot be dropped then, but it may leave memory.
        """
        if serial not in parent.links and self._eviction is not None:
            self._eviction.hold(parent)
        parent.links[serial] = child

    def unlink(self, parent: Segment, serial: int) -> None:
        """Note that it is not any more; of a segment here, before that is retired."""
        if parent.links.pop(serial, None) is None or self._eviction is None:
            return
        if serial not in self._eviction:
            self._eviction.let_go(parent)

    def free_reserved(self, segments: Iterable[Segment]) -> None:
        """Give a reserved region back (P3 only: nobody may still write into it)."""
        for segment in segments:
            assert segment.state is SegmentState.RESERVED
            self.reserved_bytes -= segment.nbytes
            self._free(segment)

    def retire(self, segment: Segment, now: float, *, evicted: bool = False) -> None:
        """Take a published segment out of the index; free its bytes after its last lease.

        Segments that continue it here must have been retired before.
        """
        assert segment.state is SegmentState.PUBLISHED
        if self._eviction is not None:
            self._eviction.retired(segment, evicted=evicted)
        if self.copies is not None:
            self.copies.retired(segment, evicted=evicted)
            self.let_slot_go(segment)
        if self.watch is not None and segment.in_memory:
            self.watch.left(segment, evicted=evicted)
        removed = self._index.remove(segment.hashes, segment.id)
        assert removed == segment.block_count, "a published segment was not wholly indexed"
        segment.state = SegmentState.ZOMBIE
        if segment.in_memory:
            self.owned_bytes -= segment.nbytes
            self.zombie_bytes += segment.nbytes
        self._zombies.add(segment)
        self.free_if_dead(segment, now)

    # -- memory and files ------------------------------------------------------------------

    def let_slot_go(self, segment: Segment) -> None:
        """Give a segment's slot up, if it has one."""
        if segment.slot is not None and self.tier is not None:
            self.tier.release(segment.slot)
            segment.slot = None

    def take_memory(self, segment: Segment, now: float) -> bool:
        """Take room for the bytes of a segment that is only in a file; False: there is none."""
        assert self.copies is not None
        offsets = self.room.take([segment.nbytes], metadata_bytes=0)
        if offsets is None:
            return False
        (segment.offset,) = offsets
        self.owned_bytes += segment.nbytes
        self.copies.enter(segment, now)
        if self.watch is not None:
            self.watch.kept(segment)
        return True

    def free_memory(self, segment: Segment) -> None:
        """Free the memory copy of a segment that has a file copy and no lease (P14)."""
        assert self.copies is not None
        self.copies.leave(segment)
        if self.watch is not None:
            self.watch.left(segment, evicted=True, on_disk=True)
        self.room.give_back(segment.offset, segment.nbytes)
        self.owned_bytes -= segment.nbytes
        segment.offset = -1

    # -- making room -----------------------------------------------------------------------

    def hold(self, segment: Segment) -> None:
        """Keep a segment here, and in memory if it is there, until as many `let_go`."""
        if self._eviction is not None:
            self._eviction.hold(segment)
        if self.copies is not None:
            self.copies.hold(segment)

    def let_go(self, segment: Segment) -> None:
        """End one `hold`."""
        if self._eviction is not None:
            self._eviction.let_go(segment)
        if self.copies is not None:
            self.copies.let_go(segment)

    def use(self, refs: Sequence[SegmentRef], now: float) -> None:
        """Note that one request uses what this server has of these, in the order of its prefix."""
        if self._eviction is None and self.copies is None:
            return
        found = (self.slots.get(r.segment) for r in refs if segment_owner(r.segment) == self.server)
        segments = [s for s in found if s is not None and s.state is SegmentState.PUBLISHED]
        if not segments:
            return
        if self._eviction is not None:
            self._eviction.used(segments, now)
        in_memory = [segment for segment in segments if segment.in_memory]
        if self.copies is not None and in_memory:
            self.copies.used(in_memory, now)
        if self.watch is not None:
            self.watch.used(in_memory)

    def needed_bytes(self, record: Record, block_counts: Sequence[int]) -> int:
        """Return what a region takes, metadata included."""
        sizes, metadata = _needs(record, block_counts, self.slot_metadata_bytes)
        return sum(sizes) + sum(metadata)

    def could_fit(
        self, record: Record, block_counts: Sequence[int], *, others_bytes: int = 0
    ) -> bool:
        """Tell whether a region would fit once all was evicted that nobody reads or writes.

        ``others_bytes`` are those of the arena that others cannot give.
        """
        held = others_bytes + self.reserved_bytes + self.zombie_bytes + self.leased_bytes
        return self.needed_bytes(record, block_counts) <= self.room.capacity_bytes - held

    @property
    def evicts(self) -> bool:
        """Whether anything may go to make room."""
        return self._eviction is not None

    def last_use(self, segment: Segment) -> int:
        """Return when a published segment was used last, as a number among all uses."""
        assert self._eviction is not None
        return self._eviction.last_use(segment)

    def may_go(self, segment: Segment) -> bool:
        """Tell whether a published leaf is in nobody's use."""
        return self._eviction is not None and self._eviction.is_idle(segment)

    def victim(self) -> Segment | None:
        """Return the segment that should go first, or None: nothing may go."""
        return None if self._eviction is None else self._eviction.victim()

    def published(self, namespace: bytes | None = None) -> list[Segment]:
        """Return the published segments, of one namespace where one is given."""
        return [
            segment
            for segment in self.slots
            if segment.state is SegmentState.PUBLISHED
            and (namespace is None or segment.record.namespace == namespace)
        ]

    def counters(self) -> dict[str, int]:
        """Return sizes by name, in bytes and counts."""
        published = self.published()
        return {
            "capacity_bytes": self.room.capacity_bytes,
            "free_bytes": self.room.free_bytes,
            "owned_bytes": self.owned_bytes,
            "reserved_bytes": self.reserved_bytes,
            "zombie_bytes": self.zombie_bytes,
            "metadata_bytes": self.metadata_bytes,
            "leased_bytes": self.leased_bytes,
            "segment_count": len(published),
            "block_count": len(self._index),
            "retired_slot_count": self.slots.retired_count,
        }

    def free_if_dead(self, segment: Segment, now: float) -> None:
        """Free a retired segment that no lease keeps any more."""
        if segment in self._zombies and not segment.move and not segment.is_leased(now):
            self._zombies.discard(segment)
            self.zombie_bytes -= segment.nbytes if segment.in_memory else 0
            self._free(segment)

    # -- internals -------------------------------------------------------------------------

    def _free(self, segment: Segment) -> None:
        self.forget_leases(segment)
        if segment.in_memory:
            metadata_bytes = segment.metadata_bytes
            self.room.give_back(segment.offset, segment.nbytes, metadata_bytes=metadata_bytes)
        else:
            self.room.refund(segment.metadata_bytes)
        self.metadata_bytes -= segment.metadata_bytes
        self.slots.release(segment)

    def _parent_of(self, segment: Segment) -> Segment | None:
        return None if segment.parent is None else self.slots.get(segment.parent.segment)


def _needs(
    record: Record, block_counts: Sequence[int], slot_bytes: int
) -> tuple[list[int], list[int]]:
    """Return the bytes of each new segment of a record, and of its metadata."""
    block_bytes = sum(record.tensor_bytes)
    metadata = [metadata_bytes_of(count) for count in block_counts]
    metadata[0] = metadata_bytes_of(block_counts[0], len(record.refs))
    sizes = [whole_pages(count * block_bytes) for count in block_counts]
    return sizes, [nbytes + slot_bytes for nbytes in metadata]


def _ref(segment: Segment, block_count: int) -> SegmentRef:
    return SegmentRef(segment.id, block_count, segment.block_hash(block_count - 1))
