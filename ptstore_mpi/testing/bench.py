"""What a conformance case works with: a store, its oracle, and steps that check themselves.

A case runs on every client of a job at once, or alone. It never knows which transport carries it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi.client import Store
from ptstore_mpi.layout import KVLayout
from ptstore_mpi.namespace import Namespace
from ptstore_mpi.testing.buffers import make_buffers
from ptstore_mpi.testing.oracle import BLANK, Oracle
from ptstore_mpi.types import SOURCES, LoadResult, Match, StoreResult, segment_owner

__all__ = ["LARGE_LAYOUT", "LAYOUT", "ODD_LAYOUT", "Bench", "Space"]

LAYOUT = KVLayout(
    KVLayout.for_attention(
        layers=2, kv_heads=2, head_dim=8, dtype="float32", block_tokens=4
    ).tensors,
    block_tokens=4,
)
"""1 KiB of opaque bytes per block: full segments are whole pages, neighbours fit one Get."""

ODD_LAYOUT = KVLayout.for_attention(
    layers=1, kv_heads=1, head_dim=23, dtype="uint8", block_tokens=3
)
"""138 bytes per block: nothing is aligned to anything."""

LARGE_LAYOUT = KVLayout.for_attention(
    layers=3, kv_heads=2, head_dim=2048, dtype="float32", block_tokens=4
)
"""384 KiB per block: a prompt of a few blocks is loaded layer by layer."""

Tokens = npt.NDArray[np.int64]

_PATIENCE_S = 20.0


class Bench:
    """One client's store, and what all clients of the job do together.

    Attributes
    ----------
    store
        The store under test.
    rng
        Random numbers: another stream on every client.
    remote_bytes
        Bytes that loads of this bench's spaces brought from other nodes.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rng = np.random.default_rng([store.client_rank, 17])
        self.remote_bytes = 0.0

    def space(self, *, layout: KVLayout = LAYOUT, shared: bool = False, **identity: str) -> Space:
        """Return a namespace: this client's own, or one that all clients share."""
        tenant = "all" if shared else f"client {self.store.client_rank}"
        salt = f"{tenant} {identity.pop('salt', '')}"
        return Space(self, layout, identity.pop("model", "model"), salt, **identity)

    def tokens(self, count: int, *, seed: int | None = None) -> Tokens:
        """Return random token ids: those of ``seed`` are the same on every client."""
        rng = self.rng if seed is None else np.random.default_rng(seed)
        return rng.integers(0, 1 << 31, count)

    def everyone(self) -> None:
        """Wait until every client has come here; naps, because servers may share the cores."""
        if self.store.client_count == 1:
            return
        request = self.store.comm.Ibarrier()
        while not request.Test():
            time.sleep(1e-3)

    def my_turn(self) -> Iterator[None]:
        """Run a loop body on one client after the other."""
        for turn in range(self.store.client_count):
            if turn == self.store.client_rank:
                yield
            self.everyone()

    def total(self, amount: int) -> int:
        """Return the sum of ``amount`` over all clients."""
        if self.store.client_count == 1:
            return amount
        self.everyone()
        result: int = self.store.comm.allreduce(amount)
        return result

    def eventually(self, what: str, holds: Callable[[], bool]) -> None:
        """Check until it holds: releases and goodbyes are not answered, only soon handled."""
        deadline = time.monotonic() + _PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"never became true: {what}"
            time.sleep(2e-3)

    def server_total(self, name: str) -> int:
        """Return one counter summed over the servers."""
        return sum(counters.get(name, 0) for counters in self.store.server_stats())

    def check_settled(self) -> None:
        """Check that nothing is leased, reserved or dying, and that space is conserved."""
        self.everyone()
        self.eventually(
            "no lease, no reservation and no zombie is left",
            lambda: (
                not any(
                    self.server_total(name)
                    for name in (
                        "leased_bytes",
                        "replica_leased_bytes",
                        "reserved_bytes",
                        "zombie_bytes",
                    )
                )
            ),
        )
        for counters in self.store.server_stats():
            names = ("owned_bytes", "metadata_bytes", "replica_bytes")
            used = sum(counters[name] for name in names)
            assert counters["free_bytes"] == counters["capacity_bytes"] - used, counters
        self.everyone()

    def check_conservation(self) -> None:
        """Check that tokens by source add up, and that bytes by path fit them."""
        stats = self.store.stats()
        tokens, moved = stats["tokens"], stats["bytes"]
        reused = sum(tokens[source] for source in SOURCES)
        assert reused + tokens["recomputed"] == tokens["asked"], tokens
        used = moved.get("rma_bytes", 0) - moved.get("discarded_bytes", 0)
        assert used == self.remote_bytes, (self.remote_bytes, stats)


