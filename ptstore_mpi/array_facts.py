"""What can be known of arrays that an engine passes, without a copy: where they lie, and tables.

Whatever an exporter raises, and whatever a caller gives, the errors are ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi import _native
from ptstore_mpi.errors import LayoutMismatchError, TransportError

__all__ = ["block_table", "describe"]

_INT64 = np.dtype(np.int64)


def describe(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int, bool, int | None]:
    """Return what `_native.array_info` does; whatever an exporter raises, the error is ours."""
    try:
        return _native.array_info(array, _stream_of)
    except TransportError:
        raise
    except Exception as error:
        raise LayoutMismatchError(
            f"expected an array in host memory or on a CUDA device, "
            f"got {type(array).__name__}: {error}"
        ) from None


def _stream_of(device: int) -> int:
    from ptstore_mpi import cuda  # not before a CUDA tensor is seen: most hosts never need it

    return cuda.device(device).stream


def block_table(given: Any, page_count: int) -> npt.NDArray[np.int64]:
    """Return a block table as contiguous int64, shape (blocks,), checked against the pages.

    A table that is such an array already is returned itself: tensors may share one.
    """
    if (
        type(given) is np.ndarray
        and given.ndim == 1
        and given.dtype == _INT64
        and given.flags.c_contiguous
        and (not given.size or np.maximum.reduce(given.view(np.uint64)) < page_count)
    ):
        return given  # below 0 is beyond any page when read as unsigned
    try:
        table = np.asarray(given)
    except Exception as error:
        raise LayoutMismatchError(
            f"expected a 1-d table of integers, got {type(given).__name__}: {error}"
        ) from None
    if table.ndim != 1 or (table.size and table.dtype.kind not in "iu"):
        raise LayoutMismatchError(
            f"expected a 1-d table of integers, got a table of shape {table.shape}, "
            f"dtype {table.dtype}"
        )
    if table.size and not 0 <= table.min() <= table.max() < page_count:
        raise LayoutMismatchError(
            f"expected a table of blocks in 0..{page_count - 1}, got {table.min()}..{table.max()}"
        )
    return np.ascontiguousarray(table, dtype=np.int64)
