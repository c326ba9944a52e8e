"""Loads and stores on the own node against memcpy of the same bytes by as many threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.microbench.measure import (
    Measurement,
    Memcpy,
    Rotation,
    Subject,
    rotation_count,
    timed,
)
from ptstore_mpi import KVLayout, Store, TensorView

__all__ = ["MEMORY_BYTES", "SIZES_BYTES", "measure"]

HEADS, HEAD_DIM, LAYERS, BLOCK_TOKENS = 8, 128, 8, 16
LAYOUT = KVLayout.for_attention(
    layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="bfloat16", block_tokens=BLOCK_TOKENS
)
SIZES_BYTES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
COLD_BYTES = 512 << 20
MEMORY_BYTES = 2 * (COLD_BYTES + SIZES_BYTES[-1])


def measure(
    store: Store, *, sizes_bytes: Sequence[int], repeats: int, thread_count: int
) -> Iterator[Measurement]:
    """Yield the measurements of every size and both views. Only one process: no launcher."""
    fresh = itertools.count()
    _touch_the_arena(store, fresh)
    memcpy = Memcpy(thread_count)
    for size_bytes in sizes_bytes:
        for view in ("contiguous", "heads"):
            bench = _Size(store, size_bytes, view=view, fresh=fresh, memcpy=memcpy)
            for prepare in (bench.load_subject, bench.store_subject):
                yield from prepare().measure(repeats)
            bench.forget()


class _Size:
    """Prompts, buffers and reference of one size."""

    def __init__(
        self, store: Store, size_bytes: int, *, view: str, fresh: Iterator[int], memcpy: Memcpy
    ) -> None:
        self._namespace = store.namespace(f"local {size_bytes} {view}", LAYOUT)
        self._size_bytes = size_bytes
        self._view = view
        self._fresh = fresh
        self._memcpy = memcpy
        self._tokens = int(size_bytes // LAYOUT.bytes_per_token)
        count = rotation_count(size_bytes, cold_bytes=COLD_BYTES)
        self._count = count
        self._buffers = Rotation([self._make_buffers() for _ in range(min(count, 24))])
        flat = [np.zeros(size_bytes, np.uint8) for _ in range(max(min(count, 24), 4))]
        for buffer in flat:
            buffer.fill(1)
        # A target comes to be a source only when half of the others have been used since.
        half = len(flat) // 2
        self._pairs = Rotation([*zip(flat, flat[half:] + flat[:half], strict=True)])
        self._stored_count = 0

    def load_subject(self) -> Subject:
        prompts = [self._prompt() for _ in range(self._count)]
        for prompt in prompts:
            stored = self._namespace.store(prompt, self._buffers.next())
            assert stored.tokens == self._tokens, stored
        rotation = Rotation([self._namespace.match(np.append(p, 0)) for p in prompts])

        def load() -> float:
            match, out = rotation.next(), self._buffers.next()
            result = self._namespace.load(match, out)
            assert result.tokens == self._tokens, result
            return result.seconds

        return self._subject(f"local_load/{self._view}", load)

    def store_subject(self) -> Subject:
        self._namespace.clear()
        self._stored_count = 0

        def store() -> float:
            if self._stored_count >= self._count:
                self._namespace.clear()
                self._stored_count = 0
            self._stored_count += 1
            result = self._namespace.store(self._prompt(), self._buffers.next())
            assert result.tokens == self._tokens, result
            return result.seconds

        return self._subject(f"local_store/{self._view}", store)

    def forget(self) -> None:
        self._namespace.clear()

    def _subject(self, name: str, ours: Any) -> Subject:
        def copy() -> float:
            target, source = self._pairs.next()
            return timed(lambda: self._memcpy.copy(target, source))

        return Subject(
            name, "size_bytes", self._size_bytes, ours, copy,
            unit="bytes/s", against="memcpy", amount=self._size_bytes,
        )  # fmt: skip

    def _prompt(self) -> Any:
        prompt = np.arange(self._tokens)
        prompt[0] = next(self._fresh)
        return prompt

    def _make_buffers(self) -> list[Any]:
        if self._view == "contiguous":
            blocks = self._tokens // BLOCK_TOKENS
            return [np.ones((blocks, spec.block_bytes), np.uint8) for spec in LAYOUT.tensors]
        shape = (HEADS, self._tokens, HEAD_DIM)
        return [TensorView.heads(np.ones(shape, np.uint16), BLOCK_TOKENS) for _ in LAYOUT.tensors]


def _touch_the_arena(store: Store, fresh: Iterator[int]) -> None:
    """Fill the arena once, so that every page of it is there."""
    namespace = store.namespace("touch", LAYOUT)
    tokens = int(SIZES_BYTES[-1] // LAYOUT.bytes_per_token)
    kv = [np.ones((tokens // BLOCK_TOKENS, spec.block_bytes), np.uint8) for spec in LAYOUT.tensors]
    while True:
        prompt = np.arange(tokens)
        prompt[0] = next(fresh)
        if namespace.store(prompt, kv).reason == "full":
            break
    namespace.clear()
