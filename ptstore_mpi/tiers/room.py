"""The slabs of a tier and the slots in them: pure accounting, no I/O.

A slab counts in full from the moment its file is begun until the file is gone. Invariants, at
every step:

- slots do not overlap, and none crosses from one slab into another;
- a slot with I/O on it is not freed, whoever let it go (P14);
- ``slab_bytes * slab_count <= capacity_bytes``, files that are being made or removed included;
- ``free = slab_bytes * usable slabs - slots in them``.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from ptstore_mpi import _native
from ptstore_mpi.tiers.header import SegmentContent, SlotPlace
from ptstore_mpi.tiers.settings import TierSettings
from ptstore_mpi.types import PAGE_BYTES

__all__ = ["FileSlot", "Slab", "SlabRoom", "SlotState"]


class SlotState(enum.Enum):
    """Where a slot is in its life; a freed one is no longer the tier's."""

    RESERVED = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True, eq=False)
class Slab:
    """One slab: its number, which is never used again, its descriptor and its free space.

    ``descriptor`` is -1 while the file is being made. A retired slab takes no new slots: its
    file was found damaged, and goes when its last slot does.
    """

    number: int
    allocator: _native.RegionAllocator
    descriptor: int = -1
    is_retired: bool = False
    slots: set[FileSlot] = field(default_factory=set)
    reading: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_usable(self) -> bool:
        """Whether it takes new slots."""
        return self.descriptor >= 0 and not self.is_retired


@dataclass(slots=True, eq=False)
class FileSlot:
    """The place of one segment in a slab: header, then payload, whole pages each.

    ``checksums`` are known once the slot is written. ``is_busy``: a read or write of it is under
    way, one at most. ``is_released``: nobody wants it any more.
    """

    slab: Slab
    place: SlotPlace
    content: SegmentContent
    checksums: bytes
    state: SlotState = SlotState.RESERVED
    is_busy: bool = False
    is_released: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload."""
        return self.content.header_bytes + self.content.payload_bytes


class SlabRoom:
    """Which parts of which slabs are taken.

    Parameters
    ----------
    settings
        Capacity and size of a slab.
    tier
        What tells this tier's slots from all others, 16 bytes.
    """

    def __init__(self, settings: TierSettings, tier: bytes) -> None:
        self._slab_bytes = settings.slab_bytes
        self._most_slabs = settings.most_slabs
        self._tier = tier
        self._next_number = 0
        self.slabs: list[Slab] = []
        self.reserved_bytes = 0

    @property
    def file_bytes(self) -> int:
        """Bytes of all files, those included that are being made or removed."""
        return len(self.slabs) * self._slab_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of usable slabs that no slot has."""
        return sum(slab.allocator.free_bytes for slab in self.slabs if slab.is_usable)

    @property
    def slot_count(self) -> int:
        """Slots that are not free."""
        return sum(len(slab.slots) for slab in self.slabs)

    def fits(self, nbytes: int) -> bool:
        """Tell whether a usable slab has ``nbytes`` in one piece."""
        return any(slab.allocator.largest_free_bytes >= nbytes for slab in self._usable())

    def reserve(self, content: SegmentContent) -> FileSlot | None:
        """Return a slot in the first slab with room, so that the later ones run empty; or None."""
        nbytes = content.header_bytes + content.payload_bytes
        for slab in self._usable():
            offset = slab.allocator.allocate(nbytes)
            if offset is not None:
                place = SlotPlace(self._tier, slab.number, offset)
                slot = FileSlot(slab, place, content, content.checksums)
                slab.slots.add(slot)
                self.reserved_bytes += nbytes
                return slot
        return None

    def release(self, slot: FileSlot) -> None:
        """Free a slot, at once or when the I/O on it has ended."""
        assert not slot.is_released, "a slot was released twice"
        slot.is_released = True
        self.free_if_idle(slot)

    def free_if_idle(self, slot: FileSlot) -> None:
        """Free a slot that was released and has no I/O on it."""
        if slot.is_released and not slot.is_busy:
            slot.slab.slots.remove(slot)
            slot.slab.allocator.release(slot.place.offset, slot.nbytes)
            self.reserved_bytes -= slot.nbytes

    def begin_slab(self) -> Slab | None:
        """Count a further slab, whose file is now to be made; None: the capacity is used up."""
        if len(self.slabs) == self._most_slabs:
            return None
        allocator = _native.RegionAllocator(self._slab_bytes, alignment_bytes=PAGE_BYTES)
        slab = Slab(self._next_number, allocator)
        self._next_number += 1
        self.slabs.append(slab)
        return slab

    def forget_slab(self, slab: Slab) -> None:
        """Count a slab no more: its file is gone, or was never made."""
        assert not slab.slots, "a slab with slots was given up"
        self.slabs.remove(slab)

    def _usable(self) -> Iterable[Slab]:
        return (slab for slab in self.slabs if slab.is_usable)
