"""KV bytes that follow from the tokens alone, so that any wrong byte is seen.

The bytes of a block are a function of *all* tokens up to its end, of the tensor and of a salt.
Bytes of another prefix, position, tensor, namespace or layout therefore differ, and whoever knows
the tokens can tell what every byte must be. It never keeps what it made.

::

    state[i]  = sum over j <= i of mix(token[j]) * odd(j)          (mod 2**64)
    word[k]   = mix(mix(state at the block's end + salt) + tensor constant + k * golden ratio)

``mix`` is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi.layout import KVLayout

__all__ = ["BLANK", "Oracle"]

BLANK = 0xA5
"""Byte that `Oracle.blank` fills memory with."""

Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]

_GOLDEN = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
_FIRST = np.array([0xBF58476D1CE4E5B9], dtype=np.uint64)
_SECOND = np.array([0x94D049BB133111EB], dtype=np.uint64)


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed


class Oracle:
    """What the tensors of any prompt must contain.

    Parameters
    ----------
    layout
        Layout of the KV.
    salt
        Tells namespaces apart: another salt, other bytes.
    """

    def __init__(self, layout: KVLayout, *, salt: int = 0) -> None:
        self.layout = layout
        self._salt = np.array([salt], dtype=np.uint64)

    def blocks(self, tokens: Sequence[int] | npt.NDArray[Any], tensor: int) -> Bytes:
        """Return the bytes of one tensor, uint8, shape (whole blocks of tokens, block_bytes)."""
        ends = self._block_states(tokens)
        block_bytes = self.layout.tensors[tensor].block_bytes
        count = np.arange(-(-block_bytes // 8), dtype=np.uint64)
        where = _mix(np.array([tensor + 1], dtype=np.uint64) * _GOLDEN) + count * _GOLDEN
        words = _mix(ends[:, None] + where[None, :])
        return np.ascontiguousarray(words.view(np.uint8)[:, :block_bytes])

    def arrays(self, tokens: Sequence[int] | npt.NDArray[Any]) -> list[Bytes]:
        """Return the bytes of every tensor, in layout order."""
        return [self.blocks(tokens, tensor) for tensor in range(len(self.layout.tensors))]

    def blank(self, block_count: int) -> list[Bytes]:
        """Return memory for ``block_count`` blocks of every tensor, filled with `BLANK`."""
        return [
            np.full((block_count, spec.block_bytes), BLANK, dtype=np.uint8)
            for spec in self.layout.tensors
        ]

    def check(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        arrays: Sequence[Bytes],
        *,
        until_tokens: int,
        from_tokens: int = 0,
    ) -> None:
        """Raise AssertionError, naming the first wrong block, unless ``arrays`` are right.

        Parameters
        ----------
        tokens
            The prompt.
        arrays
            One per tensor, uint8, shape (at least the blocks checked, block_bytes).
        until_tokens, from_tokens
            Range that is checked; whole blocks.
        """
        first = from_tokens // self.layout.block_tokens
        last = until_tokens // self.layout.block_tokens
        prefix = np.asarray(tokens)[:until_tokens]
        for tensor, spec in enumerate(self.layout.tensors):
            expected = self.blocks(prefix, tensor)[first:last]
            found = arrays[tensor][first:last]
            assert found.shape == expected.shape, (
                f"tensor {spec.name!r}: expected blocks of shape {expected.shape}, "
                f"got {found.shape}"
            )
            wrong = np.flatnonzero((expected != found).any(axis=1))
            assert not len(wrong), (
                f"tensor {spec.name!r}: block {first + wrong[0]} is not that of its prefix "
                f"({len(wrong)} of {last - first} blocks checked are wrong)"
            )

    def _block_states(self, tokens: Sequence[int] | npt.NDArray[Any]) -> _Words:
        ids = np.asarray(tokens).astype(np.uint64)
        block_tokens = self.layout.block_tokens
        ids = ids[: len(ids) // block_tokens * block_tokens]
        odd = _mix(np.arange(1, len(ids) + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
        states = np.cumsum(_mix(ids + _GOLDEN) * odd, dtype=np.uint64)
        return _mix(states[block_tokens - 1 :: block_tokens] + _mix(self._salt + _GOLDEN))
