"""Transport `local`: client and server in one process, no MPI. What `python script.py` uses.

The handler runs inside `send`, so every reply is there before it is asked for, except where the
arena is still being populated.
"""

from __future__ import annotations

import time
from collections import deque

from ptstore_mpi.arena import Arena, Memory
from ptstore_mpi.protocol.actions import Action, Answer, CancelReceives, PostReceives
from ptstore_mpi.protocol.handler import ServerHandler
from ptstore_mpi.protocol.messages import Reply, Request
from ptstore_mpi.transport.base import ClientTransport
from ptstore_mpi.types import ServerIndex

__all__ = ["LocalTransport"]

_NAP_S = 1e-3


class LocalTransport(ClientTransport):
    """One client and the one server of a single process.

    Parameters
    ----------
    handler
        The server.
    arena
        Its memory.
    staging_bytes, copy_threads
        As in `ClientTransport`.
    """

    name = "local"

    def __init__(
        self, handler: ServerHandler, arena: Arena, *, staging_bytes: int, copy_threads: int
    ) -> None:
        super().__init__(
            {ServerIndex(0): arena.memory},
            staging_bytes=staging_bytes,
            copy_threads=copy_threads,
            is_populated=lambda: arena.is_populated,
        )
        self._handler = handler
        self._arena = arena
        self._replies: deque[Reply] = deque()
        self._done: deque[int] = deque()
        self._posted: dict[int, deque[tuple[int, int]]] = {}
        self._next_token = 0

    def now(self) -> float:
        """Return monotonic time, s."""
        return time.monotonic()

    def send(self, server: ServerIndex, message: Request) -> None:
        """Have the server handle a request at once."""
        self._advance()
        self._carry_out(self._handler.handle(message, self.now()))

    def receive(self, until: float) -> Reply | None:
        """Return the next reply, or None once ``until`` has passed."""
        while not self._replies:
            if self.now() >= until:
                return None
            time.sleep(_NAP_S)
            self._advance()
        return self._replies.popleft()

    def start_get(self, server: ServerIndex, offset: int, target: Memory) -> int:
        """Copy from the arena."""
        target[:] = self._memories[server][offset : offset + len(target)]
        return self._complete()

    def start_write(self, server: ServerIndex, op: int, *, staging_offset: int, nbytes: int) -> int:
        """Copy from staging memory into the next receive posted for ``op``."""
        offset, expected = self._posted[op].popleft()
        self._memories[server][offset : offset + nbytes] = self._staging(staging_offset, nbytes)
        if not self._posted[op] or nbytes != expected:
            del self._posted[op]
            actions = self._handler.received(0, op, self.now(), intact=nbytes == expected)
            self._carry_out(actions)
        return self._complete()

    def await_tokens(self, until: float) -> tuple[int, ...]:
        """Return the transfers that have completed since the last call."""
        done = tuple(self._done)
        self._done.clear()
        return done

    def close(self) -> None:
        """Let the arena go."""
        self._let_memory_go()
        self._handler.close_tier()
        self._arena.close()

    def _complete(self) -> int:
        self._next_token += 1
        self._done.append(self._next_token)
        return self._next_token

    def _advance(self) -> None:
        now = self.now()
        self._carry_out(self._handler.grow(self._arena.populated_bytes, now))
        self._carry_out(self._handler.tick(now))
        self._carry_out(self._handler.poll_tier(now))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Answer(_, reply):
                    self._replies.append(reply)
                case PostReceives(_, op, extents):
                    self._posted[op] = deque(extents)
                case CancelReceives(client, op):
                    self._posted.pop(op, None)
                    self._handler.settled(client, op)
                case _:
                    raise AssertionError(f"a single server has no peer for {action}")
