"""Bytes: what clients are given, and what is visible (invariants 1 and 2)."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.sim.checkers.base import EVERY, Checker
from ptstore_mpi.sim.prompts import BLOCK_TOKENS, Prompt
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.workloads import Player
from ptstore_mpi.types import Match, ServerIndex, StoreResult

__all__ = ["OnlyComplete", "RightBytes"]


class RightBytes(Checker):
    """1: a client never gets other bytes than those of its tokens, nor any after its call."""

    number = 1
    reads_bytes = True

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._returned: dict[int, deque[tuple[list[Any], list[Any]]]] = {}

    def loaded(self, player: Player, prompt: Prompt, match: Match, **how: Any) -> None:
        """Compare what was loaded, and remember it."""
        out, result = how["out"], how["result"]
        if result is not None:
            first = how["skip_tokens"] // BLOCK_TOKENS
            last = max(result.tokens // BLOCK_TOKENS, first)
            for tensor, array in enumerate(prompt.arrays):
                right = np.array_equal(out[tensor][first:last], array[first:last])
                self.require(right, f"client {player.client} was given wrong bytes of {prompt}")
        kept = self._returned.setdefault(player.client, deque(maxlen=6))
        self._look_again(player.client)
        kept.append((out, [array.copy() for array in out]))

    def stored(self, player: Player, prompt: Prompt, result: StoreResult, **how: Any) -> None:
        """A later operation has ended: look again at what earlier loads gave."""
        self._look_again(player.client)

    def ended(self) -> None:
        """Look at everything once more."""
        for client in self._returned:
            self._look_again(client)

    def _look_again(self, client: int) -> None:
        for out, copy in self._returned.get(client, ()):
            same = all(np.array_equal(a, b) for a, b in zip(out, copy, strict=True))
            self.require(same, f"memory of client {client} was written after its load returned")


class OnlyComplete(Checker):
    """2: what is visible is complete, and stays what it is as long as anybody may read it."""

    number = 2
    reads_bytes = True

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._changes = 0

    def published(self, server: ServerIndex, segment: Segment) -> None:
        """Compare its bytes with those it must have, and its path with its prefix."""
        self._compare(server, segment)
        book = self.books[segment.record.namespace]
        chain = book.chain_to(segment.block_hash(-1))
        self.require(chain is not None, "a published segment ends with a hash nobody stored")
        depth = 0
        for ref in (*segment.path, segment.record.refs[segment.place]):
            depth += ref.block_count
            right = chain is not None and depth <= len(chain) and chain[depth - 1] == ref.last_hash
            self.require(right, f"record of {segment.id:#x} names another prefix at block {depth}")

    def stepped(self, server: ServerIndex) -> None:
        """Look at all published segments now and then."""
        self._changes += 1
        if self._changes % EVERY == 0:
            self._compare_all(server)

    def ended(self) -> None:
        """Look at every segment once more."""
        for server in self.sim.memories:
            self._compare_all(server)

    def _compare_all(self, server: ServerIndex) -> None:
        for segment in self.sim.servers[server].cache.published():
            self._compare(server, segment)

    def _compare(self, server: ServerIndex, segment: Segment) -> None:
        if segment not in self.sim.bent:
            self.require(
                self.is_right(server, segment),
                f"visible segment {segment.id:#x} of server {server} has other bytes than were "
                "stored",
            )
