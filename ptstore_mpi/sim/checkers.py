"""What must hold in every simulated job: one checker per invariant.

The numbers are those of the invariants in ARCHITECTURE.md. A checker sees the run as an `Observer`
and raises `InvariantError`, which begins with its number. They know the inside of the cache on
purpose: they compare what it keeps with what they saw happen. Invariant 8, same seed and same
decisions, is a property of two runs: see `ptstore_mpi.sim.run`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.protocol import effects
from ptstore_mpi.protocol.messages import (
    AcquireRequest,
    ClearRequest,
    DropRequest,
    LostRequest,
    Reply,
    Request,
    ReserveReply,
)
from ptstore_mpi.sim.observer import InvariantError, Observer
from ptstore_mpi.sim.promises import Promises
from ptstore_mpi.sim.prompts import Prompt, book_of
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.workloads import Player
from ptstore_mpi.testing.actor import SMALL
from ptstore_mpi.testing.checks import (
    check_cache_space,
    check_links,
    check_quiet,
    check_reachable,
)
from ptstore_mpi.types import LoadResult, Match, ServerIndex, StoreResult, segment_owner

__all__ = ["CHECKERS", "Checker"]

_EVERY = 16  # the dearer checks look at every so many changes of a server


class Checker(Observer):
    """Watches one invariant of one simulation."""

    number = 0
    reads_bytes = False

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        self.sim = sim
        self.books = {book_of(salt).digest: book_of(salt) for salt in salts}

    def require(self, holds: object, text: str) -> None:
        """Raise unless something holds."""
        if not holds:
            raise InvariantError(f"{self.number}: {text}")

    def expect(self, check: Callable[..., None], *arguments: Any) -> None:
        """Run a check that raises AssertionError, under this checker's number."""
        try:
            check(*arguments)
        except AssertionError as error:
            raise InvariantError(f"{self.number}: {error}") from None

    def segments(self, server: ServerIndex, state: SegmentState) -> list[Segment]:
        """Return a server's segments in one state."""
        return [s for s in self.sim.servers[server].cache.slots if s.state is state]


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
            first = how["skip_tokens"] // SMALL.block_tokens
            last = max(result.tokens // SMALL.block_tokens, first)
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
        if self._changes % _EVERY == 0:
            self._compare_all(server)

    def ended(self) -> None:
        """Look at every segment once more."""
        for server in self.sim.memories:
            self._compare_all(server)

    def _compare_all(self, server: ServerIndex) -> None:
        for segment in self.segments(server, SegmentState.PUBLISHED):
            self._compare(server, segment)

    def _compare(self, server: ServerIndex, segment: Segment) -> None:
        if segment in self.sim.bent:
            return
        image = self.books[segment.record.namespace].image_of(segment)
        found = self.sim.memories[server][segment.offset : segment.offset + len(image)]
        self.require(
            np.array_equal(found, image),
            f"visible segment {segment.id:#x} of server {server} has other bytes than were stored",
        )


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


class Held(Checker):
    """4: neither what is leased nor what a client may still be writing is ever reused.

    And its other half (P12): what was read after its lease had ended is not trusted.
    """

    number = 4

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._promises = Promises(sim)
        # By client and token: operation, server, offset.
        self._gets: dict[tuple[int, int], tuple[int, ServerIndex, int]] = {}
        self._late: dict[int, set[str]] = {}  # by client: "owned" and "remote" reads past a lease

    def request(self, server: ServerIndex, message: Request) -> None:
        """Forget what a client lets go."""
        self._promises.request(server, message)

    def replied(self, client: int, reply: Reply) -> None:
        """Remember what a client was promised."""
        self.expect(self._promises.reply, client, reply)

    def freed(self, server: ServerIndex, segment: Segment) -> None:
        """Check that nobody was promised these bytes."""
        self.expect(self._promises.check, server)

    # -- reads and writes that come late -------------------------------------------------------

    def effect(self, client: int, effect: effects.Effect) -> None:
        """Note reads and writes that come too late."""
        match effect:
            case effects.Send(_, AcquireRequest(attempt=0)):
                self._late.pop(client, None)  # of Gets that an earlier load left behind
            case effects.Unpack(_, _, image) if image.server is not None:
                self._note_read(image.server, client, image.offset, source="owned")
            case effects.StartGet(server, offset, _, _):
                token = self.sim.transports[client].started_count + 1
                op = self.sim.contexts[client].ledger.newest_op
                self._gets[client, token] = (op, server, offset)
            case effects.Pack(_, _, image) if image.server is not None:
                self._note_write(image.server, client, image.offset)
            case effects.StartWrite(server, op, _, _):
                for segment in self._promises.regions[server].get((client, op), ()):
                    self._note_write(server, client, segment.offset)

    def transferred(self, client: int, token: int) -> None:
        """Note a Get that ended too late, unless it is left over from an earlier load."""
        op, server, offset = self._gets.pop((client, token), (0, ServerIndex(0), 0))
        context = self.sim.contexts[client]
        if op == context.ledger.newest_op:
            source = "owned" if server in context.near else "remote"
            self._note_read(server, client, offset, source=source)

    def loaded(self, player: Player, prompt: Prompt, match: Match, **how: Any) -> None:
        """Check that nothing of a whole load was read late."""
        late = self._late.get(player.client, set())
        result: LoadResult | None = how["result"]
        if result is not None and result.reason == "loaded":
            trusted = {source for source, tokens in result.by_source.items() if tokens}
            self.require(
                not trusted & late,
                f"client {player.client} trusts bytes that it read after their lease",
            )

    def _note_read(self, server: ServerIndex, client: int, offset: int, *, source: str) -> None:
        op = self.sim.contexts[client].ledger.newest_op
        granted_s = [
            lease.expiry_s
            for lease in self._promises.leases[server]
            if (lease.client, lease.op) == (client, op)
            and 0 <= offset - lease.segment.offset < lease.segment.nbytes
        ]
        if granted_s and max(granted_s) < self.sim.now:
            self._late.setdefault(client, set()).add(source)
            self.sim.dice.fired["read_past_lease"] += 1

    def _note_write(self, server: ServerIndex, client: int, offset: int) -> None:
        status = self.sim.servers[server].writes.status_of(client, offset)
        self.sim.dice.fired["write_past_reservation"] += status not in (None, "reserved")


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
        if self._changes % _EVERY == 0 and not self.sim.peer_messages_under_way:
            self._look()

    def ended(self) -> None:
        """Look at all paths once more."""
        self._look()

    def _look(self) -> None:
        self.expect(check_reachable, self.sim)
        self.expect(check_links, self.sim)


class Conservation(Checker):
    """6: hits by source and recomputed tokens add up to the tokens asked for."""

    number = 6

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._asked: Counter[int] = Counter()
        self._players: dict[int, Player] = {}

    def loaded(self, player: Player, prompt: Prompt, match: Match, **how: Any) -> None:
        """Add up one request."""
        result: LoadResult | None = how["result"]
        if result is None:
            return
        self._players[player.client] = player
        self._asked[player.client] += match.prompt_tokens
        self.require(sum(result.by_source.values()) == result.tokens, f"sources of {result}")
        self.require(how["skip_tokens"] <= result.tokens <= match.tokens, f"{match}: {result}")
        whole = result.tokens == match.tokens
        self.require(whole == (result.reason in ("loaded", "nothing")), f"the reason of {result}")

    def stored(self, player: Player, prompt: Prompt, result: StoreResult, **how: Any) -> None:
        """Check that a store built upon nothing that its client could not verify (P8)."""
        verified: int | None = how["verified_tokens"]
        whole = len(prompt.hashes) * SMALL.block_tokens
        usable = (len(prompt.tokens) - 1) // SMALL.block_tokens * SMALL.block_tokens
        if result.reason == "stored" and verified is not None and verified < usable:
            self.require(
                result.tokens >= whole - verified,
                f"client {player.client} verified {verified} tokens and stored the last "
                f"{result.tokens} of {whole}",
            )

    def ended(self) -> None:
        """Add up all requests of each client."""
        for client, player in self._players.items():
            tokens = player.store.stats()["tokens"]
            asked, stored = tokens.pop("asked"), tokens.pop("stored")
            self.require(asked == self._asked[client] == sum(tokens.values()), f"{tokens}")
            self.require(stored >= 0, f"{tokens}")


class Limits(Checker):
    """7: memory stays within its budget, and everything comes back when the clients have left."""

    number = 7

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._changes: Counter[ServerIndex] = Counter()

    def replied(self, client: int, reply: Reply) -> None:
        """Check how many regions a client holds that was given another one."""
        if isinstance(reply, ReserveReply):
            count = len(self.sim.servers[reply.server].writes.regions_of(client))
            self.require(
                count <= self.sim.config.unconfirmed_count,
                f"client {client} holds {count} regions of server {reply.server} (P2)",
            )

    def stepped(self, server: ServerIndex) -> None:
        """Check the budget at every step, the whole account now and then."""
        cache = self.sim.servers[server].cache
        self.require(cache.free_bytes >= 0, f"server {server} is over its budget")
        self._changes[server] += 1
        if self._changes[server] % _EVERY == 0:
            self.expect(check_cache_space, cache)

    def ended(self) -> None:
        """Check that nothing is held but by clients that vanished, and these hold only regions."""
        vanished = {
            p.client for p in self.sim.processes.by_client.values() if p.state == "vanished"
        }
        for handler in self.sim.servers:
            self.expect(check_cache_space, handler.cache)
        if not vanished:
            self.expect(check_quiet, self.sim)
        for client, context in self.sim.contexts.items():
            ledger = context.ledger
            free = client in vanished or ledger.borrow(ledger.staging_bytes) is not None
            self.require(free, f"staging memory of client {client} did not come back")
        for server, handler in enumerate(self.sim.servers):
            counters = handler.counters()
            held = {name: counters[name] for name in ("leased_bytes", "zombie_bytes")}
            self.require(not any(held.values()), f"server {server} still holds {held}")
            regions = [r for client in vanished for r in handler.writes.regions_of(client)]
            owed = sum(segment.nbytes for region in regions for segment in region)
            self.require(counters["reserved_bytes"] == owed, f"server {server}: {counters}")


class InTime(Checker):
    """9: no operation outlives its deadline by more than one poll."""

    number = 9
    slack_s = 0.02

    def operated(self, player: Player, kind: str, took_s: float) -> None:
        """Compare the time it took with its deadline."""
        limit_s: float = getattr(self.sim.config, f"{kind}_timeout_s")
        self.require(
            took_s <= limit_s + self.slack_s,
            f"client {player.client} took {took_s:.3f} s to {kind}, its deadline is {limit_s} s",
        )


CHECKERS: tuple[type[Checker], ...] = (
    RightBytes,
    OnlyComplete,
    Found,
    Held,
    NoHole,
    Conservation,
    Limits,
    InTime,
)
"""Every checker, by rising number."""
