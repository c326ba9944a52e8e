"""Where tokens come from: what a load says, against what servers lent it (invariant 6)."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from ptstore_mpi.protocol.effects import Effect, Send
from ptstore_mpi.protocol.messages import (
    AcquireReply,
    AcquireRequest,
    AwaitReply,
    AwaitRequest,
    Reply,
)
from ptstore_mpi.sim.checkers.base import Checker
from ptstore_mpi.sim.prompts import BLOCK_TOKENS, Prompt
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.workloads import Player
from ptstore_mpi.types import LoadResult, Match, SegmentRef, segment_owner

__all__ = ["Sources"]

_Lent = dict[SegmentRef, set[tuple[str, int]]]


class Sources(Checker):
    """6: tokens by source and by server are those of copies that were lent.

    A segment may have been lent twice, by its owner and as a replica: then it may count as either.
    """

    number = 6

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        # By client: its newest operation, what it has asked for there, and what was lent.
        self._op: dict[int, int] = {}
        self._asked: dict[int, dict[tuple[int, int], AcquireRequest | AwaitRequest]] = {}
        self._lent: dict[int, _Lent] = {}

    def effect(self, client: int, effect: Effect) -> None:
        """Remember what is asked for."""
        match effect:
            case Send(server, AcquireRequest() | AwaitRequest() as asked):
                if self._op.get(client) != asked.op:
                    self._op[client] = asked.op
                    self._asked[client], self._lent[client] = {}, defaultdict(set)
                self._asked[client][server, asked.attempt] = asked

    def took(self, client: int, reply: Reply | None) -> None:
        """Remember what was lent, by whom, and whether from a file."""
        if not isinstance(reply, AcquireReply | AwaitReply) or reply.op != self._op.get(client):
            return
        asked = self._asked[client].get((reply.server, reply.attempt))
        lent = self._lent[client]
        near = reply.server in self.sim.contexts[client].near
        if isinstance(reply, AcquireReply) and isinstance(asked, AcquireRequest):
            elsewhere = dict(reply.redirects)
            for place, (ref, grant) in enumerate(zip(asked.refs, reply.grants, strict=False)):
                if place not in elsewhere:
                    source = "owned" if near else "remote"
                    lent[ref].add(("disk" if grant.from_disk else source, reply.server))
        wished = asked.refs if isinstance(asked, AwaitRequest) else ()
        if isinstance(asked, AcquireRequest) and asked.wish is not None:
            wished = asked.wish.refs
        for ref, place_ in zip(wished, reply.places, strict=False):
            if place_.status == "here":
                lent[ref].add(("replica" if near else "remote", reply.server))

    def loaded(self, player: Player, prompt: Prompt, match: Match, **how: Any) -> None:
        """Compare what a load says with what it could have."""
        result: LoadResult | None = how["result"]
        start = how["skip_tokens"]
        if result is None or result.tokens <= start:
            return
        certain: Counter[str | int] = Counter()
        possible: Counter[str | int] = Counter()
        lent = self._lent.get(player.client, {})
        depth = 0
        for ref in match.segments:
            first, depth = depth, depth + ref.block_count * BLOCK_TOKENS
            tokens = min(depth, result.tokens) - max(first, start)
            if tokens <= 0:
                continue
            copies = lent.get(ref, set())
            self.require(copies, f"nobody has lent {ref} of {segment_owner(ref.segment)}")
            for names in ({source for source, _ in copies}, {server for _, server in copies}):
                possible.update(dict.fromkeys(names, tokens))
                if len(names) == 1:
                    certain.update(dict.fromkeys(names, tokens))
        told: Counter[str | int] = Counter(result.by_server)
        told.update({name: n for name, n in result.by_source.items() if name != "engine"})
        for name in {*told, *possible}:
            fits = certain[name] <= told[name] <= possible[name]
            self.require(
                fits, f"{told[name]} tokens from {name}, of {certain[name]} to {possible[name]}"
            )
