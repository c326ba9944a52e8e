"""match: the one-shot query for the longest common prefix, by broadcast and reduce."""

from __future__ import annotations

from dataclasses import dataclass

from ptstore_mpi.protocol.call import call
from ptstore_mpi.protocol.context import ClientContext
from ptstore_mpi.protocol.effects import Operation
from ptstore_mpi.protocol.messages import MatchReply, MatchRequest
from ptstore_mpi.types import BlockHashes, SegmentRef, ServerIndex, segment_owner

__all__ = ["Found", "cut", "match_broadcast"]


@dataclass(frozen=True, slots=True)
class Found:
    """The longest record, and what the servers said besides.

    ``partial`` is true where a server did not answer: the match is usable, but whoever stores
    after it could duplicate (P9).
    """

    refs: tuple[SegmentRef, ...]
    partial: bool
    free_bytes: dict[ServerIndex, int]

    @property
    def block_count(self) -> int:
        """Depth of the match in blocks."""
        return sum(ref.block_count for ref in self.refs)


def match_broadcast(
    context: ClientContext, hashes: BlockHashes, until: float, *, is_use: bool = True
) -> Operation[Found]:
    """Ask every server in parallel for its deepest match and return the deepest of all.

    Every server answers with the flat record of the deepest block it owns; the reduction takes
    the longest, and among equals the one with most bytes on this client's node, then the lowest
    server. ``is_use`` as in `MatchRequest`.
    """
    if not len(hashes):
        return Found((), partial=False, free_bytes={})
    op = context.ledger.open()
    try:
        payload = hashes.tobytes()
        requests = {
            server: MatchRequest(*context.ledger.key(op, server), payload, is_use)
            for server in context.servers
        }
        called = yield from call(context, requests, until)
    finally:
        context.ledger.close(op)
    replies = [answer.reply for answer in called.values() if isinstance(answer.reply, MatchReply)]
    free_bytes = {ServerIndex(reply.server): reply.free_bytes for reply in replies}
    best: tuple[SegmentRef, ...] = ()
    best_rank = (0, 0, 0)
    for reply in replies:
        depth = sum(ref.block_count for ref in reply.refs)
        near = sum(
            ref.block_count for ref in reply.refs if segment_owner(ref.segment) in context.near
        )
        rank = (depth, near, -reply.server)
        if depth and rank > best_rank:
            best, best_rank = reply.refs, rank
    return Found(best, partial=len(replies) < context.server_count, free_bytes=free_bytes)


def cut(
    refs: tuple[SegmentRef, ...], block_count: int, hashes: BlockHashes
) -> tuple[SegmentRef, ...]:
    """Return ``refs`` cut to the first ``block_count`` blocks of the prompt ``hashes`` describe."""
    kept: list[SegmentRef] = []
    depth = 0
    for ref in refs:
        take = min(ref.block_count, block_count - depth)
        if take <= 0:
            break
        depth += take
        kept.append(
            ref
            if take == ref.block_count
            else SegmentRef(ref.segment, take, hashes[depth - 1].tobytes())
        )
    return tuple(kept)
