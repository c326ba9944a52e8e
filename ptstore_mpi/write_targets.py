"""Whether the outputs of a load are apart: no byte of an engine's memory is written twice.

Pure arithmetic on addresses, once per load. Outputs whose envelopes do not touch, which is nearly
all there is, cost a few integers per tensor; only where envelopes overlap (pages of keys and
values in turn, heads in turn) every run of bytes is compared. It never touches the memory itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ptstore_mpi.errors import LayoutMismatchError

if TYPE_CHECKING:
    from ptstore_mpi.tensor_view import TensorView

__all__ = ["check_apart"]


class _Target(NamedTuple):
    """What one output is written to: its envelope, and how to list its runs of bytes."""

    low: int
    high: int
    name: str
    view: TensorView
    first: int
    blocks: int

    def runs(self) -> tuple[npt.NDArray[np.int64], int]:
        """Return where each run starts, and the bytes of a run."""
        view = self.view
        if view.block_count is None:
            return np.array([self.low], np.int64), self.high - self.low
        pieces = np.arange(view.piece_count, dtype=np.int64) * view.piece_stride
        if view.block_table is None and view.block_stride == view.piece_bytes:
            first = view.address + self.first * view.block_stride
            return first + pieces, self.blocks * view.piece_bytes  # blocks that touch are one run
        starts = view.address + _blocks(view, self.first, self.blocks) * view.block_stride
        return (starts[:, None] + pieces[None, :]).ravel(), view.piece_bytes


def check_apart(outputs: Sequence[tuple[str, TensorView, int]], *, first: int, until: int) -> None:
    """Raise unless blocks ``first .. until`` of all outputs are apart in memory.

    Parameters
    ----------
    outputs
        Name, view and bytes per block of each tensor.
    first, until
        Blocks that will be written.

    Raises
    ------
    LayoutMismatchError
        Two outputs overlap, or an output holds two blocks in the same place.
    """
    tables: dict[int, tuple[int, int]] = {}
    targets = [
        _target(name, view, first, until - first, block_bytes=block_bytes, tables=tables)
        for name, view, block_bytes in outputs
    ]
    targets.sort(key=itemgetter(0))
    for tangled in _tangled(targets):
        if not _are_side_by_side(tangled):
            _compare_runs(tangled)


def _target(
    name: str,
    view: TensorView,
    first: int,
    count: int,
    *,
    block_bytes: int,
    tables: dict[int, tuple[int, int]],
) -> _Target:
    """Check one output by itself and return what it is written to.

    ``tables`` keeps the bounds of block tables: engines share one among their layers.
    """
    if view.block_count is None:
        low = view.address + first * block_bytes
        return _Target(low, low + count * block_bytes, name, view, first, count)
    lowest, highest = first, first + count - 1
    if view.block_table is not None:
        known = tables.get(id(view.block_table))
        if known is None:
            known = _bounds(name, view.block_table[first : first + count])
            tables[id(view.block_table)] = known
        lowest, highest = known
    reach = (view.piece_count - 1) * view.piece_stride
    one, other = (view.address + place * view.block_stride for place in (lowest, highest))
    low = min(one, other) + min(reach, 0)
    high = max(one, other) + max(reach, 0) + view.piece_bytes
    target = _Target(low, high, name, view, first, count)
    touching = view.block_table is None and view.block_stride == view.piece_bytes
    run_bytes = (count if touching else 1) * view.piece_bytes
    pieces_apart = view.piece_count < 2 or abs(view.piece_stride) >= run_bytes
    blocks_apart = touching or abs(view.block_stride) >= abs(reach) + view.piece_bytes
    if not (pieces_apart and blocks_apart):
        _compare_runs([target])
    return target


def _bounds(name: str, table: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return the lowest and the highest page of a table; raise where a page is in it twice."""
    pages = np.sort(table)
    twice = np.flatnonzero(pages[1:] == pages[:-1])
    if len(twice):
        raise LayoutMismatchError(
            f"tensor {name!r}: expected every block of an output in a page of its own, "
            f"got page {pages[twice[0]]} twice in its block table"
        )
    return int(pages[0]), int(pages[-1])


def _blocks(view: TensorView, first: int, count: int) -> npt.NDArray[np.int64]:
    if view.block_table is not None:
        return view.block_table[first : first + count]
    return np.arange(first, first + count, dtype=np.int64)


def _tangled(targets: Sequence[_Target]) -> Iterator[list[_Target]]:
    """Yield the groups of targets, sorted by address, whose envelopes overlap."""
    group: list[_Target] = []
    end = 0
    for target in targets:
        if group and target.low >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(target)
        end = max(end, target.high)
    if len(group) > 1:
        yield group


def _are_side_by_side(targets: Sequence[_Target]) -> bool:
    """Tell whether these share pages of one table, each with a part of its own (keys, values)."""
    head = targets[0].view
    views = sorted((target.view for target in targets), key=lambda view: view.address)
    return (
        head.block_table is not None
        and all(
            view.block_table is head.block_table
            and view.block_stride == head.block_stride
            and view.piece_count == 1
            for view in views
        )
        and all(a.address + a.piece_bytes <= b.address for a, b in itertools.pairwise(views))
        and views[-1].address + views[-1].piece_bytes - views[0].address <= abs(head.block_stride)
    )


def _compare_runs(targets: Sequence[_Target]) -> None:
    parts = [target.runs() for target in targets]
    starts = np.concatenate([start for start, _ in parts])
    ends = np.concatenate([start + nbytes for start, nbytes in parts])
    order = np.argsort(starts, kind="stable")
    late = np.flatnonzero(ends[order[:-1]] > starts[order[1:]])
    if not len(late):
        return
    bounds = list(itertools.accumulate(len(start) for start, _ in parts))
    first, second = (
        targets[int(np.searchsorted(bounds, order[place], side="right"))].name
        for place in (late[0], late[0] + 1)
    )
    both = f"tensors {first!r} and {second!r}" if first != second else f"blocks of tensor {first!r}"
    raise LayoutMismatchError(
        f"expected outputs that are apart in memory, got {both} that overlap at address "
        f"{int(starts[order[late[0] + 1]]):#x}"
    )
