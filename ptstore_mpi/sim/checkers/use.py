"""Use: where nothing goes wrong, everything has to work (liveness).

Without it a store that refuses everything would keep every invariant.
"""

from __future__ import annotations

from typing import Any

from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.protocol.messages import (
    ClearRequest,
    DropRequest,
    Reply,
    Request,
    ReserveReply,
    ReserveRequest,
)
from ptstore_mpi.sim.checkers.base import Checker
from ptstore_mpi.sim.faults import FaultPlan
from ptstore_mpi.sim.prompts import Prompt
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.workloads import Player
from ptstore_mpi.types import LoadResult, Match, ServerIndex, StoreResult

__all__ = ["Trims", "Useful"]

_QUICK_S = 0.2  # messages and transfers take milliseconds
_FEW_GETS_BYTES = 1024
_REFUSALS = ("stored", "known", "dedup", "full")


class Useful(Checker):
    """0: under a plan without faults no operation fails but for want of room, or to a removal."""

    number = 0

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._calm = sim.dice.plan == FaultPlan()
        # Over a file tier a prefix may end where memory has no room to bring the rest back.
        self._removed_any = bool(sim.tiers)

    def request(self, server: ServerIndex, message: Request) -> None:
        """From the first removal on, a client may find that something has gone."""
        self._removed_any |= isinstance(message, ClearRequest | DropRequest)

    def retired(self, server: ServerIndex, segment: Segment, *, evicted: bool) -> None:
        """What makes room for something else has gone too."""
        self._removed_any |= evicted

    def matched(self, player: Player, prompt: Prompt, match: Match, *, since: int) -> None:
        """Every server answers."""
        self.require(not self._calm or match.reason != "partial", f"{match}: nobody was silent")

    def loaded(self, player: Player, prompt: Prompt, match: Match, **how: Any) -> None:
        """What was found is loaded, wholly."""
        result: LoadResult | None = how["result"]
        if self._calm:
            fine = result is not None and result.reason in ("loaded", "nothing", *self._races)
            self.require(fine, f"{match}: {result}")

    def stored(self, player: Player, prompt: Prompt, result: StoreResult, **how: Any) -> None:
        """What there is room for is stored."""
        if self._calm:
            self.require(result.reason in (*_REFUSALS, *self._races), f"{prompt}: {result}")

    def operated(self, player: Player, kind: str, took_s: float) -> None:
        """No load waits for what does not come."""
        if self._calm and kind == "load" and self.sim.config.get_bytes >= _FEW_GETS_BYTES:
            self.require(took_s <= _QUICK_S, f"a load took {took_s:.3f} s, and nothing went wrong")

    @property
    def _races(self) -> tuple[str, ...]:
        return ("gone",) if self._removed_any else ()


class Trims(Checker):
    """0: a server full of parents whose leaves live on others asks these for room (P16)."""

    number = 0

    def __init__(self, sim: Simulation, salts: tuple[str, ...]) -> None:
        super().__init__(sim, salts)
        self._wanted: dict[tuple[int, int], int] = {}  # by client and operation: blocks

    def request(self, server: ServerIndex, message: Request) -> None:
        """Remember how much is asked for, where it is one segment."""
        if isinstance(message, ReserveRequest) and len(message.segment_block_counts) == 1:
            self._wanted[message.client, message.op] = message.segment_block_counts[0]

    def replied(self, client: int, reply: Reply) -> None:
        """Check that a server that refuses what it could have had has asked for it."""
        if not isinstance(reply, ReserveReply) or reply.status != "full":
            return
        blocks = self._wanted.get((client, reply.op))
        handler = self.sim.servers[reply.server]
        if blocks is None or handler.cache.victim() is not None or handler.lower is not None:
            return  # over a file tier it may have waited for writes, and asked nobody
        trimming = handler.writes.trimming
        blocked = [s for s in trimming.blocked() if s.block_count >= blocks]
        if handler.cache.evicts and blocked:
            asked = any(map(trimming.is_asked, trimming.blocked()))
            self.require(asked, f"server {reply.server} is full of parents and asks nobody")

    def ended(self) -> None:
        """Count what was dropped for other servers."""
        trimmed = sum(handler.writes.trimming.trimmed_count for handler in self.sim.servers)
        self.sim.dice.fired["trimmed"] += trimmed
