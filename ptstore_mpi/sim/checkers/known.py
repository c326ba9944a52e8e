"""Knowledge: what matches find, and what they may not skip (invariants 3 and 5)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol.effects import Effect, Send
from ptstore_mpi.protocol.messages import (
    ClearRequest,
    DropRequest,
    LostRequest,
    MatchReply,
    Reply,
    Request,
    ReserveRequest,
)
from ptstore_mpi.sim.checkers.base import EVERY, Checker
from ptstore_mpi.sim.prompts import BLOCK_TOKENS, Prompt
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.workloads import Player
from ptstore_mpi.testing.checks import (
    check_links,
    check_reachable,
)
from ptstore_mpi.types import Match, ServerIndex, StoreResult, segment_owner

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
        self._allowed: set[Segment] = set()
        self._required: set[Segment] = set()
        self._newest: dict[bytes, int] = {}  # event at which a block was published last
        self._answered: dict[int, tuple[int, set[int]]] = {}  # by client: match, and by whom
        self._low: Counter[tuple[ServerIndex, int]] = Counter()
        self._clears: set[tuple[ServerIndex, int, int]] = set()
        self._cleared: set[Segment] = set()

    def request(self, server: ServerIndex, message: Request) -> None:
        """Note what this request must remove, may remove and must not (P2, P15)."""
        place = (server, message.client)
        self._low[place] = max(self._low[place], message.low)
        self._allowed, self._required = set(), set()
        if message.op < self._low[place]:
            return
        cache = self.sim.servers[server].cache
        match message:
            case ClearRequest(client=client, op=op, namespace=namespace):
                if (server, client, op) in self._clears:
                    return
                self._clears.add((server, client, op))
                of_it = [x for x in cache.slots if x.record.namespace == namespace]
                self._required = {x for x in of_it if x.state is SegmentState.PUBLISHED}
                self._cleared |= {x for x in of_it if x.state is SegmentState.RESERVED}
                self._allowed = set(self._required)
            case DropRequest(ref=ref):
                segment = cache.find(ref)
                whole = segment is not None and segment.block_count == ref.block_count
                if segment is not None and whole and not segment.links:
                    self._allowed = {segment}
            case LostRequest(ref=ref):
                segment = cache.find(ref)
                if segment in self.sim.bent and not self.is_right(server, segment):
                    self._allowed = self._required = {segment}

    def unread(self, server: ServerIndex, segment: Segment) -> None:
        """What cannot be read is lost: or matches would find what no load can bring (P15)."""
        self._allowed.add(segment)
        if segment.state is SegmentState.PUBLISHED:
            self._required.add(segment)

    def published(self, server: ServerIndex, segment: Segment) -> None:
        """Note its blocks as known; the last of an increment is known once on a server (P8)."""
        self.require(segment not in self._cleared, "published after its namespace was cleared")
        if segment.id == segment.record.refs[-1].segment:
            last = segment.block_hash(-1)
            known = self.sim.servers[server].cache.published()
            copies = sum(last in map(bytes, each.hashes) for each in known)
            self.require(copies == 1, f"server {server} keeps one increment {copies} times")
        for row in segment.hashes:
            self._newest[row.tobytes()] = self.sim.event_count
            block = (server, row.tobytes())
            if not self._copies[block]:
                self._since[block] = self.sim.event_count
            self._copies[block] += 1

    def retired(self, server: ServerIndex, segment: Segment, *, evicted: bool) -> None:
        """Note its blocks as gone, for a reason."""
        self._removed[server] += 1
        if evicted:
            idle = not segment.links and not segment.is_leased(self.sim.now)
            self.require(
                idle and self.sim.config.eviction != "none",
                f"server {server} evicted {segment.id:#x}, which is in use",
            )
        elif segment not in self._allowed:
            parent = segment.parent
            owner = None if parent is None else self.sim.servers[segment_owner(parent.segment)]
            found = None if owner is None or parent is None else owner.cache.find(parent)
            held = found is not None and segment.serial in found.links
            self.require(
                parent is not None and not held,
                f"server {server} removed {segment.id:#x}, for which there is no reason",
            )
        for row in segment.hashes:
            self._copies[server, row.tobytes()] -= 1

    def stepped(self, server: ServerIndex) -> None:
        """Compare the removals with those the server counted."""
        left = [x for x in self._required if x.state is SegmentState.PUBLISHED]
        self.require(not left, f"server {server} was to remove {left} and did not")
        self._allowed, self._required = set(), set()
        handler = self.sim.servers[server]
        removal = handler.removal
        counted = handler.dropped_count + removal.evicted_count
        counted += removal.lost_count + removal.pruned_count
        if counted != self._removed[server]:
            self.require(
                False,
                f"server {server} removed {self._removed[server]} segments and counted {counted}",
            )
        if removal.lost_count:
            bent = [copy for copy in self.sim.bent if isinstance(copy, Segment)]
            bent_count = sum(segment_owner(segment.id) == server for segment in bent)
            self.require(
                removal.lost_count <= bent_count, f"server {server} lost a segment that was intact"
            )

    def matched(self, player: Player, prompt: Prompt, match: Match, *, since: int) -> None:
        """Compare the depth with what was there all the time."""
        if match.reason == "partial":
            return
        least = 0
        usable = (len(prompt.tokens) - 1) // BLOCK_TOKENS
        for depth, block in enumerate(prompt.hashes[:usable], 1):
            keys = [(server, block) for server in self.sim.memories]
            if any(self._copies[key] and self._since[key] < since for key in keys):
                least = depth
        found = match.tokens // BLOCK_TOKENS
        self.require(found >= least, f"{prompt}: {least} blocks are published, {found} were found")

    def stored(self, player: Player, prompt: Prompt, result: StoreResult, **how: Any) -> None:
        """Check that what a store claims is so."""
        published = self._newest.get(prompt.hashes[-1], -1)
        if result.reason == "stored":
            self.require(published >= how["since"], f"{prompt} was stored and never published")
        elif result.reason in ("known", "dedup"):
            self.require(published >= 0, f"{prompt} is {result.reason} and was never published")

    # -- no store after a match that lacks an answer (P9) --------------------------------------

    def took(self, client: int, reply: Reply | None) -> None:
        """Note who has answered a client's newest match."""
        if isinstance(reply, MatchReply):
            op, servers = self._answered.get(client, (-1, set()))
            if reply.op > op:
                self._answered[client] = (reply.op, {reply.server})
            elif reply.op == op:
                servers.add(reply.server)

    def effect(self, client: int, effect: Effect) -> None:
        """Check that all servers have answered before anything is reserved."""
        match effect:
            case Send(_, ReserveRequest(op=op, attempt=0)):
                matched, servers = self._answered.get(client, (-1, set()))
                self.require(
                    matched == op - 1 and len(servers) == len(self.sim.servers),
                    f"client {client} stores after a match that servers {servers} answered (P9)",
                )


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
        self.require(depth * BLOCK_TOKENS == match.tokens, "a match of another length")

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
