"""A `SlabStore` as the file tier of a server: segments of its cache in, their ends out.

Knows where the bytes of a segment are; decides nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.cache.tier import MoveEnded, Tier, TierRefusal
from ptstore_mpi.tiers.header import NO_PARENT, SegmentContent
from ptstore_mpi.tiers.outcomes import Ended, Refusal
from ptstore_mpi.tiers.room import FileSlot
from ptstore_mpi.tiers.slab_store import SlabStore

__all__ = ["REFUSALS", "SegmentTier", "content_of"]

REFUSALS: dict[Refusal, TierRefusal] = {
    Refusal.FULL: "full",
    Refusal.GROWING: "growing",
    Refusal.PAUSED: "paused",
    Refusal.LARGE: "large",
}
"""The refusals of a store in the words of a tier."""


class SegmentTier(Tier):
    """The file tier of one server.

    Parameters
    ----------
    name
        What its counters begin with.
    store
        Its slabs.
    memory
        The arena, uint8, page-aligned.
    """

    def __init__(self, name: str, store: SlabStore, memory: npt.NDArray[np.uint8]) -> None:
        self.name = name
        self.store = store
        self._memory = memory
        self._moving: dict[FileSlot, Segment] = {}
        self._was_growing = False

    def reserve(self, segment: Segment) -> FileSlot | TierRefusal:
        """Return a slot for a segment, or why there is none."""
        slot = self.store.reserve(content_of(segment))
        return REFUSALS[slot] if isinstance(slot, Refusal) else slot

    def release(self, slot: FileSlot) -> None:
        """Let a slot go; it is freed when no I/O is on it."""
        self.store.release(slot)

    def start_write(self, segment: Segment) -> bool:
        """Begin to write a segment's memory to its slot."""
        return self._started(segment, self.store.start_write(segment.slot, self._bytes(segment)))

    def start_read(self, segment: Segment) -> bool:
        """Begin to read a segment's slot into its memory."""
        return self._started(segment, self.store.start_read(segment.slot, self._bytes(segment)))

    def poll(self) -> tuple[MoveEnded, ...]:
        """Return what has ended since the last call; never waits."""
        return tuple(map(self._end, self.store.poll()))

    def take_change(self) -> bool:
        """Tell whether there may be room now that there was not when last asked."""
        before, self._was_growing = self._was_growing, self.store.is_growing
        return self._was_growing is not before

    @property
    def is_growing(self) -> bool:
        """Whether a file is being made."""
        return self.store.is_growing

    @property
    def capacity_bytes(self) -> int:
        """Most that the files may take."""
        return self.store.settings.capacity_bytes

    def counters(self) -> dict[str, int]:
        """Return sizes and events by name, in bytes and counts."""
        return {f"{self.name}_{name}": count for name, count in self.store.counters().items()}

    def close(self) -> None:
        """Wait for the I/O under way and remove the files."""
        self.store.close()
        self._moving.clear()

    def _bytes(self, segment: Segment) -> memoryview:
        return self._memory[segment.offset : segment.offset + segment.nbytes].data

    def _started(self, segment: Segment, started: bool) -> bool:
        if started:
            self._moving[segment.slot] = segment
        return started

    def _end(self, ended: Ended) -> MoveEnded:
        return MoveEnded(self._moving.pop(ended.slot), ended.kind, ended.outcome == "done")


def content_of(segment: Segment) -> SegmentContent:
    """Return what a slot says of a segment."""
    parent = segment.parent
    return SegmentContent(
        namespace=segment.record.namespace,
        segment=segment.id,
        hashes=segment.hashes,
        tensor_bytes=segment.record.tensor_bytes,
        checksums=segment.checksums,
        parent_hash=NO_PARENT if parent is None else parent.last_hash,
    )