class Space:
    """One namespace with the oracle of its bytes.

    Attributes
    ----------
    namespace
        The namespace under test.
    oracle
        What its tensors must contain.
    """

    def __init__(
        self, bench: Bench, layout: KVLayout, model: str, salt: str, **identity: str
    ) -> None:
        self.namespace: Namespace = bench.store.namespace(model, layout, salt=salt, **identity)
        self._bench = bench
        self.layout = layout
        digest = int.from_bytes(self.namespace.digest[:8], "little")
        self.oracle = Oracle(layout, salt=digest)

    def put(
        self, tokens: Sequence[int] | Tokens, *, kind: str = "contiguous", **options: Any
    ) -> StoreResult:
        """Store a prompt's KV, kept in memory of ``kind``."""
        buffers = make_buffers(kind, self.layout, self.oracle.arrays(tokens))
        result = self.namespace.store(tokens, buffers.views, **options)
        assert result.bytes == result.tokens * self.layout.bytes_per_token, result
        assert (result.tokens > 0) == (result.reason == "stored"), result
        return result

    def get(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        kind: str = "contiguous",
        skip_tokens: int = 0,
        cut_tokens: int | None = None,
    ) -> tuple[Match, LoadResult]:
        """Match and load a prompt; check the bytes, the skipped ones and the sources.

        With ``cut_tokens`` the match is cut to so many first.
        """
        match = self.namespace.match(tokens)
        self.check_match(match, len(tokens))
        if cut_tokens is not None:
            match = self.namespace.cut(match, tokens, cut_tokens)
            self.check_match(match, len(tokens))
        buffers = make_buffers(
            kind, self.layout, self.oracle.blank(len(tokens) // self.layout.block_tokens)
        )
        result = self.namespace.load(match, buffers.views, skip_tokens=skip_tokens)
        found = buffers.read()
        self._bench.remote_bytes += self._far_tokens(result) * self.layout.bytes_per_token
        assert skip_tokens <= result.tokens <= max(match.tokens, skip_tokens), (match, result)
        assert result.by_source["engine"] == skip_tokens, result
        assert sum(result.by_source.values()) == result.tokens, result
        assert set(result.by_source) == set(SOURCES), result
        self.oracle.check(tokens, found, until_tokens=result.tokens, from_tokens=skip_tokens)
        skipped = skip_tokens // self.layout.block_tokens
        beyond = match.tokens // self.layout.block_tokens
        for array in found:
            assert (array[:skipped] == BLANK).all(), "skipped blocks were written"
            assert (array[beyond:] == BLANK).all(), "blocks beyond the match were written"
        return match, result

    def get_by_layers(
        self, tokens: Sequence[int] | Tokens, *, kind: str = "contiguous", skip_tokens: int = 0
    ) -> tuple[LoadResult, list[int]]:
        """Match and load a prompt; check what was said to be there when it was said.

        Returns what was said, too.
        """
        match = self.namespace.match(tokens)
        blank = self.oracle.blank(match.tokens // self.layout.block_tokens)
        buffers = make_buffers(kind, self.layout, blank)
        prefix = tokens[: match.tokens]
        right = [self.oracle.blocks(prefix, i) for i in range(len(self.layout.tensors))]
        first = skip_tokens // self.layout.block_tokens
        told: list[int] = []

        def progress(count: int) -> None:
            known = told[-1] if told else 0
            assert known < count <= len(right), (told, count)
            found = buffers.read()
            for tensor in range(known, count):
                same = np.array_equal(found[tensor][first:], right[tensor][first:])
                assert same, f"tensor {tensor} was said to be there"
            told.append(count)

        result = self.namespace.load(
            match, buffers.views, skip_tokens=skip_tokens, progress=progress
        )
        self._bench.remote_bytes += self._far_tokens(result) * self.layout.bytes_per_token
        whole = bool(told) and told[-1] == len(right)
        assert whole == (result.reason == "loaded"), (told, result)
        self.oracle.check(
            tokens, buffers.read(), until_tokens=result.tokens, from_tokens=skip_tokens
        )
        return result, told

    def _far_tokens(self, result: LoadResult) -> int:
        """Return how many of the loaded tokens came from other nodes, from memory or a file."""
        near = self._bench.store.topology.servers_of(self._bench.store.node)
        return sum(n for server, n in result.by_server.items() if server not in near)

    def check_match(self, match: Match, prompt_tokens: int) -> None:
        """Check what holds for every match."""
        assert match.prompt_tokens == prompt_tokens, match
        assert match.tokens % self.layout.block_tokens == 0, match
        assert 0 <= match.tokens <= max(prompt_tokens - 1, 0), match
        blocks = sum(ref.block_count for ref in match.segments)
        assert blocks * self.layout.block_tokens == match.tokens, match

    def expect(
        self, tokens: Sequence[int] | Tokens, depth_tokens: int, reason: str = "whole"
    ) -> LoadResult:
        """Check that exactly ``depth_tokens`` of a prompt are known, and load."""
        match, result = self.get(tokens)
        assert (match.tokens, match.reason) == (depth_tokens, reason), match
        assert result.tokens == depth_tokens, (match, result)
        return result

    @staticmethod
    def owners(match: Match) -> set[int]:
        """Return the servers that own the segments of a match."""
        return {int(segment_owner(ref.segment)) for ref in match.segments}
