"""A client of a `Cluster` whose operations can be stopped anywhere, with checked bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi import _native
from ptstore_mpi.config import Config
from ptstore_mpi.layout import KVLayout, TensorSpec, namespace_digest
from ptstore_mpi.protocol import load as load_protocol
from ptstore_mpi.protocol import maintain
from ptstore_mpi.protocol import store as store_protocol
from ptstore_mpi.protocol.match import Found, match_broadcast
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.sim.transport import Stepper
from ptstore_mpi.tensor_view import bind_views
from ptstore_mpi.testing.oracle import Oracle
from ptstore_mpi.types import BlockHashes, SegmentRef

__all__ = ["SEGMENT_BYTES", "SMALL", "Actor", "Load", "small_config"]

SMALL = KVLayout((TensorSpec("key", 64), TensorSpec("value", 24)), block_tokens=4)
"""A layout whose segment of two blocks is one page of an arena."""

SEGMENT_BYTES = 4096 + 1024 + 2 * 80 + 64
"""Enough room for one segment of two blocks of `SMALL`, metadata included."""

Tokens = Sequence[int] | npt.NDArray[np.int64]


def small_config(*, slots: int = 8, **settings: Any) -> Config:
    """Return settings with room for about ``slots`` segments of two blocks on each server."""
    chosen: dict[str, Any] = {
        "memory_bytes": -(-slots * SEGMENT_BYTES // 4096) * 4096,
        "segment_tokens": 8,
        "placement": "random",
        "eviction": "none",
        "replica_admission": "never",
        "staging_bytes": 1 << 16,
        "get_bytes": 1 << 12,
    }
    return Config(**{**chosen, **settings})


@dataclass(slots=True)
class Load:
    """A load under way: the operation, and the memory it writes into."""

    operation: Stepper[load_protocol.Loaded]
    out: list[npt.NDArray[np.uint8]]
    tokens: Tokens
    skip_blocks: int

    def checked_blocks(self, oracle: Oracle) -> int:
        """Finish, check every byte of the result, and return its depth in blocks."""
        loaded = self.operation.finish()
        blocks = self.skip_blocks + loaded.block_count
        block_tokens = oracle.layout.block_tokens
        oracle.check(
            self.tokens,
            self.out,
            until_tokens=blocks * block_tokens,
            from_tokens=self.skip_blocks * block_tokens,
        )
        return blocks


class Actor:
    """One client of one namespace.

    Parameters
    ----------
    cluster
        Where it lives.
    client
        Its number there.
    layout, salt
        Its namespace; the node that a store lands on follows the cluster's placement.
    """

    def __init__(
        self, cluster: Cluster, client: int, *, layout: KVLayout = SMALL, salt: str = ""
    ) -> None:
        self.cluster = cluster
        self.client = client
        self.layout = layout
        self.digest = namespace_digest(layout, {"model": "model", "salt": salt})
        self.oracle = Oracle(layout, salt=int.from_bytes(self.digest[:8], "little"))
        self.context = cluster.contexts[client]
        self.transport = cluster.transports[client]
        self._tensor_bytes = tuple(spec.block_bytes for spec in layout.tensors)
        self._kept: list[Any] = []

    def hashes(self, tokens: Tokens) -> BlockHashes:
        """Return the chained hashes of the whole blocks of a prompt."""
        return _native.hash_blocks(
            np.ascontiguousarray(tokens, dtype=np.uint32),
            block_tokens=self.layout.block_tokens,
            root=self.digest,
            seed=self.cluster.config.seed,
        )

    # -- operations, stopped before their first effect ---------------------------------------

    def start_match(self, tokens: Tokens) -> Stepper[Found]:
        """Begin to match the whole blocks of ``tokens``."""
        until = self.cluster.now + self.cluster.config.match_timeout_s
        hashes = self.hashes(tokens)
        return self.cluster.start(self.client, match_broadcast(self.context, hashes, until))

    def start_load(
        self, tokens: Tokens, refs: Sequence[SegmentRef], *, skip_blocks: int = 0
    ) -> Load:
        """Begin to load a matched record of ``tokens`` into blank memory."""
        blocks = sum(ref.block_count for ref in refs)
        out = self.oracle.blank(blocks)
        operation = load_protocol.load(
            self.context,
            refs,
            bind_views(self.layout, out, blocks, writable=True),
            namespace=self.digest,
            tensor_bytes=self._tensor_bytes,
            skip_blocks=skip_blocks,
            until=self.cluster.now + self.cluster.config.load_timeout_s,
        )
        return Load(self.cluster.start(self.client, operation), out, tokens, skip_blocks)

    def start_store(
        self, tokens: Tokens, *, verified_blocks: int | None = None
    ) -> Stepper[store_protocol.Stored]:
        """Begin to store a prompt."""
        hashes = self.hashes(tokens)
        arrays = self.oracle.arrays(tokens)
        self._kept = [*self._kept[-8:], arrays]
        increment = store_protocol.Increment(
            self.digest,
            hashes,
            bind_views(self.layout, arrays, len(hashes), writable=False),
            self._tensor_bytes,
            self.cluster.config.segment_tokens // self.layout.block_tokens,
        )
        operation = store_protocol.store(
            self.context,
            increment,
            verified_blocks=len(hashes) if verified_blocks is None else verified_blocks,
            until=self.cluster.now + self.cluster.config.store_timeout_s,
        )
        return self.cluster.start(self.client, operation)

    # -- whole operations --------------------------------------------------------------------

    def match(self, tokens: Tokens) -> Found:
        """Match and return what was found."""
        return self.start_match(tokens).finish()

    def known_blocks(self, tokens: Tokens) -> int:
        """Return how many leading blocks of a prompt are known."""
        return self.match(tokens).block_count

    def load(self, tokens: Tokens) -> int:
        """Match, load and check; return the loaded depth in blocks."""
        return self.start_load(tokens, self.match(tokens).refs).checked_blocks(self.oracle)

    def store(self, tokens: Tokens, *, verified_blocks: int | None = None) -> str:
        """Store a prompt as the public face does; return the reason."""
        stored = self.start_store(tokens, verified_blocks=verified_blocks).finish()
        self.flush()
        return stored.reason

    def flush(self) -> None:
        """Tell the owners of unsettled writes that these were given up."""
        self.cluster.start(self.client, maintain.abandon_unsettled(self.context)).finish()

    def drop(self, ref: SegmentRef) -> bool | None:
        """Drop a leaf."""
        until = self.cluster.now + self.cluster.config.match_timeout_s
        return self.cluster.start(self.client, maintain.drop(self.context, ref, until)).finish()

    def clear(self) -> int | None:
        """Clear the namespace."""
        until = self.cluster.now + self.cluster.config.match_timeout_s
        operation = maintain.clear(self.context, self.digest, until)
        return self.cluster.start(self.client, operation).finish()

    def leave(self) -> None:
        """Let transfers land, and say goodbye to every server."""
        self.transport.land()
        self.cluster.start(self.client, maintain.drain(self.context, self.cluster.now)).finish()
        self.cluster.start(self.client, maintain.bye(self.context)).finish()
