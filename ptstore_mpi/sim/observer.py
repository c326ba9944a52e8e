"""What a simulation tells those who watch it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptstore_mpi.cache.replicas import Replica
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.protocol.effects import Effect
from ptstore_mpi.protocol.messages import Reply, Request
from ptstore_mpi.types import Match, ServerIndex, StoreResult

if TYPE_CHECKING:
    from ptstore_mpi.sim.prompts import Prompt
    from ptstore_mpi.sim.workloads import Player

__all__ = ["InvariantError", "Observer"]


class InvariantError(AssertionError):
    """An invariant does not hold."""


class Observer:
    """Sees what passes in a simulation. Checkers override what they need."""

    def request(self, server: ServerIndex, message: Request) -> None:
        """A request is about to be handled."""

    def replied(self, client: int, reply: Reply) -> None:
        """A reply has left its server."""

    def took(self, client: int, reply: Reply | None) -> None:
        """A client has taken a reply, or None: it waited in vain."""

    def stepped(self, server: ServerIndex) -> None:
        """A server's state may have changed."""

    def effect(self, client: int, effect: Effect) -> None:
        """A client is about to carry out an effect."""

    def transferred(self, client: int, token: int) -> None:
        """A transfer of a client has ended at its side."""

    def published(self, server: ServerIndex, segment: Segment) -> None:
        """A segment has become visible."""

    def retired(self, server: ServerIndex, segment: Segment, *, evicted: bool) -> None:
        """A published segment is about to go out of sight."""

    def freed(self, server: ServerIndex, segment: Segment) -> None:
        """The memory of a segment may be used again; the segment may be in a file still."""

    def unread(self, server: ServerIndex, segment: Segment) -> None:
        """A segment could not be read from its file; its server will hear of it."""

    def replica_kept(self, server: ServerIndex, replica: Replica) -> None:
        """A replica is found from now on."""

    def replica_dropped(self, server: ServerIndex, replica: Replica) -> None:
        """A replica is not found any more."""

    def replica_freed(self, server: ServerIndex, replica: Replica) -> None:
        """The bytes of a replica, or of a slot that was to be one, may be used again."""

    def matched(self, player: Player, prompt: Prompt, match: Match, *, since: int) -> None:
        """A match that was begun at event ``since`` has ended."""

    def loaded(self, player: Player, prompt: Prompt, match: Match, **how: Any) -> None:
        """A load has ended; ``result`` is None where it was aborted.

        ``out`` is the memory it wrote, ``skip_tokens`` what it left out, ``held`` whether the
        match is of long ago.
        """

    def stored(self, player: Player, prompt: Prompt, result: StoreResult, **how: Any) -> None:
        """A store with ``verified_tokens`` that was begun at event ``since`` has ended."""

    def operated(self, player: Player, kind: str, took_s: float) -> None:
        """An operation has ended by itself after this long, stalls of its client not counted."""

    def ended(self) -> None:
        """Every client has left, and nothing is under way."""
