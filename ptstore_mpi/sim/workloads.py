"""What the clients of a simulated job do: scripts of effects, one generator per client.

A `Workload` says how large the job is and what each client's script does; `Player` is the hand
that carries out single operations and tells the observers how they ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from ptstore_mpi.protocol import maintain
from ptstore_mpi.protocol.effects import Operation, Send
from ptstore_mpi.protocol.messages import ReserveRequest
from ptstore_mpi.sim.faults import FAULTS, TIER_FAULTS
from ptstore_mpi.sim.processes import AbortedError, Process, Sleep
from ptstore_mpi.sim.prompts import BLOCK_TOKENS, MODEL, Prompt, book_of
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.trace import START_S
from ptstore_mpi.types import Match, StoreResult

__all__ = ["WORKLOADS", "Player", "Workload"]

Script = Generator[Any, Any, Any]
_HELD_COUNT = 4


class Player:
    """One client that works in one namespace.

    Attributes
    ----------
    process
        Set when the script was spawned.
    """

    def __init__(self, sim: Simulation, client: int, *, salt: str) -> None:
        self.sim = sim
        self.client = client
        self.rng = random.Random(sim.dice.rng.random())
        self.book = book_of(salt, sim.layout)
        self.store = sim.store(client)
        self.namespace = self.store.namespace(MODEL, sim.layout, salt=salt)
        self.process: Process | None = None
        self._held: list[tuple[Prompt, Match]] = []

    # -- operations ----------------------------------------------------------------------------

    def ask(self, prompt: Prompt) -> Script:
        """Match, load and store a prompt, as an engine does."""
        match = yield from self.match(prompt)
        if match is None:
            return
        result = yield from self.load(prompt, match)
        if result is not None:
            yield from self.keep(prompt, verified_tokens=result.tokens)

    def match(self, prompt: Prompt) -> Script:
        """Match; the result is kept for `load_held`."""
        since = self.sim.event_count
        match = yield from self._operate("match", self.namespace.matching(prompt.tokens))
        if match is not None:
            for hear in self.sim.hearers["matched"]:
                hear(self, prompt, match, since=since)
            if match.tokens:
                self._held = [*self._held[1 - _HELD_COUNT :], (prompt, match)]
        return match

    def load(
        self, prompt: Prompt, match: Match, *, skip_tokens: int = 0, held: bool = False
    ) -> Script:
        """Load a match into blank memory."""
        out = self.book.oracle.blank(match.tokens // BLOCK_TOKENS)
        operation = self.namespace.loading(match, out, skip_tokens=skip_tokens)
        result = yield from self._operate("load", operation)
        for hear in self.sim.hearers["loaded"]:
            hear(self, prompt, match, out=out, result=result, skip_tokens=skip_tokens, held=held)
        return result

    def load_held(self) -> Script:
        """Load a match of long ago."""
        if self._held:
            prompt, match = self.rng.choice(self._held)
            self.sim.dice.fired["held_match"] += 1
            blocks = match.tokens // BLOCK_TOKENS
            skip = self.rng.randrange(blocks) * BLOCK_TOKENS
            yield from self.load(prompt, match, skip_tokens=skip, held=True)

    def keep(
        self, prompt: Prompt, *, verified_tokens: int | None = None, hesitate_s: float = 0.0
    ) -> Script:
        """Store a prompt; with ``hesitate_s`` its client stalls before it reserves."""
        since = self.sim.event_count
        operation = self.namespace.storing(
            prompt.tokens, prompt.arrays, verified_tokens=verified_tokens
        )
        if hesitate_s:
            operation = self._hesitant(operation, hesitate_s)
        stored = yield from self._operate("store", operation)
        if stored is not None:
            for hear in self.sim.hearers["stored"]:
                hear(self, prompt, stored, verified_tokens=verified_tokens, since=since)

    def drop(self, prompt: Prompt) -> Script:
        """Drop the last segment of what is known of a prompt, if it may go."""
        match = yield from self.match(prompt)
        if match is not None and match.tokens:
            yield from self._operate("match", self.namespace.dropping_tail(match))

    def clear(self) -> Script:
        """Clear the namespace."""
        yield from self._operate("match", self.namespace.clearing())

    def look(self) -> Script:
        """Ask every server for its counters."""
        until = self.sim.transports[self.client].now() + self.sim.config.match_timeout_s
        operation = maintain.server_counters(self.sim.contexts[self.client], until)
        yield from self._operate("match", operation)

    def _hesitant(self, operation: Operation[StoreResult], hesitate_s: float) -> Script:
        answer: Any = None
        try:
            while True:
                effect = operation.send(answer)
                if isinstance(effect, Send) and isinstance(effect.message, ReserveRequest):
                    assert self.process is not None
                    self.process.stalled_s += hesitate_s
                    yield Sleep(hesitate_s)
                answer = yield effect
        except StopIteration as stop:
            return stop.value
        finally:
            operation.close()

    def _operate(self, kind: str, operation: Operation[Any]) -> Script:
        """Carry out an operation; None where it was aborted."""
        process = self.process
        assert process is not None
        self.sim.bend_arena()
        self.sim.note(f"client {self.client}", f"begins to {kind}")
        started_s, stalled_s = self.sim.now, process.stalled_s
        process.in_operation = True
        try:
            result = yield from operation
        except AbortedError:
            return None
        finally:
            process.in_operation = False
        took_s = self.sim.now - started_s - (process.stalled_s - stalled_s)
        self.sim.note(f"client {self.client}", f"has ended to {kind}", result)
        for hear in self.sim.hearers["operated"]:
            hear(self, kind, took_s)
        return result


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of job.

    Attributes
    ----------
    name
        As on the command line.
    script
        Returns what one client does; the random numbers are its own.
    slots
        Range of the segments an arena has room for.
    generation_bits
        Those that the jobs may have.
    salts
        Namespaces that its clients share.
    faults
        Kinds of faults that its jobs may meet.
    settings
        Fields of `Config` that all its jobs share.
    tiered_share
        Share of its jobs that have file tiers, and a smaller memory.
    """

    name: str
    script: Callable[[Player], Script]
    slots: tuple[int, int] = (6, 16)
    generation_bits: tuple[int, ...] = (0, 20)
    salts: tuple[str, ...] = ("a",)
    faults: tuple[str, ...] = FAULTS
    settings: dict[str, Any] = field(default_factory=dict)
    tiered_share: float = 0.25


