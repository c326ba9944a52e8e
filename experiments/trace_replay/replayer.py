"""One client's course of a request: match, load, store the increment; and what it counts.

Owns the row of a request and the bytes by owner. It knows the public face of the store alone, so
it is the same over `sim` and over MPI. Never decides which request is whose.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.traces import Trace, TraceRequest
from ptstore_mpi import SOURCES, CapacityError, KVLayout, Namespace, Store, TensorSpec

Bytes = npt.NDArray[np.uint8]

TOO_LARGE = "too_large"  # an increment larger than an arena
NAMESPACE = "exp_trace_replay"
HASH_BYTES = 16


def layout_of(bytes_per_token: int, block_tokens: int) -> KVLayout:
    """Return a layout of one tensor: how many there are decides nothing that is counted here."""
    return KVLayout((TensorSpec("kv", bytes_per_token * block_tokens),), block_tokens)


@dataclass(slots=True, eq=False)
class Replayer:
    """A client that replays requests.

    Attributes
    ----------
    store, client
        Its store, and its number.
    trace
        Where tokens come from.
    namespace
        Of the replayed model.
    kv
        Memory for the longest prompt and answer: uint8, what is stored and what loads write into.
    moves_bytes
        Whether bytes are moved, and time passes: then every block stored begins with its hash,
        and every block loaded must.
    loaded_bytes
        Bytes loaded by the server whose memory they were read from.
    """

    store: Store
    client: int
    trace: Trace
    namespace: Namespace
    kv: Bytes
    moves_bytes: bool
    loaded_bytes: Counter[int] = field(default_factory=Counter)

    def replay(self, number: int, request: TraceRequest) -> dict[str, Any]:
        """Replay one request and return its row of `tables.REQUESTS`."""
        space = self.namespace
        block_tokens = space.layout.block_tokens
        prompt, kept = self.trace.prompt(request), self.trace.kept(request)
        match = space.match(prompt)
        if self.moves_bytes:
            self._heads(match.tokens // block_tokens)[:] = 0
        loaded = space.load(match, [self.kv])
        bytes_per_token = space.layout.bytes_per_token
        for server, tokens in loaded.by_server.items():
            self.loaded_bytes[server] += tokens * bytes_per_token
        if self.moves_bytes:
            self._check(prompt, loaded.tokens // block_tokens)
            self._fill(kept)
        stored_tokens, store_reason, store_s = self._store(kept, loaded.tokens)
        row: dict[str, Any] = {f"{name}_tokens": loaded.by_source[name] for name in SOURCES}
        return row | {
            "request": number,
            "client": self.client,
            "node": self.store.node,
            "session": request.session,
            "time_s": request.time_s,
            "asked_tokens": len(prompt),
            "asked_blocks": (len(prompt) - 1) // block_tokens,
            "matched_blocks": match.tokens // block_tokens,
            "recomputed_tokens": len(prompt) - loaded.tokens,
            "stored_tokens": stored_tokens,
            "reason": match.reason if loaded.tokens == match.tokens else loaded.reason,
            "store_reason": store_reason,
            "match_s": match.seconds if self.moves_bytes else np.nan,
            "load_s": loaded.seconds if self.moves_bytes else np.nan,
            "store_s": store_s if self.moves_bytes else np.nan,
        }

    def owner_rows(self) -> list[dict[str, int]]:
        """Return the rows of `tables.OWNERS`: what this client loaded from each server."""
        near = self.store.topology.servers_of(self.store.node)
        return [
            {
                "client": self.client,
                "server": server,
                "near_bytes": nbytes if server in near else 0,
                "sent_bytes": 0 if server in near else nbytes,
            }
            for server, nbytes in sorted(self.loaded_bytes.items())
        ]

    def _store(self, kept: npt.NDArray[np.uint32], loaded_tokens: int) -> tuple[int, str, float]:
        try:
            result = self.namespace.store(kept, [self.kv], verified_tokens=loaded_tokens)
        except CapacityError:
            return 0, TOO_LARGE, 0.0
        return result.tokens, result.reason, result.seconds

    def _heads(self, blocks: int) -> Bytes:
        block_bytes = self.namespace.layout.block_bytes
        return self.kv[: blocks * block_bytes].reshape(blocks, block_bytes)[:, :HASH_BYTES]

    def _fill(self, kept: npt.NDArray[np.uint32]) -> None:
        hashes = self.namespace.block_hashes(kept)
        heads = self._heads(len(hashes))
        heads[:] = hashes[:, : heads.shape[1]]

    def _check(self, prompt: npt.NDArray[np.uint32], blocks: int) -> None:
        heads = self._heads(blocks)
        wrong = heads != self.namespace.block_hashes(prompt)[:blocks, : heads.shape[1]]
        if wrong.any():
            place = int(np.flatnonzero(wrong.any(axis=1))[0])
            raise AssertionError(f"block {place} of a prompt was loaded with other bytes")
