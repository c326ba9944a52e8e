"""vLLM's paged KV caches as the store sees them: whole blocks, opaque bytes.

Owns the reading of cache tensors: which axis counts blocks, and what the bytes of one block are.
On CPUs vLLM packs a block for the instruction set, on GPUs backends differ in the order of axes;
none of that matters here as long as a block of a tensor is one dense run of bytes. Never copies.

============================  ===================================================
shape of a layer's cache      tensors of the layout
============================  ===================================================
``[2, blocks, ...]``          two: keys, values
``[blocks, ...]``             one: keys and values, or latents
``[blocks * k, ...]``         one; k kernel blocks in a row are one block of vLLM
============================  ===================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptstore_mpi import KVLayout, TensorSpec, TensorView
from ptstore_mpi.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BlockPool"]

BlockIds = npt.NDArray[np.int64]


class BlockPool:
    """All blocks of an engine.

    Attributes
    ----------
    layout
        One tensor per layer, or two, with vLLM's block size.
    shape
        Names what a block looks like, for the namespace: shapes, axes as they lie, and dtypes.
    layer_ends
        By layer's name: how many leading tensors of the layout a layer and all before it have.
    """

    def __init__(
        self,
        caches: Mapping[str, Tensor],
        *,
        block_count: int | None,
        block_tokens: int,
        splits_kv: bool = False,
    ) -> None:
        """Read the caches that vLLM registers.

        Parameters
        ----------
        caches
            Tensor by layer's name.
        block_count
            Blocks of vLLM in each; None: as many as the axis of blocks is long.
        block_tokens
            Tokens of one.
        splits_kv
            Whether this version of vLLM has caches that begin with an axis of keys and values.

        Raises
        ------
        ConfigError
            A tensor whose blocks are not dense runs of bytes, or that has another number of them.
        """
        self._pages: list[Tensor] = []
        specs: list[TensorSpec] = []
        self.layer_ends: dict[str, int] = {}
        facts: list[str] = []
        seen: dict[tuple[int, tuple[int, ...]], int] = {}
        for layer, cache in caches.items():
            key = (cache.data_ptr(), tuple(cache.shape))
            if key in seen:  # layers that share their cache
                self.layer_ends[layer] = seen[key]
                continue
            for kind, pages, order in _pages_of(layer, cache, block_count, splits_kv):
                self._pages.append(pages)
                block_bytes = math.prod(pages.shape[1:]) * pages.element_size()
                specs.append(TensorSpec(f"{layer}.{kind}", block_bytes))
                facts.append(f"{kind}{list(pages.shape[1:])}{order}:{pages.dtype}")
            self.layer_ends[layer] = seen[key] = len(specs)
        if not specs:
            raise ConfigError("expected the KV caches of at least one layer, vLLM registered none")
        dtypes = {str(pages.dtype).removeprefix("torch.") for pages in self._pages}
        self.shape = ";".join(sorted(set(facts)))
        self.device = self._pages[0].device
        names = tuple(
            TensorSpec(f"{number}.{spec.name.rpartition('.')[2]}", spec.block_bytes)
            for number, spec in enumerate(specs)
        )
        self.layout = KVLayout(names, block_tokens, dtypes.pop() if len(dtypes) == 1 else "bytes")
        self._views = [TensorView.paged(pages, []) for pages in self._pages]

    @property
    def pages(self) -> list[Tensor]:
        """The tensors of the layout, each ``[blocks, ...]``."""
        return self._pages

    def host_buffers(self, block_count: int) -> list[Tensor]:
        """Return uninitialised tensors ``[block_count, ...]`` in host memory, as the pages are."""
        import torch

        return [
            torch.empty((block_count, *pages.shape[1:]), dtype=pages.dtype) for pages in self._pages
        ]

    def copy_in(self, host: list[Tensor], block_ids: BlockIds, first_block: int) -> None:
        """Copy host buffers from ``first_block`` on to the blocks of a table."""
        import torch

        index = torch.from_numpy(block_ids[first_block:]).to(self.device)
        for pages, buffer in zip(self._pages, host, strict=True):
            pages.index_copy_(0, index, buffer[first_block : len(block_ids)].to(self.device))

    def views(self, block_ids: BlockIds) -> list[TensorView]:
        """Return the tensors behind a block table, int64 of shape (blocks,)."""
        return [view.with_table(block_ids) for view in self._views]


def _pages_of(
    layer: str, cache: Tensor, block_count: int | None, splits_kv: bool
) -> Iterator[tuple[str, Tensor, list[int]]]:
    import torch

    shape = tuple(cache.shape)
    if cache.element_size() == 1:
        cache = cache.view(torch.uint8)  # 8-bit floats have no DLPack type everywhere
    if splits_kv and len(shape) > 2 and shape[0] == 2 and shape[1] % (block_count or 1) == 0:
        yield "key", *_blocks_first(layer, cache[0], block_count)
        yield "value", *_blocks_first(layer, cache[1], block_count)
    else:
        yield "kv", *_blocks_first(layer, cache, block_count)


def _blocks_first(layer: str, pages: Tensor, block_count: int | None) -> tuple[Tensor, list[int]]:
    """Return ``[blocks, ...]`` with a block's axes as they lie in memory, and which they are."""
    block_count = block_count or pages.shape[0]
    per_block, rest = divmod(pages.shape[0], block_count)
    if rest or not per_block:
        raise ConfigError(
            f"layer {layer}: expected a cache of {block_count} blocks, found the shape "
            f"{tuple(pages.shape)}"
        )
    if per_block > 1:
        pages = pages.as_strided(
            (block_count, per_block, *pages.shape[1:]),
            (per_block * pages.stride()[0], *pages.stride()),
            pages.storage_offset(),
        )
    strides = pages.stride()
    inner = sorted(range(1, pages.dim()), key=lambda axis: -strides[axis])
    ordered = pages.permute(0, *inner)
    expected = 1
    for axis in range(ordered.dim() - 1, 0, -1):
        if ordered.shape[axis] > 1 and ordered.stride(axis) != expected:
            raise ConfigError(
                f"layer {layer}: expected blocks that are one run of bytes, found the shape "
                f"{tuple(pages.shape)} with strides {pages.stride()}"
            )
        expected *= ordered.shape[axis]
    return ordered, inner
