"""`prefix`: each client keeps its own prefixes in its own memory. Nothing is shared.

Owns a least-recently-used cache of KV segments with a byte budget, matched block by block. What an
engine's built-in prefix cache does; never talks to another client.

Invariants

- The segments' bytes never exceed the budget, not even while one is replaced by another. (Hashes
  are not counted: a fraction of a percent, in favour of this baseline.)
- A parent is used at least as recently as its children, so the least recent segment is a leaf and
  no unreachable suffix is kept.
- A hit leaves at least one token to prefill.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.baselines.base import FirstToken, System
from experiments.common.workload import Request

HASH_BYTES = 16


@dataclass(slots=True, eq=False)
class CachedSegment:
    """Consecutive blocks of one chain: `kv` is [2 * layers, heads, tokens, dim]."""

    hashes: list[bytes]
    first_block: int
    kv: Any
    kv_bytes: int


def chain_hashes(tokens: npt.NDArray[np.uint32], block_tokens: int) -> list[bytes]:
    """Hash each whole block of `tokens`, chained over its predecessor's hash."""
    hashes = []
    previous = bytes(HASH_BYTES)
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[start : start + block_tokens].astype("<u4").tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=HASH_BYTES).digest()
        hashes.append(previous)
    return hashes


class PrefixCache:
    """Least-recently-used KV segments of one client.

    Parameters
    ----------
    capacity_bytes : int
        Budget for KV bytes.
    block_tokens, segment_tokens : int
        Unit of matching, and of allocation and eviction.
    """

    def __init__(self, *, capacity_bytes: int, block_tokens: int, segment_tokens: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._block_tokens = block_tokens
        self._segment_blocks = max(1, segment_tokens // block_tokens)
        self._segments: OrderedDict[int, CachedSegment] = OrderedDict()  # least recent first
        self._index: dict[bytes, tuple[CachedSegment, int]] = {}

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self._segments)

    def match(self, hashes: list[bytes]) -> list[tuple[CachedSegment, int, int]]:
        """Return the longest known prefix as (segment, first block within it, blocks), in order.

        Makes it the most recently used.
        """
        path: list[tuple[CachedSegment, int, int]] = []
        for block_hash in hashes:
            found = self._index.get(block_hash)
            if found is None:
                break
            segment, position = found
            if path and path[-1][0] is segment:
                path[-1] = (segment, path[-1][1], path[-1][2] + 1)
            else:
                path.append((segment, position, 1))
        self._touch([segment for segment, _, _ in path])
        return path

    def copy_out(self, path: list[tuple[CachedSegment, int, int]], buffers: Any) -> None:
        """Copy a matched prefix to the front of the engine's buffers."""
        token = 0
        for segment, position, blocks in path:
            first = position * self._block_tokens
            count = blocks * self._block_tokens
            for place, tensor in enumerate(_tensors(buffers)):
                tensor[:, token : token + count] = segment.kv[place, :, first : first + count]
            token += count

    def insert(self, hashes: list[bytes], buffers: Any) -> tuple[int, str]:
        """Keep the blocks of `hashes` that are not known yet, front first.

        Evicts the least recent segments; never one of this chain, so what does not fit beside its
        own front is not kept.

        Returns
        -------
        tuple of int and str
            Bytes newly kept; "stored", "known", "partial" or "full".
        """
        known = sum(blocks for _, _, blocks in self.match(hashes))
        if known == len(hashes):
            return 0, "known"
        chain = {id(self._index[block_hash][0]) for block_hash in hashes[:known]}
        added: list[CachedSegment] = []
        for first in range(known, len(hashes), self._segment_blocks):
            own = hashes[first : first + self._segment_blocks]
            kv_bytes = len(own) * self._block_tokens * _bytes_per_token(buffers)
            if not self._make_room(kv_bytes, chain):
                break
            segment = self._copy_in(own, first, buffers, kv_bytes)
            chain.add(id(segment))
            added.append(segment)
        self.match(hashes)
        kept = sum(segment.kv_bytes for segment in added)
        if sum(len(segment.hashes) for segment in added) == len(hashes) - known:
            return kept, "stored"
        return kept, "partial" if added else "full"

    def clear(self) -> None:
        """Forget everything."""
        self._segments.clear()
        self._index.clear()
        self.used_bytes = 0

    def _copy_in(
        self, hashes: list[bytes], first: int, buffers: Any, kv_bytes: int
    ) -> CachedSegment:
        tensors = _tensors(buffers)
        heads, _, dim = tensors[0].shape
        start = first * self._block_tokens
        count = len(hashes) * self._block_tokens
        kv = tensors[0].new_empty((len(tensors), heads, count, dim))
        for place, tensor in enumerate(tensors):
            kv[place] = tensor[:, start : start + count]
        segment = CachedSegment(hashes, first, kv, kv_bytes)
        self._segments[id(segment)] = segment
        for position, block_hash in enumerate(hashes):
            self._index[block_hash] = (segment, position)
        self.used_bytes += kv_bytes
        assert self.used_bytes <= self.capacity_bytes, "the cache outgrew its budget"
        return segment

    def _make_room(self, kv_bytes: int, keep: set[int]) -> bool:
        if kv_bytes > self.capacity_bytes:
            return False
        while self.used_bytes + kv_bytes > self.capacity_bytes:
            oldest = next(iter(self._segments))
            if oldest in keep:
                return False
            self._evict(oldest)
        return True

    def _evict(self, key: int) -> None:
        segment = self._segments.pop(key)
        for block_hash in segment.hashes:
            del self._index[block_hash]
        self.used_bytes -= segment.kv_bytes

    def _touch(self, path: list[CachedSegment]) -> None:
        # Children first: a parent ends more recent than its children.
        for segment in reversed(path):
            self._segments.move_to_end(id(segment))


class PrefixCacheSystem(System):
    """Prefix reuse from the client's own cache only."""

    name = "prefix"

    def __init__(self, engine: Any, *, capacity_bytes: int, segment_tokens: int = 256) -> None:
        self._engine = engine
        self._block_tokens: int = engine.layout.block_tokens
        self.cache = PrefixCache(
            capacity_bytes=capacity_bytes,
            block_tokens=self._block_tokens,
            segment_tokens=segment_tokens,
        )
        self._last: tuple[list[bytes], Any] | None = None

    def first_token(self, request: Request) -> FirstToken:
        """Match in the own cache, copy, and prefill the rest."""
        start_s = time.perf_counter()
        hashes = chain_hashes(request.tokens, self._block_tokens)
        usable = (len(request.tokens) - 1) // self._block_tokens
        path = self.cache.match(hashes[:usable])
        most_tokens = usable * self._block_tokens
        matched_s = time.perf_counter()
        cached = sum(blocks for _, _, blocks in path) * self._block_tokens
        buffers = self._engine.allocate(len(request.tokens))
        self.cache.copy_out(path, buffers)
        loaded_s = time.perf_counter()
        done = self._engine.prefill(request.tokens, buffers, cached_tokens=cached)
        self._last = (hashes, done.kv)
        return FirstToken(
            token=done.token,
            logits=done.logits,
            match_s=matched_s - start_s,
            load_s=loaded_s - matched_s,
            prefill_s=done.seconds,
            tokens_by_source={"engine": cached},
            reason=("cold" if not path else "whole" if cached == most_tokens else "diverged"),
        )

    def keep(self) -> tuple[int, str]:
        """Put the prompt's whole blocks into the own cache."""
        assert self._last is not None, "keep() without an answer"
        (hashes, buffers), self._last = self._last, None
        return self.cache.insert(hashes, buffers)

    def close(self) -> None:
        """Drop the cache."""
        self._last = None
        self.cache.clear()


def _tensors(buffers: Any) -> list[Any]:
    return [*buffers.keys, *buffers.values]


def _bytes_per_token(buffers: Any) -> int:
    # Each tensor is [heads, tokens, dim].
    return sum(
        tensor.shape[0] * tensor.shape[2] * tensor.element_size() for tensor in _tensors(buffers)
    )
