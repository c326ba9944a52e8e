"""The memory in which a transformers model keeps the KV of one prompt, and its cache layer.

Owns `KVBuffers` (one pair of tensors per layer, with room for the whole prompt) and `BufferLayer`
(the library's dynamic cache layer, writing into such a pair). Never talks to the store.

A prompt whose prefix is known goes through the same tensors from end to end, without a copy in
between: the store unpacks the prefix into them, attention reads them, the rest of the prompt is
appended behind the prefix, and the store packs the increment out of them:

    keys[layer]    [kv_heads, tokens, head_dim]
                   |<-- loaded -->|<-- computed -->|<- room to the end of the block ->|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, DynamicLayer

from ptstore_mpi import KVLayout, TensorSpec, TensorView


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the KV of a model looks like, the same in every layer.

    Keys and values differ in `head_dim` where a model keeps latents.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def layout(self, block_tokens: int) -> KVLayout:
        """Return the layout; that of `KVLayout.for_attention` where both widths are equal."""
        token_bytes = self.kv_heads * self.dtype.itemsize
        sizes = (("key", self.key_dim * token_bytes), ("value", self.value_dim * token_bytes))
        tensors = tuple(
            TensorSpec(f"layers.{layer}.{kind}", block_tokens * size)
            for layer in range(self.layers)
            for kind, size in sizes
        )
        return KVLayout(tensors, block_tokens, str(self.dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True, eq=False)
class KVBuffers:
    """Keys and values of one prompt: per layer one tensor `[kv_heads, tokens, head_dim]` each.

    A frozen pair of lists; the tensors are written in place, by the store (the loaded prefix) and
    by the model (the rest).
    """

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def empty(cls, shape: KVShape, tokens: int) -> KVBuffers:
        """Allocate uninitialised tensors for `tokens` tokens on the CPU."""
        # One tensor per layer, not one for all: what the allocator gets back in pieces of this
        # size it hands out again, while one large piece returns to the system and costs a page
        # fault per 4 KiB next time (measured with 94 MB: 5 ms against 31 ms to allocate and fill).
        key_size = (shape.kv_heads, tokens, shape.key_dim)
        value_size = (shape.kv_heads, tokens, shape.value_dim)
        return cls(
            [torch.empty(key_size, dtype=shape.dtype) for _ in range(shape.layers)],
            [torch.empty(value_size, dtype=shape.dtype) for _ in range(shape.layers)],
        )

    @property
    def tokens(self) -> int:
        """Tokens these buffers have room for."""
        return int(self.keys[0].shape[1])

    def views(self, block_tokens: int) -> list[TensorView]:
        """Return the buffers as the store sees them: key, value of layer 0, then of layer 1, ..."""
        pairs = zip(self.keys, self.values, strict=True)
        return [TensorView.heads(tensor, block_tokens) for pair in pairs for tensor in pair]

    def cache(self, cached_tokens: int) -> DynamicCache:
        """Return the library's cache over these buffers, whose first `cached_tokens` are filled."""
        cache = DynamicCache()
        pairs = zip(self.keys, self.values, strict=True)
        cache.layers = [BufferLayer(keys, values, cached_tokens) for keys, values in pairs]
        return cache


class BufferLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A dynamic cache layer that appends in place where the library's would concatenate.

    `keys` and `values` are slices `[1, kv_heads, filled, head_dim]` of the buffers, so everything
    the library derives from their length (masks, positions) holds. Tokens beyond the capacity
    are concatenated as the library does: decoding may go on past the prompt.
    """

    def __init__(self, key_buffer: Tensor, value_buffer: Tensor, filled_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = (key_buffer, value_buffer)
        self._in_place = True
        self._show(filled_tokens)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start over with empty buffers; only after the library's `reset`."""
        del key_states, value_states
        self._in_place = True
        self._show(0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append states `[1, kv_heads, n, head_dim]` and return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + int(key_states.shape[-2])
        if not self._in_place or end > self._buffers[0].shape[1]:
            self._in_place = False
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            self._check(buffer, states)
            buffer[:, start:end].copy_(states[0])
        return self._show(end)

    def _show(self, filled_tokens: int) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[None, :, :filled_tokens] for buffer in self._buffers)
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        return keys, values

    @staticmethod
    def _check(buffer: Tensor, states: Tensor) -> None:
        # copy_ would broadcast and convert without a word
        expected: Sequence[int] = (1, buffer.shape[0], states.shape[-2], buffer.shape[2])
        if tuple(states.shape) != tuple(expected) or states.dtype != buffer.dtype:
            raise ValueError(
                f"expected states of shape {tuple(expected)} and {buffer.dtype}, "
                f"got {tuple(states.shape)} and {states.dtype}"
            )