def _repeat(player: Player, count: int, longest_pause_s: float) -> Iterator[Sleep]:
    for _ in range(count):
        yield Sleep(player.rng.random() * longest_pause_s)


def _qa(player: Player) -> Script:
    """Popular documents, a question each."""
    rng = player.rng
    documents = [(1, 2, 3), (4, 5, 6, 7), (1, 2, 8, 9, 1), (9, 9)]
    for pause in _repeat(player, 6, 0.01):
        yield pause
        document = documents[int(len(documents) * rng.random() ** 2)]
        question = tuple(rng.choices((20, 21, 22), k=rng.randint(0, 2)))
        yield from player.ask(player.book.prompt(document + question, tail=rng.random() < 0.8))


def _multi_turn(player: Player) -> Script:
    """Conversations that grow; now and then another client goes on with one."""
    rng = player.rng
    mine: tuple[int, ...] = (1,)
    for pause in _repeat(player, 6, 0.02):
        yield pause
        if rng.random() < 0.2 or len(mine) > 8:
            mine = (rng.randint(1, 2),)
        mine += tuple(rng.choices((3, 4), k=rng.randint(1, 2)))
        yield from player.ask(player.book.prompt(mine))


def _diverge(player: Player) -> Script:
    """Texts that leave a common one anywhere, within a segment too."""
    rng = player.rng
    common = (1, 2, 3, 4, 5, 6, 7)
    for pause in _repeat(player, 6, 0.01):
        yield pause
        own = tuple(rng.choices((11, 12), k=rng.randint(0, 3)))
        blocks = common[: rng.randint(0, len(common))] + own
        yield from player.ask(player.book.prompt(blocks or common, tail=rng.random() < 0.7))
        if rng.random() < 0.15:
            yield from player.load_held()


