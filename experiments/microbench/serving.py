"""What one message costs a server's CPU, without MPI: decoding, handling, encoding the answers.

The reference does the same without the handling, so the difference is what the server does with
a message. MPI's own share is in the flood of `experiments.microbench.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np

from experiments.microbench.measure import Measurement, Subject, timed
from ptstore_mpi import Config
from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol.actions import Answer
from ptstore_mpi.protocol.wire import decode_reply, decode_request, encode
from ptstore_mpi.transport.server_parts import make_handler
from ptstore_mpi.types import ServerIndex

__all__ = ["measure"]

TOKENS, BLOCK_TOKENS, SEGMENT_BLOCKS = 8192, 16, 16
BLOCKS = TOKENS // BLOCK_TOKENS
TENSOR_BYTES = (32 << 10,) * 64
CALLS = 50
_LEASE_S = 1.0


class _Server:
    """A server whose arena has no bytes: only what its processor does is real."""

    def __init__(self) -> None:
        config = Config(memory_bytes=1 << 45)
        self._handler = make_handler(
            ServerIndex(0), None, config, server_count=1, populated_bytes=config.arena_bytes
        )
        self._ops = count(1)
        self._rng = np.random.default_rng(1)

    def key(self) -> tuple[int, int, int, int]:
        """Return the key of a new operation of client 0; all earlier ones are over."""
        op = next(self._ops)
        return 0, op, 0, op

    def serve(self, wire: bytes) -> list[bytes]:
        """Return the answers to one message, both as they travel."""
        actions = self._handler.handle(decode_request(wire), 0.0)
        return [encode(action.reply) for action in actions if isinstance(action, Answer)]

    def store(self) -> tuple[bytes, list[m.Request]]:
        """Return the hashes of a new prompt and the messages that store it."""
        hashes = self._rng.bytes(16 * BLOCKS)
        key = self.key()
        segments = (SEGMENT_BLOCKS,) * (BLOCKS // SEGMENT_BLOCKS)
        reserve = m.ReserveRequest(
            *key, bytes(16), (), hashes, segments, TENSOR_BYTES, _LEASE_S, mapped=True
        )
        return hashes, [reserve, m.PublishRequest(*key, bytes(4 * BLOCKS))]


def measure(*, repeats: int) -> Iterator[Measurement]:
    """Yield the time of every kind of message that a load or a store of 8,192 tokens sends."""
    server = _Server()
    hashes, requests = server.store()
    for request in requests:
        server.serve(encode(request))
    [answer] = server.serve(encode(m.MatchRequest(*server.key(), hashes)))
    refs = decode_reply(answer).refs

    def acquire() -> list[m.Request]:
        key = server.key()
        lease = m.AcquireRequest(*key, refs, _LEASE_S, checksums=False)
        return [lease, m.ReleaseRequest(*key)]

    streams: dict[str, Callable[[], list[m.Request]]] = {
        "server/ping": lambda: [m.PingRequest(*server.key(), b"", 0)],
        "server/match": lambda: [m.MatchRequest(*server.key(), hashes)],
        "server/acquire, release": acquire,
        "server/reserve, publish": lambda: server.store()[1],
    }
    for name, make in streams.items():
        yield from _subject(name, server, make).measure(repeats)


def _subject(name: str, server: _Server, make: Callable[[], list[m.Request]]) -> Subject:
    answers: list[Any] = []

    def ours() -> float:
        wires = [encode(request) for _ in range(CALLS) for request in make()]
        found: list[bytes] = []
        seconds = timed(lambda: [found.extend(server.serve(wire)) for wire in wires])
        answers[:] = [(wires, [decode_reply(wire) for wire in found])]
        return seconds / len(wires)

    def codec() -> float:
        [(wires, replies)] = answers

        def work() -> None:
            for wire in wires:
                decode_request(wire)
            for reply in replies:
                encode(reply)

        return timed(work) / len(wires)

    return Subject(
        name, "tokens", TOKENS, ours, codec, unit="s", against="decoding and encoding alone"
    )
