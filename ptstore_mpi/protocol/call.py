"""Request and reply: ask several servers at once, collect until a deadline, ask again if silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ptstore_mpi.protocol.context import ClientContext
from ptstore_mpi.protocol.effects import AwaitTokens, Now, Operation, Receive, Send
from ptstore_mpi.protocol.messages import (
    REPLY_TO,
    AcquireRequest,
    AwaitRequest,
    Reply,
    Request,
    ReserveRequest,
)
from ptstore_mpi.types import ServerIndex

__all__ = ["Called", "call"]


@dataclass(frozen=True, slots=True)
class Called:
    """A reply, and when the attempt that it answers was sent (P12)."""

    reply: Reply
    sent_s: float


def call(
    context: ClientContext, requests: Mapping[ServerIndex, Request], until: float
) -> Operation[dict[ServerIndex, Called]]:
    """Send one request to each server and return the replies that came before ``until``.

    All requests belong to one operation. A silent server is asked again every ``retry_s``, with
    the same ``op`` and the next ``attempt``; a reply to any attempt counts, from the time that
    very attempt was sent. Replies to other requests are stale and are dropped.
    """
    if context.ledger.transfer_count:
        # All are left over from earlier operations, and hold the watermark back until noticed.
        context.ledger.finish((yield AwaitTokens(0.0)))
    waiting = dict(requests)
    sent_s: dict[tuple[ServerIndex, int], float] = {}
    called: dict[ServerIndex, Called] = {}
    op = next(iter(requests.values())).op if requests else 0
    while waiting:
        now = yield Now()
        if now >= until and sent_s:
            break
        attempt = context.ledger.next_attempt(op)  # an operation may ask one server twice
        for server, request in waiting.items():
            changes: dict[str, Any] = {"low": context.ledger.key(request.op, server)[3]}
            if isinstance(request, AcquireRequest | AwaitRequest | ReserveRequest):
                changes["remaining_s"] = max(until - now, 0.0)  # what is left by now (P11)
            sent_s[server, attempt] = yield Now()
            yield Send(server, msgspec.structs.replace(request, attempt=attempt, **changes))
        retry_at = min(until, now + context.config.retry_s)
        while waiting:
            reply: Reply | None = yield Receive(retry_at)
            if reply is None:
                break
            server = ServerIndex(reply.server)
            request_sent = waiting.get(server)
            if (
                request_sent is None
                or reply.op != request_sent.op
                or not isinstance(reply, REPLY_TO[type(request_sent)])
                or (server, reply.attempt) not in sent_s
            ):
                continue
            called[server] = Called(reply, sent_s[server, reply.attempt])
            del waiting[server]
    return called
