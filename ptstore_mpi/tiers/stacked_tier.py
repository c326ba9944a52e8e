"""Two slab stores as one tier of a server: the node's SSD, and a parallel file system below it.

::

    reserve --> upper; where that is full, its oldest slot is moved down first:
                read into a buffer, written below, then the old slot is let go; one at a time

What the server holds stays the same while its bytes are moved, and may be read or let go at any
time. Oldest is what was written or read longest ago: segments come in the order of the server's
policy. Moving begins before the upper store is full. A store that fails is passed over.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.cache.tier import MoveEnded, Tier, TierRefusal
from ptstore_mpi.tiers.outcomes import Ended, Refusal
from ptstore_mpi.tiers.room import FileSlot
from ptstore_mpi.tiers.segment_tier import REFUSALS, content_of
from ptstore_mpi.tiers.slab_store import SlabStore

__all__ = ["StackedTier"]

_LOW_MARK_SHARE = 10  # a tenth of the upper store is kept free


@dataclass(slots=True, eq=False)
class _Place:
    """Where a segment is: what the server holds as its slot."""

    store: SlabStore
    slot: FileSlot
    is_released: bool = False


@dataclass(slots=True, eq=False)
class _Descent:
    """A place whose bytes are on their way down, and the slot that they go to."""

    place: _Place
    target: FileSlot
    is_read: bool = False
    is_writing: bool = False


class StackedTier(Tier):
    """The file tiers of one server.

    Parameters
    ----------
    names
        What the counters of the upper and of the lower store begin with.
    upper, lower
        The stores.
    memory
        The arena, uint8, page-aligned.
    """

    def __init__(
        self,
        names: tuple[str, str],
        upper: SlabStore,
        lower: SlabStore,
        *,
        memory: npt.NDArray[np.uint8],
    ) -> None:
        self.name = names[0]
        self._names = names
        self._upper = upper
        self._lower = lower
        self._memory = memory
        self._moving: dict[FileSlot, Segment] = {}
        self._oldest: dict[_Place, None] = {}  # written, in the upper store
        self._descent: _Descent | None = None
        self._buffer = mmap.mmap(-1, mmap.PAGESIZE)  # shared, as the arena is: see `Scratch`
        self._low_mark_bytes = upper.settings.capacity_bytes // _LOW_MARK_SHARE
        self._was_growing = False
        self._has_moved = False
        self._is_stuck = False  # the lower store took nothing when last asked
        self._moved_count = 0

    def reserve(self, segment: Segment) -> _Place | TierRefusal:
        """Return a slot for a segment, or why there is none."""
        content = content_of(segment)
        found = self._upper.reserve(content)
        if isinstance(found, FileSlot):
            return _Place(self._upper, found)
        if found is Refusal.FULL:
            if self._descent is not None or self._begin_descent():
                return "growing"
            return "growing" if self._lower.is_growing else "full"
        if found is Refusal.GROWING:
            return "growing"
        below = self._lower.reserve(content)
        return _Place(self._lower, below) if isinstance(below, FileSlot) else REFUSALS[below]

    def release(self, slot: _Place) -> None:
        """Let a slot go; it is freed when no I/O is on it."""
        slot.is_released = True
        self._is_stuck = False
        self._oldest.pop(slot, None)
        slot.store.release(slot.slot)
        if self._descent is not None and self._descent.place is slot:
            self._lower.release(self._descent.target)

    def start_write(self, segment: Segment) -> bool:
        """Begin to write a segment's memory to its slot."""
        place: _Place = segment.slot
        return self._started(segment, place.store.start_write(place.slot, self._bytes(segment)))

    def start_read(self, segment: Segment) -> bool:
        """Begin to read a segment's slot into its memory."""
        place: _Place = segment.slot
        if place.slot.is_busy:  # it is just being read to be moved
            return False
        if place in self._oldest:
            self._oldest[place] = self._oldest.pop(place)
        return self._started(segment, place.store.start_read(place.slot, self._bytes(segment)))

    def poll(self) -> tuple[MoveEnded, ...]:
        """Return what has ended since the last call; never waits."""
        ended = []
        for each in (*self._upper.poll(), *self._lower.poll()):
            descent = self._descent
            if each.slot in self._moving:
                ended.append(self._end(each))
            elif descent is not None:
                self._go_on(descent, each)
        descent = self._descent
        if descent is not None and descent.is_read and not descent.is_writing:
            self._write_below(descent)
        is_low = self._upper.spare_bytes < self._low_mark_bytes
        if is_low and self._descent is None and not self._is_stuck:
            self._begin_descent()
        return tuple(ended)

    def take_change(self) -> bool:
        """Tell whether there may be room or time now that there was not when last asked."""
        is_growing = self._upper.is_growing or self._lower.is_growing
        changed = self._has_moved or is_growing is not self._was_growing
        self._has_moved, self._was_growing = False, is_growing
        self._is_stuck = self._is_stuck and not changed
        return changed

    @property
    def is_growing(self) -> bool:
        """Whether a file is being made or a slot being moved down."""
        is_making = self._upper.is_growing or self._lower.is_growing
        return is_making or self._descent is not None

    @property
    def capacity_bytes(self) -> int:
        """Most that the files may take."""
        return self._upper.settings.capacity_bytes + self._lower.settings.capacity_bytes

    def counters(self) -> dict[str, int]:
        """Return sizes and events by name, in bytes and counts."""
        upper, lower = self._names
        return {
            **{f"{upper}_{name}": count for name, count in self._upper.counters().items()},
            **{f"{lower}_{name}": count for name, count in self._lower.counters().items()},
            f"{lower}_moved_count": self._moved_count,
        }

    def close(self) -> None:
        """Wait for the I/O under way and remove the files."""
        self._upper.close()
        self._lower.close()
        self._moving.clear()
        self._oldest.clear()
        self._descent = None

    # -- internals -------------------------------------------------------------------------

    def _bytes(self, segment: Segment) -> memoryview:
        return self._memory[segment.offset : segment.offset + segment.nbytes].data

    def _started(self, segment: Segment, started: bool) -> bool:
        if started:
            self._moving[segment.slot.slot] = segment
        return started

    def _end(self, ended: Ended) -> MoveEnded:
        segment = self._moving.pop(ended.slot)
        is_done = ended.outcome == "done"
        place: _Place | None = segment.slot
        is_its = place is not None and place.slot is ended.slot and place.store is self._upper
        if is_its and place is not None and ended.kind == "write" and is_done:
            self._oldest[place] = None
        return MoveEnded(segment, ended.kind, is_done)

    def _begin_descent(self) -> bool:
        """Begin to move the oldest slot down; False: not now."""
        place = next((each for each in self._oldest if not each.slot.is_busy), None)
        if place is None:
            return False
        target = self._lower.reserve(place.slot.content)
        self._is_stuck = not isinstance(target, FileSlot)
        if not isinstance(target, FileSlot):
            return False
        nbytes = place.slot.content.payload_bytes
        if len(self._buffer) < nbytes:
            self._buffer = mmap.mmap(-1, nbytes)
        if not self._upper.start_read(place.slot, memoryview(self._buffer)[:nbytes]):
            self._lower.release(target)
            return False
        self._descent = _Descent(place, target)
        return True

    def _go_on(self, descent: _Descent, ended: Ended) -> None:
        """Take the next step of a move, or end it."""
        place, is_done = descent.place, ended.outcome == "done"
        if ended.kind == "read" and is_done and not place.is_released:
            descent.is_read = True
            self._has_moved = True  # its slot may be read by others again
            return
        self._descent = None
        self._has_moved = True
        if place.is_released:
            return
        self._oldest.pop(place, None)
        if not is_done:  # what cannot be read is found out by whoever asks for it
            self._lower.release(descent.target)
            if ended.kind == "write":
                self._oldest[place] = None
            return
        self._upper.release(place.slot)
        place.store, place.slot = self._lower, descent.target
        self._moved_count += 1

    def _write_below(self, descent: _Descent) -> None:
        if descent.place.is_released:
            self._descent = None
            self._has_moved = True
            return
        nbytes = descent.target.content.payload_bytes
        memory = memoryview(self._buffer)[:nbytes]
        descent.is_writing = self._lower.start_write(descent.target, memory)
