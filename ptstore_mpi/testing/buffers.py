"""The same KV in every shape in which an engine may keep it: what the conformance suite copies.

Each kind turns the bytes of blocks, shape (blocks, block_bytes) per tensor, into memory that an
engine could own, hands out the views of it that the store takes, and reads the bytes back.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi.layout import KVLayout
from ptstore_mpi.tensor_view import TensorView

__all__ = ["BUFFER_KINDS", "Buffers", "available_kinds", "make_buffers"]

Bytes = npt.NDArray[np.uint8]

_HEADS = 2
_SPARE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Buffers:
    """KV in an engine's memory.

    Attributes
    ----------
    views
        One array or `TensorView` per tensor: what `Namespace.load` and `store` take.
    read
        Returns the bytes per tensor, uint8, shape (blocks, block_bytes).
    """

    views: list[Any]
    read: Callable[[], list[Bytes]]


def make_buffers(kind: str, layout: KVLayout, blocks: Sequence[Bytes]) -> Buffers:
    """Return ``blocks`` (uint8, one array per tensor) in memory of the given kind."""
    return BUFFER_KINDS[kind](layout, [np.array(array) for array in blocks])


def available_kinds() -> list[str]:
    """Return the kinds that can be made here: those of torch only where it is installed."""
    has_torch = importlib.util.find_spec("torch") is not None
    return [kind for kind in BUFFER_KINDS if has_torch or not kind.startswith("torch")]


def _contiguous(layout: KVLayout, blocks: list[Bytes]) -> Buffers:
    return Buffers(list(blocks), lambda: blocks)


def _paged(layout: KVLayout, blocks: list[Bytes]) -> Buffers:
    count = len(blocks[0])
    rng = np.random.default_rng(count)
    pages = [np.zeros((2 * count + 1, array.shape[1]), np.uint8) for array in blocks]
    tables = [rng.permutation(2 * count + 1)[:count] for _ in blocks]
    for page, table, array in zip(pages, tables, blocks, strict=True):
        page[table] = array
    views = [TensorView.paged(page, table) for page, table in zip(pages, tables, strict=True)]
    return Buffers(views, lambda: [page[table] for page, table in zip(pages, tables, strict=True)])


def _to_heads(layout: KVLayout, array: Bytes) -> Bytes:
    """Return [heads, tokens, bytes of a token in a head], with spare tokens at the end."""
    count, block_bytes = array.shape
    dim = block_bytes // (_HEADS * layout.block_tokens)
    tokens = count * layout.block_tokens
    heads = np.zeros((_HEADS, tokens + _SPARE_TOKENS, dim), np.uint8)
    pieces = array.reshape(count, _HEADS, layout.block_tokens, dim)
    heads[:, :tokens] = pieces.transpose(1, 0, 2, 3).reshape(_HEADS, tokens, dim)
    return heads


def _from_heads(layout: KVLayout, heads: Bytes) -> Bytes:
    _, tokens, dim = heads.shape
    count = (tokens - _SPARE_TOKENS) // layout.block_tokens
    pieces = heads[:, : count * layout.block_tokens].reshape(
        _HEADS, count, layout.block_tokens, dim
    )
    return np.ascontiguousarray(pieces.transpose(1, 0, 2, 3).reshape(count, -1))


def _heads(layout: KVLayout, blocks: list[Bytes]) -> Buffers:
    kept = [_to_heads(layout, array) for array in blocks]
    views = [TensorView.heads(array, layout.block_tokens) for array in kept]
    return Buffers(views, lambda: [_from_heads(layout, array) for array in kept])


def _torch_bfloat16(layout: KVLayout, blocks: list[Bytes]) -> Buffers:
    torch = importlib.import_module("torch")
    kept = [_to_heads(layout, array) for array in blocks]
    tensors = [torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for array in kept]
    views = [TensorView.heads(tensor[None], layout.block_tokens) for tensor in tensors]
    return Buffers(
        views,
        lambda: [
            _from_heads(layout, tensor.view(torch.int16).numpy().view(np.uint8))
            for tensor in tensors
        ],
    )


def _torch_paged(layout: KVLayout, blocks: list[Bytes]) -> Buffers:
    torch = importlib.import_module("torch")
    kept = [torch.from_numpy(array.view(np.int16)).view(torch.float16) for array in blocks]
    table = np.arange(len(blocks[0]))[::-1]
    views = [TensorView.paged(tensor.flip(0), table) for tensor in kept]
    return Buffers(
        views,
        lambda: [view.owner.flip(0).view(torch.int16).numpy().view(np.uint8) for view in views],
    )


BUFFER_KINDS: dict[str, Callable[[KVLayout, list[Bytes]], Buffers]] = {
    "contiguous": _contiguous,
    "paged": _paged,
    "heads": _heads,
    "torch_bfloat16": _torch_bfloat16,
    "torch_paged": _torch_paged,
}
"""How to make each kind. Blocks must split into 2 heads; torch kinds need an even block."""
