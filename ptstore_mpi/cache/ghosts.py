"""What a little more memory would still hold: names of what left a server's arena of late.

Owns names and sizes, never bytes. Each list holds at most as many bytes of what left last as a
step of the balance moves, and a bounded number of names. Who is found in one is forgotten there:
it is about to come back, so that nothing is counted twice.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ptstore_mpi import _native
from ptstore_mpi.types import BlockHashes, SegmentRef

__all__ = ["ReplicaGhosts", "SegmentGhosts"]

_MOST_NAMES = 1 << 14
_MOST_BLOCKS = 1 << 16


class ReplicaGhosts:
    """Replicas that were dropped, or never had room, for want of a larger share.

    Parameters
    ----------
    most_bytes
        Bytes of the replicas that are remembered.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by segment: blocks, bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, ref: SegmentRef, nbytes: int) -> None:
        """Remember a replica that is not here any more, the latest of all."""
        self._forget(ref.segment)
        self._held[ref.segment] = (ref.block_count, nbytes)
        self._bytes += nbytes
        while self._bytes > self._most_bytes or len(self._held) > _MOST_NAMES:
            self._forget(next(iter(self._held)))

    def take(self, ref: SegmentRef) -> bool:
        """Tell whether a larger share would hold what ``ref`` names, and forget it.

        Ids alone are compared: a mistake would bend a statistic, never a byte.
        """
        held = self._held.get(ref.segment)
        if held is None or held[0] < ref.block_count:
            return False
        self._forget(ref.segment)
        return True

    def _forget(self, segment: int) -> None:
        _, nbytes = self._held.pop(segment, (0, 0))
        self._bytes -= nbytes


class _Gone(NamedTuple):
    """A segment that has left memory."""

    hashes: BlockHashes
    nbytes: int
    block_bytes: int
    on_disk: bool


class SegmentGhosts:
    """Owned segments that were evicted, found by the hashes of a prompt.

    Parameters
    ----------
    most_bytes
        Bytes of the segments that are remembered.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._index = _native.PrefixIndex()
        self._held: OrderedDict[int, _Gone] = OrderedDict()  # by serial
        self._bytes = 0
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(
        self, serial: int, hashes: BlockHashes, nbytes: int, *, block_bytes: int, on_disk: bool
    ) -> None:
        """Remember a segment that has left memory, the latest of all; for ever or to a disk."""
        self._forget(serial)
        self._held[serial] = _Gone(hashes, nbytes, block_bytes, on_disk)
        self._index.insert(hashes, serial)
        self._bytes += nbytes
        self._blocks += len(hashes)
        while self._bytes > self._most_bytes or self._blocks > _MOST_BLOCKS:
            self._forget(next(iter(self._held)))

    def take(self, hashes: BlockHashes, known_blocks: int) -> tuple[int, int]:
        """Return the bytes of a prompt that more memory would hold, and forget these segments.

        Parameters
        ----------
        hashes
            Of the prompt's blocks.
        known_blocks
            How many of them this server still has: what is less deep has not been missed.

        Returns
        -------
        Bytes that are nowhere here, and bytes that are on disk.
        """
        lost_bytes = disk_bytes = 0
        while self._held and (found := self._index.deepest(hashes)) is not None:
            depth, serial, position = found
            gone = self._held[serial]
            nbytes = (position + 1) * gone.block_bytes
            if gone.on_disk:
                disk_bytes += nbytes
            elif depth > known_blocks:
                lost_bytes += nbytes
            self._forget(serial)
        return lost_bytes, disk_bytes

    def _forget(self, serial: int) -> None:
        gone = self._held.pop(serial, None)
        if gone is not None:
            self._index.remove(gone.hashes, serial)
            self._bytes -= gone.nbytes
            self._blocks -= len(gone.hashes)
