"""Segments, the records they belong to, and the table of slots that names them.

A record is the flat metadata of one stored object: every segment of the prefix from position 0,
inherited ones first, then the object's own. A segment knows its record and its place in it, so a
match is answered by cutting one list; no chain of parents is ever walked.

::

    record.refs   [ s1 . s2 . s7 | s8 . s9 ]      s1 s2 inherited whole, s7 partly
                                 ^ own_start      s8 s9 are this increment
    links         s7 <- s8 <- s9                  child to parent, one per own segment
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ptstore_mpi.cache.leases import LeaseKey, is_leased
from ptstore_mpi.types import (
    GENERATION_BITS,
    BlockHashes,
    SegmentId,
    SegmentRef,
    ServerIndex,
    pack_segment_id,
    segment_slot,
)

__all__ = ["Record", "Segment", "SegmentState", "SlotTable"]


class SegmentState(enum.Enum):
    """Where a segment is in its life (P6); a freed segment no longer exists."""

    RESERVED = enum.auto()
    PUBLISHED = enum.auto()
    ZOMBIE = enum.auto()


@dataclass(slots=True, eq=False)
class Record:
    """Flat metadata of one increment: ``refs[own_start:]`` name its own segments.

    ``tensor_bytes`` are the bytes of one block of each tensor.
    """

    namespace: bytes
    tensor_bytes: tuple[int, ...]
    refs: tuple[SegmentRef, ...]
    own_start: int


@dataclass(slots=True, eq=False)
class Segment:
    """One segment of this server: the ``index``-th of its increment.

    ``offset`` and ``nbytes`` are its extent in the arena, in whole pages; ``metadata_bytes`` is
    what describing it costs; ``hashes`` are those of its blocks. ``serial`` names the link to its
    parent, ``links`` those of its children: a set of (serial, child id), never a counter (P7).
    ``holders`` are the servers that may have a replica of it, longest unused first: a hint (P18).

    Over a file tier a published segment has a memory copy, a file copy (in ``slot``) or both;
    ``offset`` is -1 where there is none in memory. While ``move`` is ``write`` only the memory copy
    is whole, while it is ``read`` only the file copy, and memory and slot belong to the tier.
    ``is_reused``: read since it was published. ``is_fetched``: read back, and not granted since.
    """

    id: SegmentId
    record: Record
    index: int
    offset: int
    nbytes: int
    metadata_bytes: int
    hashes: BlockHashes
    serial: int
    state: SegmentState = SegmentState.RESERVED
    checksums: bytes = b""
    links: dict[int, int] = field(default_factory=dict)
    leases: dict[LeaseKey, float] = field(default_factory=dict)
    holders: dict[int, None] = field(default_factory=dict)
    slot: Any = None
    move: Literal["", "write", "read"] = ""
    is_reused: bool = False
    is_fetched: bool = False

    @property
    def in_memory(self) -> bool:
        """Whether it has room in memory; while ``move`` is ``read``, its bytes are on the way."""
        return self.offset >= 0

    @property
    def has_bytes(self) -> bool:
        """Whether its bytes are in memory, all of them."""
        return self.offset >= 0 and self.move != "read"

    @property
    def is_clean(self) -> bool:
        """Whether its memory copy may be freed without a write."""
        return self.slot is not None and self.offset >= 0 and not self.move

    @property
    def block_count(self) -> int:
        """Blocks of this segment."""
        return len(self.hashes)

    @property
    def namespace(self) -> bytes:
        """Digest of its namespace."""
        return self.record.namespace

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each tensor."""
        return self.record.tensor_bytes

    @property
    def place(self) -> int:
        """Position of this segment in its record."""
        return self.record.own_start + self.index

    @property
    def path(self) -> tuple[SegmentRef, ...]:
        """The flat record before this segment."""
        return self.record.refs[: self.place]

    @property
    def parent(self) -> SegmentRef | None:
        """The segment this one continues; None at position 0."""
        return self.record.refs[self.place - 1] if self.place else None

    def is_leased(self, now: float) -> bool:
        """Tell whether any lease on this segment is still valid."""
        return is_leased(self, now)

    def block_hash(self, block: int) -> bytes:
        """Return the chained hash of one block, 16 bytes."""
        return bytes(self.hashes[block])


class SlotTable:
    """Names segments: hands out ids, finds a segment by id, retires used-up slots.

    Parameters
    ----------
    server
        Owner field of every id.
    generation_bits
        Width of the generation that is really used, at most 20; tests take 0 to show that safety
        does not rest on it, and then slots are reused without end.
    """

    def __init__(self, server: ServerIndex, *, generation_bits: int = GENERATION_BITS) -> None:
        self._server = server
        self._last_generation = (1 << generation_bits) - 1
        self._reuse_forever = generation_bits == 0
        self._segments: list[Segment | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []
        self.retired_count = 0

    def take(self) -> SegmentId:
        """Return a fresh id; its slot stays empty until `put`."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._segments)
            self._segments.append(None)
            self._generations.append(0)
        return pack_segment_id(self._server, slot, self._generations[slot])

    def put(self, segment: Segment) -> None:
        """Enter a segment under its id."""
        self._segments[segment_slot(segment.id)] = segment

    def get(self, segment_id: int) -> Segment | None:
        """Return the segment of exactly this id, in whatever state, or None."""
        slot = segment_slot(segment_id)
        segment = self._segments[slot] if slot < len(self._segments) else None
        return segment if segment is not None and segment.id == segment_id else None

    def release(self, segment: Segment) -> None:
        """Forget a segment; its slot is reused under the next generation, or retired."""
        slot = segment_slot(segment.id)
        assert self._segments[slot] is segment, "released a segment that its slot does not hold"
        self._segments[slot] = None
        if self._reuse_forever:
            self._free.append(slot)
        elif self._generations[slot] < self._last_generation:
            self._generations[slot] += 1
            self._free.append(slot)
        else:
            self.retired_count += 1

    def __iter__(self) -> Iterator[Segment]:
        return iter([segment for segment in self._segments if segment is not None])