def _same(player: Player) -> Script:
    """Everybody stores the same increment, or one that overlaps, at the same time."""
    rng = player.rng
    for round_ in range(6):
        start_s = START_S + 0.5 * (1 + round_)
        yield Sleep(max(start_s - player.sim.now, 0.0))
        text = tuple((round_ // 2 * 3 + i) % 9 for i in range(7))
        blocks = text if rng.random() < 0.5 else text[: rng.randint(1, 7)]
        if rng.random() < 0.5:
            yield from player.keep(player.book.prompt(blocks))
        else:
            yield from player.ask(player.book.prompt(blocks))


def _tiny(player: Player) -> Script:
    """Hardly any room: every slot is used again and again, under readers that held on to it."""
    rng = player.rng
    for pause in _repeat(player, 10, 0.01):
        yield pause
        blocks = tuple(rng.choices((1, 2), k=rng.randint(1, 3)))
        prompt = player.book.prompt(blocks)
        what = rng.random()
        if what < 0.45:
            yield from player.ask(prompt)
        elif what < 0.7:
            yield from player.load_held()
        elif what < 0.9:
            yield from player.drop(prompt)
        else:
            yield from player.clear()


def _archive(player: Player) -> Script:
    """More texts than memory has room for, each asked for again and again."""
    rng = player.rng
    texts = [(1, 2, 3, 4), (1, 2, 5, 6), (7, 8), (9, 7), (1, 3), (2, 8, 4, 4), (5, 5), (6, 1)]
    for pause in _repeat(player, 16, 0.03):
        yield pause
        prompt = player.book.prompt(rng.choice(texts))
        what = rng.random()
        if what < 0.7:
            yield from player.ask(prompt)
        elif what < 0.85:
            yield from player.load_held()
        elif what < 0.96:
            yield from player.drop(prompt)
        else:
            yield from player.clear()


def _churn(player: Player) -> Script:
    """Growth, drops and clears across servers."""
    rng = player.rng
    common = (1, 2, 3, 4, 5, 6)
    for pause in _repeat(player, 9, 0.02):
        yield pause
        own = tuple(rng.choices((1, 2), k=rng.randint(0, 2)))
        prompt = player.book.prompt(common[: rng.choice((2, 2, 3, 4, 4, 6))] + own)
        what = rng.random()
        if what < 0.55:
            yield from player.ask(prompt)
        elif what < 0.65:
            yield from player.load_held()
        elif what < 0.9:
            yield from player.drop(prompt)
        elif what < 0.97:
            yield from player.clear()
        else:
            yield from player.look()


def _rebirth(player: Player) -> Script:
    """A text in three segments of three clients, forgotten and stored again in other slots.

    Whoever stores the third has matched the first two a while ago (CE 15, P8).
    """
    rng, book = player.rng, player.book
    role = player.sim.clients.index(player.client)
    for pause in _repeat(player, 12 if role == 0 else 20, 0.004):
        yield pause
        if role == 0:
            if rng.random() < 0.2:
                yield from player.clear()
            if rng.random() < 0.5:
                yield from player.keep(book.prompt((9, 9)))
            yield from player.keep(book.prompt((1, 2)))
            continue
        segments = role + 1 if len(player.sim.clients) > 2 else rng.choice((2, 3))
        prompt = book.prompt((1, 2, 3, 4, 5, 6)[: 2 * segments])
        match = yield from player.match(prompt)
        if match is not None and match.tokens == 2 * (segments - 1) * BLOCK_TOKENS:
            hesitate_s = 0.1 * rng.random() if segments == 3 else 0.0
            yield from player.keep(prompt, hesitate_s=hesitate_s)


def _hot(player: Player) -> Script:
    """Few texts of one node, read by all clients of another at the same time, again and again."""
    rng, book = player.rng, player.book
    texts = [(1, 2, 3, 4, 5), (1, 2, 3, 8), (6, 7, 6)]
    for round_ in range(7):
        yield Sleep(max(START_S + 0.3 * (1 + round_) - player.sim.now, 0.0))
        prompt = book.prompt(texts[int(len(texts) * rng.random() ** 2)])
        if round_ < 2 or rng.random() < 0.3:
            yield from player.ask(prompt)
        elif rng.random() < 0.1:
            yield from player.drop(prompt)
        elif rng.random() < 0.05:
            yield from player.clear()
        else:
            match = yield from player.match(prompt)
            if match is not None:
                yield from player.load(prompt, match)
            yield from player.load_held()


def _overfull(player: Player) -> Script:
    """Texts begun on one node and gone on with on others, more of them than there is room for."""
    rng = player.rng
    role = player.sim.clients.index(player.client)
    for pause in _repeat(player, 10, 0.05):
        yield pause
        begin = rng.randint(1, 5)
        blocks: tuple[int, ...] = (begin, begin + 1)
        if begin % len(player.sim.clients) != role:
            blocks += (20 + role, 21)
        yield from player.ask(player.book.prompt(blocks))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("qa", _qa),
        Workload("multi_turn", _multi_turn, salts=("a", "b")),
        Workload("diverge", _diverge),
        Workload("same", _same),
        Workload("tiny", _tiny, slots=(3, 4), generation_bits=(0,)),
        Workload(
            "rebirth",
            _rebirth,
            slots=(3, 6),
            generation_bits=(0,),
            faults=("reorder", "stall", "pause", "slow_transfer"),
            settings={"placement": "local"},
        ),
        Workload(
            "hot",
            _hot,
            slots=(5, 12),
            settings={"replica_admission": "always", "replica_max_share": 0.6},
        ),
        Workload(
            "overfull",
            _overfull,
            slots=(3, 4),
            settings={"placement": "local", "eviction": "lru", "replica_max_share": 0.3},
        ),
        Workload("churn", _churn, slots=(3, 8), generation_bits=(0,), salts=("a", "a", "b")),
        Workload(
            "archive",
            _archive,
            slots=(3, 5),
            faults=("stall", "pause", "lose", "reorder", *TIER_FAULTS),
            settings={"verify": "off"},  # nobody but the tier itself sees a bent bit
            tiered_share=0.9,
        ),
    )
}
"""Every workload by name."""
