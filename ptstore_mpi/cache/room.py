"""Room in one arena: what is free, what is taken, and the budget both share.

Owns the allocator and the budget; everybody who keeps something in the arena charges it here, the
bytes and what describing them costs, so that no sum can go over the capacity.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ptstore_mpi import _native
from ptstore_mpi.types import PAGE_BYTES

__all__ = ["Room"]


class Room:
    """The room of one server's arena.

    Parameters
    ----------
    capacity_bytes
        Budget of the arena, metadata included.
    populated_bytes
        Pages of the arena that may be used so far; default: all. See `grow`.

    Attributes
    ----------
    free_bytes
        Bytes of the budget that nothing uses.
    """

    def __init__(self, capacity_bytes: int, *, populated_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        populated = capacity_bytes if populated_bytes is None else populated_bytes
        self._allocator = _native.RegionAllocator(populated, alignment_bytes=PAGE_BYTES)

    @property
    def is_populated(self) -> bool:
        """Whether the whole arena may be used."""
        return self._allocator.capacity_bytes >= self.capacity_bytes

    def grow(self, populated_bytes: int) -> bool:
        """Allow the pages populated so far; return whether any came new."""
        if populated_bytes <= self._allocator.capacity_bytes:
            return False
        self._allocator.grow(populated_bytes)
        return True

    def fits(self, nbytes: int, *, metadata_bytes: int) -> bool:
        """Tell whether one extent and what describes it could be taken now."""
        enough = nbytes + metadata_bytes <= self.free_bytes
        return enough and nbytes <= self._allocator.largest_free_bytes

    def take(self, sizes: Sequence[int], *, metadata_bytes: int) -> list[int] | None:
        """Take extents and charge them and what describes them; None, with nothing taken: no room.

        Parameters
        ----------
        sizes
            Bytes of each extent, whole pages. They lie side by side where there is such room.
        metadata_bytes
            Charged besides.

        Returns
        -------
        Where each extent begins.
        """
        nbytes = sum(sizes) + metadata_bytes
        offsets = self._allocate(sizes) if nbytes <= self.free_bytes else None
        if offsets is not None:
            self.free_bytes -= nbytes
        return offsets

    def give_back(self, offset: int, nbytes: int, *, metadata_bytes: int = 0) -> None:
        """Free one extent, and with it what described it."""
        self._allocator.release(offset, nbytes)
        self.free_bytes += nbytes + metadata_bytes

    def refund(self, metadata_bytes: int) -> None:
        """Give back what a description was charged."""
        self.free_bytes += metadata_bytes

    def charge(self, metadata_bytes: int) -> bool:
        """Charge a description that has grown; False, with nothing charged: no room."""
        if metadata_bytes > self.free_bytes:
            return False
        self.free_bytes -= metadata_bytes
        return True

    def _allocate(self, sizes: Sequence[int]) -> list[int] | None:
        start = self._allocator.allocate(sum(sizes))
        if start is not None:
            return list(itertools.accumulate(sizes[:-1], initial=start))
        offsets: list[int] = []
        for size in sizes:
            offset = self._allocator.allocate(size)
            if offset is None:
                for taken, nbytes in zip(offsets, sizes, strict=False):
                    self._allocator.release(taken, nbytes)
                return None
            offsets.append(offset)
        return offsets
