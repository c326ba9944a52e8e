"""Tensors on a CUDA device, and the copies that move their blocks between them and an image.

The counterpart of the native `TensorViews`: the same strides, but instead of copying it says what
to ask of the driver. Runs that touch are one copy, and equal runs at one distance are the rows of
one two-dimensional copy; only what is neither is copied run by run. Pure arithmetic: it knows no
driver, and never touches the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ptstore_mpi import _native

__all__ = ["Copy", "DeviceViews", "Views"]

_LARGEST_PITCH_BYTES = (1 << 31) - 1  # of a two-dimensional copy, on every device so far


class Copy(NamedTuple):
    """``row_count`` rows of ``row_bytes`` bytes, each dense on both sides.

    ``address`` is where the first row lies on the device and ``offset`` where it lies in the
    memory of the image; ``pitch`` and ``image_pitch`` are the distances of the rows there, bytes.
    """

    address: int
    offset: int
    row_bytes: int
    row_count: int
    pitch: int
    image_pitch: int


class _Strides(NamedTuple):
    """Where the blocks of a tensor lie, from its address; equal for all layers of most caches."""

    block_stride: int
    piece_count: int
    piece_bytes: int
    piece_stride: int

    def copies(self, places: Sequence[int], *, with_table: bool) -> list[Copy]:
        """Return the copies of the blocks at ``places`` into consecutive blocks at offset 0."""
        starts = [
            place * self.block_stride + piece * self.piece_stride
            for place in places
            for piece in range(self.piece_count)
        ]
        by_block = _grouped(_merged(starts, self.piece_bytes))
        block_bytes = self.piece_count * self.piece_bytes
        if (
            with_table
            or self.piece_count >= len(by_block)
            or not self.piece_bytes <= self.block_stride <= _LARGEST_PITCH_BYTES
            or block_bytes > _LARGEST_PITCH_BYTES
        ):
            return by_block
        return [
            Copy(
                start,
                piece * self.piece_bytes,
                self.piece_bytes,
                len(places),
                self.block_stride,
                block_bytes,
            )
            for piece, start in enumerate(starts[: self.piece_count])
        ]


class _Tensor(NamedTuple):
    address: int
    block_count: int
    block_bytes: int
    strides: _Strides
    block_table: npt.NDArray[np.int64] | None


class DeviceViews:
    """Where an engine keeps the tensors of a layout on one CUDA device, in layout order.

    Attributes
    ----------
    device
        Ordinal of the device in this process.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._tensors: list[_Tensor] = []

    def append(
        self,
        address: int,
        *,
        block_count: int,
        block_stride: int,
        piece_count: int,
        piece_bytes: int,
        piece_stride: int,
        block_table: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Add the next tensor; all as in the native views."""
        strides = _Strides(block_stride, piece_count, piece_bytes, piece_stride)
        self._tensors.append(
            _Tensor(address, block_count, piece_count * piece_bytes, strides, block_table)
        )

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block, per tensor."""
        return [tensor.block_bytes for tensor in self._tensors]

    def copies(
        self,
        *,
        view_block: int,
        block_count: int,
        offset: int,
        segment_blocks: int,
        segment_block: int,
        memory_bytes: int,
    ) -> Iterator[Copy]:
        """Yield the copies between blocks of the tensors and a segment image.

        Parameters
        ----------
        view_block, block_count
            Blocks of the tensors.
        offset, segment_blocks
            Where the image begins in its memory, and its blocks per tensor.
        segment_block
            First block of the image.
        memory_bytes
            Size of that memory.

        Raises
        ------
        ValueError
            A range that does not lie in its tensor, the image or the memory; nothing was yielded.
        """
        image_bytes = segment_blocks * sum(self.block_bytes)
        within = min((tensor.block_count for tensor in self._tensors), default=0)
        _check_range("view blocks", view_block, block_count, within)
        _check_range("segment blocks", segment_block, block_count, segment_blocks)
        _check_range("image bytes", offset, image_bytes, memory_bytes)
        return self._copies(view_block, block_count, offset, (segment_blocks, segment_block))

    def _copies(
        self, view_block: int, block_count: int, offset: int, segment: tuple[int, int]
    ) -> Iterator[Copy]:
        segment_blocks, segment_block = segment
        plans: dict[tuple[_Strides, int], list[Copy]] = {}
        for address, _, block_bytes, strides, table in self._tensors:
            key = (strides, id(table))
            if key not in plans:
                places: Sequence[int] = range(view_block, view_block + block_count)
                if table is not None:
                    places = table[view_block : view_block + block_count].tolist()
                plans[key] = strides.copies(places, with_table=table is not None)
            image = offset + segment_block * block_bytes
            for copy in plans[key]:
                yield copy._replace(address=address + copy.address, offset=image + copy.offset)
            offset += segment_blocks * block_bytes


Views = _native.TensorViews | DeviceViews
"""Tensors of a layout, all in host memory or all on one CUDA device."""


def _check_range(name: str, first: int, count: int, within: int) -> None:
    if first < 0 or count < 1 or first + count > within:
        raise ValueError(f"expected {name} in 0..{within}, got {first}..{first + count}")


def _merged(starts: Sequence[int], nbytes: int) -> list[tuple[int, int]]:
    """Return (start, bytes) of the runs that pieces of ``nbytes`` make, in their order."""
    runs: list[tuple[int, int]] = []
    for start in starts:
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + nbytes)
        else:
            runs.append((start, nbytes))
    return runs


def _grouped(runs: Sequence[tuple[int, int]]) -> list[Copy]:
    """Return runs that lie one after another in the image as copies of as many rows as can be."""
    copies: list[Copy] = []
    offset = first = 0
    while first < len(runs):
        start, nbytes = runs[first]
        end = first + 1
        pitch = runs[end][0] - start if end < len(runs) else 0
        if not nbytes <= pitch <= _LARGEST_PITCH_BYTES:
            pitch = 0  # no rows: rows do not overlap, and never go backwards
        while pitch and end < len(runs) and runs[end] == (start + (end - first) * pitch, nbytes):
            end += 1
        rows = end - first
        copies.append(Copy(start, offset, nbytes, rows, pitch if rows > 1 else nbytes, nbytes))
        offset += rows * nbytes
        first = end
    return copies
