"""Operations on the servers themselves: clear, drop a leaf, read counters, ping, leave."""

from __future__ import annotations

from ptstore_mpi.protocol.call import call
from ptstore_mpi.protocol.context import ClientContext
from ptstore_mpi.protocol.effects import AwaitTokens, Operation, Receive, Send
from ptstore_mpi.protocol.messages import (
    AbandonRequest,
    ByeRequest,
    ClearRequest,
    CountReply,
    DropRequest,
    PingRequest,
    StatsReply,
    StatsRequest,
)
from ptstore_mpi.types import BalanceDecision, SegmentRef, ServerIndex, segment_owner

__all__ = [
    "abandon_unsettled",
    "bye",
    "clear",
    "drain",
    "drop",
    "ping",
    "server_counters",
    "server_decisions",
]


def clear(context: ClientContext, namespace: bytes, until: float) -> Operation[int | None]:
    """Forget a namespace on every server; return the segments removed, None if one was silent."""
    op = context.ledger.open()
    try:
        requests = {
            server: ClearRequest(*context.ledger.key(op, server), namespace)
            for server in context.servers
        }
        called = yield from call(context, requests, until)
    finally:
        context.ledger.close(op)
    counts = [a.reply.count for a in called.values() if isinstance(a.reply, CountReply)]
    return sum(counts) if len(counts) == context.server_count else None


def drop(context: ClientContext, ref: SegmentRef, until: float) -> Operation[bool | None]:
    """Drop one leaf segment; False where it is gone or has children, None without an answer."""
    op = context.ledger.open()
    server = segment_owner(ref.segment)
    try:
        request = DropRequest(*context.ledger.key(op, server), ref)
        called = yield from call(context, {server: request}, until)
    finally:
        context.ledger.close(op)
    answer = called.get(server)
    if answer is None or not isinstance(answer.reply, CountReply):
        return None
    return answer.reply.count == 1


def server_counters(
    context: ClientContext, until: float
) -> Operation[dict[ServerIndex, dict[str, int]]]:
    """Return the counters of every server that answers."""
    replies = yield from _stats(context, until)
    return {server: reply.counters for server, reply in replies.items()}


def server_decisions(
    context: ClientContext, until: float
) -> Operation[dict[ServerIndex, list[BalanceDecision]]]:
    """Return what every server that answers decided of late about its share for replicas."""
    replies = yield from _stats(context, until, decisions=True)
    return {server: list(reply.decisions) for server, reply in replies.items()}


def _stats(
    context: ClientContext, until: float, *, decisions: bool = False
) -> Operation[dict[ServerIndex, StatsReply]]:
    op = context.ledger.open()
    try:
        requests = {
            server: StatsRequest(*context.ledger.key(op, server), decisions)
            for server in context.servers
        }
        called = yield from call(context, requests, until)
    finally:
        context.ledger.close(op)
    return {
        server: answer.reply
        for server, answer in called.items()
        if isinstance(answer.reply, StatsReply)
    }


def ping(
    context: ClientContext, payload: bytes, *, reply_bytes: int, count: int, until: float
) -> Operation[bool]:
    """Ask every server ``count`` times for ``reply_bytes`` bytes, all in flight at once.

    Return whether all have answered. Nothing is asked again.
    """
    op = context.ledger.open()
    waiting = {(server, attempt) for server in context.servers for attempt in range(count)}
    try:
        for attempt in range(count):
            for server in context.servers:
                key = context.ledger.key(op, server, attempt)
                yield Send(server, PingRequest(*key, payload, reply_bytes))
        while waiting:
            reply = yield Receive(until)
            if reply is None:
                return False
            if reply.op == op:
                waiting.discard((reply.server, reply.attempt))
    finally:
        context.ledger.close(op)
    return True


def abandon_unsettled(context: ClientContext) -> Operation[None]:
    """Tell the owners of writes that ended without an answer that these were given up.

    The watermark in the message frees the region, unless data of it is still in flight.
    """
    while context.abandoned:
        server, op = context.abandoned.pop()
        yield Send(server, AbandonRequest(*context.ledger.key(op, server)))


def drain(context: ClientContext, until: float) -> Operation[bool]:
    """Wait for every transfer that earlier operations left in flight; False when late."""
    while context.ledger.transfer_count:
        done = yield AwaitTokens(until)
        if not done:
            return False
        context.ledger.finish(done)
    return True


def bye(context: ClientContext) -> Operation[None]:
    """Leave every server: whatever this client holds there is freed. No answer is awaited."""
    for server in context.servers:
        yield Send(server, ByeRequest(*context.ledger.key(context.ledger.open(), server)))
