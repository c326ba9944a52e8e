"""Where an engine keeps the tensors of a layout: the caller's side of every copy.

A block of a tensor is ``pieces`` runs of bytes. Three shapes cover the engines: consecutive
blocks, paged blocks behind a table, and the head-major ``[heads][tokens][dim]`` of transformers.
They lie in host memory or on a CUDA device. No element is ever transposed; nothing here copies,
or knows a driver.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ptstore_mpi import _native
from ptstore_mpi.array_facts import block_table as checked_table
from ptstore_mpi.array_facts import describe
from ptstore_mpi.device_views import DeviceViews, Views
from ptstore_mpi.errors import LayoutMismatchError
from ptstore_mpi.layout import DTYPE_BYTES, KVLayout
from ptstore_mpi.write_targets import check_apart

__all__ = ["TensorView", "bind_bands", "bind_views"]


class TensorView(msgspec.Struct, frozen=True, eq=False):
    """Address and strides, in bytes, of the blocks of one tensor in an engine's memory.

    Build one with `contiguous`, `paged` or `heads`; they accept numpy arrays, torch tensors
    (bfloat16 too) and anything with a CPU buffer or DLPack, without a copy, in host memory or on
    a CUDA device. The view keeps its array alive.

    Blocks on a CUDA device are copied by its driver, on a stream of the store's own that waits
    for the work that is under way on the array when a load or store begins (DLPack's ordering);
    loads and stores return when their copies are complete. A library may export only from its
    current device, and arrays that are immutable by contract (of jax) must not be an output.
    This was **not yet run on a device**: it is exercised against a stand-in for the driver.

    Attributes
    ----------
    owner
        The array.
    address
        Of the first byte of block 0, or of page 0 where there is a table.
    block_count
        Blocks; None for contiguous bytes: as many as they hold.
    block_stride
        Bytes from one block, or page, to the next.
    piece_count, piece_bytes, piece_stride
        A block is this many runs of so many bytes, so many bytes apart.
    total_bytes
        Bytes of all blocks.
    writable
        Whether the array may be written.
    itemsize
        Bytes of one element.
    block_table
        int64, shape (blocks,): the page of each block; None: block ``i`` is page ``i``.
    device
        Ordinal of the CUDA device; None: host memory.
    page_count
        Pages of the array, where there is a table; else None.
    """

    owner: Any
    address: int
    block_count: int | None  # None: contiguous bytes, as many blocks as they hold
    block_stride: int
    piece_count: int
    piece_bytes: int
    piece_stride: int
    total_bytes: int
    writable: bool
    itemsize: int
    block_table: npt.NDArray[np.int64] | None = None
    device: int | None = None  # ordinal of a CUDA device; None: host memory
    page_count: int | None = None

    @classmethod
    def contiguous(cls, array: Any) -> TensorView:
        """View a C-contiguous array whose bytes are ``(blocks, block_bytes)``.

        Raises
        ------
        LayoutMismatchError
            No array in host memory or on a CUDA device, no driver for that, or an array that is not
            C-contiguous.
        """
        address, shape, strides, itemsize, writable, device = describe(array)
        expected = itemsize
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent > 1 and stride != expected:
                raise LayoutMismatchError(
                    f"expected a C-contiguous array, got shape {shape} with strides {strides} bytes"
                )
            expected *= extent
        total_bytes = math.prod(shape) * itemsize
        return cls(array, address, None, 0, 1, 0, 0, total_bytes, writable, itemsize, device=device)

    @classmethod
    def paged(cls, array: Any, block_table: Sequence[int] | npt.NDArray[np.integer]) -> TensorView:
        """View a paged cache: ``array[block_table[i]]`` is block ``i``, dense within itself.

        Parameters
        ----------
        array
            ``[pages, ...]``; a page is one block.
        block_table
            Integers, shape (blocks,): the page of each block.

        Raises
        ------
        LayoutMismatchError
            No array in host memory or on a CUDA device, no driver for that, a block that is not
            dense, or a table that names a block outside the array.
        """
        address, shape, strides, itemsize, writable, device = describe(array)
        if not shape:
            raise LayoutMismatchError("expected [blocks, ...], got an array without axes")
        block_bytes = math.prod(shape[1:]) * itemsize
        expected = itemsize
        for extent, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
            if extent > 1 and stride != expected:
                raise LayoutMismatchError(
                    f"expected dense blocks, got shape {shape} with strides {strides} bytes"
                )
            expected *= extent
        table = checked_table(block_table, shape[0])
        total = table.size * block_bytes
        return cls(
            array,
            address,
            table.size,
            strides[0],
            1,
            block_bytes,
            block_bytes,
            total,
            writable,
            itemsize,
            table,
            device,
            shape[0],
        )

    def with_table(self, block_table: Sequence[int] | npt.NDArray[np.integer]) -> TensorView:
        """Return a view of the same pages behind another block table; only of a `paged` view.

        The array is not looked at again: an engine describes its cache once, and then makes the
        views of each request from these.

        Parameters
        ----------
        block_table
            As in `paged`. A contiguous int64 array is not copied: views of all tensors may share
            one, which then must stay as it is while they are used.

        Raises
        ------
        LayoutMismatchError
            No paged view, or a table that names a block outside the array.
        """
        if self.page_count is None:
            raise LayoutMismatchError("expected a paged view, got one without a block table")
        table = checked_table(block_table, self.page_count)
        return msgspec.structs.replace(
            self,
            block_table=table,
            block_count=table.size,
            total_bytes=table.size * self.piece_bytes,
        )

    @classmethod
    def heads(cls, array: Any, block_tokens: int) -> TensorView:
        """View ``[heads, tokens, dim]`` (a leading batch of 1 is allowed).

        A block is ``heads`` pieces of ``block_tokens * dim`` elements. Trailing tokens that do
        not fill a block are not part of the view.

        Parameters
        ----------
        array
            ``[heads, tokens, dim]``; heads may be any distance apart, tokens of a head are dense.
        block_tokens
            Tokens of a block, as in the layout.

        Raises
        ------
        LayoutMismatchError
            No array in host memory or on a CUDA device, no driver for that, not three axes, or rows
            of a head that are not dense.
        """
        if not isinstance(block_tokens, int) or block_tokens < 1:
            raise LayoutMismatchError(
                f"block_tokens must be an integer of at least 1, got {block_tokens!r:.80}"
            )
        address, shape, strides, itemsize, writable, device = describe(array)
        if len(shape) == 4 and shape[0] == 1:
            shape, strides = shape[1:], strides[1:]
        if len(shape) != 3:
            raise LayoutMismatchError(f"expected [heads, tokens, dim], got shape {shape}")
        heads, tokens, dim = shape
        if (dim > 1 and strides[2] != itemsize) or (tokens > 1 and strides[1] != dim * itemsize):
            raise LayoutMismatchError(
                f"expected dense tokens within a head, got shape {shape}, strides {strides} bytes"
            )
        piece = block_tokens * dim * itemsize
        count = tokens // block_tokens
        total = count * heads * piece
        return cls(
            array,
            address,
            count,
            piece,
            heads,
            piece,
            strides[0],
            total,
            writable,
            itemsize,
            device=device,
        )

    def append_to(self, views: Views, block_bytes: int, *, name: str) -> None:
        """Add this view to ``views``: the next tensor of a layout.

        Parameters
        ----------
        views
            What is added to.
        block_bytes
            Bytes of a block of this tensor.
        name
            Name of the tensor, for the error.

        Raises
        ------
        LayoutMismatchError
            The blocks of this view have another size.
        """
        if self.block_count is None:
            views.append(
                self.address,
                block_count=self.total_bytes // block_bytes,
                block_stride=block_bytes,
                piece_count=1,
                piece_bytes=block_bytes,
                piece_stride=block_bytes,
            )
            return
        found = self.piece_count * self.piece_bytes
        if found != block_bytes:
            raise LayoutMismatchError(
                f"tensor {name!r}: expected {block_bytes} bytes per block, "
                f"got {self.piece_count} pieces of {self.piece_bytes} bytes"
            )
        views.append(
            self.address,
            block_count=self.block_count,
            block_stride=self.block_stride,
            piece_count=self.piece_count,
            piece_bytes=self.piece_bytes,
            piece_stride=self.piece_stride,
            block_table=self.block_table,
        )


def bind_views(
    layout: KVLayout,
    arrays: Sequence[Any],
    block_count: int,
    *,
    writable: bool,
    first_block: int = 0,
) -> Views:
    """Return views of ``arrays``, one per tensor of ``layout``, checked for room.

    Copies between them and a CUDA device follow what is under way on the arrays now.

    Parameters
    ----------
    layout
        Layout whose tensors the arrays hold, in order.
    arrays
        `TensorView` objects, or arrays that are viewed as `TensorView.contiguous`: all in host
        memory, or all on one CUDA device. The caller keeps them alive while the result is used.
    block_count
        Blocks that will be read or written.
    writable
        Whether they will be written.
    first_block
        First block that will be read or written.

    Raises
    ------
    LayoutMismatchError
        Another number of arrays, too little room, elements of another size than the layout's
        dtype, a read-only array where one is written, outputs that overlap, or arrays in
        different places.
    """
    _check_count(layout, arrays)
    views: Views = _native.TensorViews()
    device: int | None = None
    bound: list[tuple[str, TensorView, int]] = []
    for spec, array in zip(layout.tensors, arrays, strict=True):
        view = array if isinstance(array, TensorView) else _contiguous(array, spec.name)
        if view.device != device:
            if bound:
                raise _mixture(bound[0], spec.name, view)
            device = view.device
            assert device is not None
            views = DeviceViews(device)
        room = (
            view.total_bytes // spec.block_bytes if view.block_count is None else view.block_count
        )
        if room < block_count:
            raise LayoutMismatchError(
                f"tensor {spec.name!r}: expected room for {block_count} blocks of "
                f"{spec.block_bytes} bytes, got {room} ({view.total_bytes} bytes)"
            )
        wanted = DTYPE_BYTES.get(layout.dtype, view.itemsize)
        if view.itemsize not in (wanted, 1):
            raise LayoutMismatchError(
                f"tensor {spec.name!r}: expected elements of {wanted} bytes ({layout.dtype}) or "
                f"raw bytes, got elements of {view.itemsize} bytes"
            )
        if writable and not view.writable:
            raise LayoutMismatchError(f"tensor {spec.name!r}: the output array is read-only")
        view.append_to(views, spec.block_bytes, name=spec.name)
        bound.append((spec.name, view, spec.block_bytes))
    if writable:
        check_apart(bound, first=first_block, until=block_count)
    if device is not None:
        _await_producers(arrays)
    return views


def bind_bands(
    layout: KVLayout, arrays: Sequence[Any], ends: Sequence[int]
) -> Iterator[tuple[int, Views]]:
    """Yield the end and the views of each run of tensors of arrays that `bind_views` has taken.

    Parameters
    ----------
    layout, arrays
        As in `bind_views`.
    ends
        Where each run ends among the tensors; the first begins at 0.
    """
    for first, end in itertools.pairwise((0, *ends)):
        views: Views | None = None
        for spec, array in zip(layout.tensors[first:end], arrays[first:end], strict=True):
            view = array if isinstance(array, TensorView) else _contiguous(array, spec.name)
            if views is None:
                views = _native.TensorViews() if view.device is None else DeviceViews(view.device)
            view.append_to(views, spec.block_bytes, name=spec.name)
        assert views is not None, "a run of no tensors"
        yield end, views


def _check_count(layout: KVLayout, arrays: Sequence[Any]) -> None:
    try:
        given = str(len(arrays))
    except TypeError:
        given = type(arrays).__name__
    if given != str(len(layout.tensors)):
        raise LayoutMismatchError(
            f"expected {len(layout.tensors)} arrays, one per tensor of the layout; got {given}"
        )


def _mixture(
    first: tuple[str, TensorView, int], name: str, view: TensorView
) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"expected all arrays in one place, got tensor {first[0]!r} {_place(first[1].device)} and "
        f"tensor {name!r} {_place(view.device)}"
    )


def _place(device: int | None) -> str:
    return "in host memory" if device is None else f"on CUDA device {device}"


def _await_producers(arrays: Sequence[Any]) -> None:
    """Make the stream of the copies wait for what is under way on arrays that were viewed before.

    Only an export of an array makes it wait, for what is under way at that time; and each has to
    be asked, because each may be written on another stream.
    """
    viewed = [array.owner for array in arrays if isinstance(array, TensorView)]
    for array in {id(array): array for array in viewed}.values():
        describe(array)


def _contiguous(array: Any, name: str) -> TensorView:
    try:
        return TensorView.contiguous(array)
    except LayoutMismatchError as error:
        raise LayoutMismatchError(f"tensor {name!r}: {error}") from None
