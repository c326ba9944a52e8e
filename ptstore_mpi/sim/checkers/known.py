"""Knowledge: what matches find, and what they may not skip (invariants 3 and 5)."""

from __future__ import annotations

from collections import Counter

from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.messages import (
    ClearRequest,
    DropRequest,
    LostRequest,
    Request,
)
from ptstore_mpi.sim.checkers.base import EVERY, Checker
from ptstore_mpi.sim.prompts import Prompt
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.workloads import Player
from ptstore_mpi.testing.actor import SMALL
from ptstore_mpi.testing.checks import (
    check_links,
    check_reachable,
)
from ptstore_mpi.types import Match, ServerIndex, segment_owner

__all__ = ["Found", "NoHole"]


class Found(Checker):
    """3: what is published is found, until it is removed for a reason that is counted."""

    number = 3

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        # By server and block: what one server has all the time, it answers all the time.
        self._copies: Counter[tuple[ServerIndex, bytes]] = Counter()
        self._since: dict[tuple[ServerIndex, bytes], int] = {}
        self._removed: Counter[ServerIndex] = Counter()
        self._asked = False
        self._low: Counter[tuple[ServerIndex, int]] = Counter()
        self._clears: set[tuple[ServerIndex, int, int]] = set()
        self._cleared: set[Segment] = set()

    def request(self, server: ServerIndex, message: Request) -> None:
        """Note what asks for a removal, and what a clear finds half written (P15)."""
        self._asked = isinstance(message, ClearRequest | DropRequest | LostRequest)
        place = (server, message.client)
        self._low[place] = max(self._low[place], message.low)
        if isinstance(message, ClearRequest) and message.op >= self._low[place]:
            key = (server, message.client, message.op)
            if key not in self._clears:
                self._clears.add(key)
                self._cleared.update(
                    segment
                    for segment in self.segments(server, SegmentState.RESERVED)
                    if segment.record.namespace == message.namespace
                )

    def published(self, server: ServerIndex, segment: Segment) -> None:
        """Note its blocks as known; the last of an increment is known once on a server (P8)."""
        self.require(segment not in self._cleared, "published after its namespace was cleared")
        if segment.id == segment.record.refs[-1].segment:
            last = segment.block_hash(-1)
            known = self.sim.servers[server].cache.published()
            copies = sum(last in map(bytes, each.hashes) for each in known)
            self.require(copies == 1, f"server {server} keeps one increment {copies} times")
        for row in segment.hashes:
            block = (server, row.tobytes())
            if not self._copies[block]:
                self._since[block] = self.sim.event_count
            self._copies[block] += 1

    def retired(self, server: ServerIndex, segment: Segment) -> None:
        """Note its blocks as gone, for a reason."""
        self._removed[server] += 1
        if not self._asked:
            parent = segment.parent
            owner = None if parent is None else self.sim.servers[segment_owner(parent.segment)]
            found = None if owner is None or parent is None else owner.cache.find(parent)
            held = found is not None and segment.serial in found.links
            self.require(
                parent is not None and not held,
                f"server {server} pruned {segment.id:#x}, whose parent is there",
            )
        for row in segment.hashes:
            self._copies[server, row.tobytes()] -= 1

    def stepped(self, server: ServerIndex) -> None:
        """Compare the removals with those the server counted."""
        self._asked = False
        handler = self.sim.servers[server]
        writes = handler.writes
        counted = handler.dropped_count + writes.lost_count + writes.pruned_count
        if counted != self._removed[server]:
            self.require(
                False,
                f"server {server} removed {self._removed[server]} segments and counted {counted}",
            )
        if writes.lost_count:
            bent_count = sum(segment_owner(segment.id) == server for segment in self.sim.bent)
            self.require(
                writes.lost_count <= bent_count, f"server {server} lost a segment that was intact"
            )

    def matched(self, player: Player, prompt: Prompt, match: Match, *, since: int) -> None:
        """Compare the depth with what was there all the time."""
        if match.reason == "partial":
            return
        least = 0
        usable = (len(prompt.tokens) - 1) // SMALL.block_tokens
        for depth, block in enumerate(prompt.hashes[:usable], 1):
            keys = [(server, block) for server in self.sim.memories]
            if any(self._copies[key] and self._since[key] < since for key in keys):
                least = depth
        found = match.tokens // SMALL.block_tokens
        self.require(found >= least, f"{prompt}: {least} blocks are published, {found} were found")


class NoHole(Checker):
    """5: a match is a prefix without holes, and what hangs on nothing is not visible."""

    number = 5

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._changes = 0

    def matched(self, player: Player, prompt: Prompt, match: Match, *, since: int) -> None:
        """Compare every reference with the block of the prompt that it must end with."""
        depth = 0
        for ref in match.segments:
            depth += ref.block_count
            right = depth <= len(prompt.hashes) and prompt.hashes[depth - 1] == ref.last_hash
            self.require(right, f"the match of {prompt} goes astray at block {depth}")
        self.require(depth * SMALL.block_tokens == match.tokens, "a match of another length")

    def stepped(self, server: ServerIndex) -> None:
        """Look at all paths now and then, when no message between servers is under way."""
        self._changes += 1
        if self._changes % EVERY == 0 and not self.sim.peer_messages_under_way:
            self._look()

    def ended(self) -> None:
        """Look at all paths once more."""
        self._look()

    def _look(self) -> None:
        self.expect(check_reachable, self.sim)
        self.expect(check_links, self.sim)
