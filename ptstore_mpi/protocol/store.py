"""store: keep the increment of a prompt beyond what is known, visible in one step.

::

    match -> place -> reserve -+- near: pack into the arena ------------------+-> publish
                               `- far:  pack into staging, send to the owner -'

Nothing is visible before ``publish``; a store that fails, stalls or is abandoned leaves bytes
that only the owner's rules P3 and P6 free again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptstore_mpi.device_views import Views
from ptstore_mpi.errors import CapacityError
from ptstore_mpi.protocol.call import call
from ptstore_mpi.protocol.context import ClientContext, Extent, Transfer
from ptstore_mpi.protocol.effects import (
    AwaitTokens,
    Checksums,
    Image,
    Now,
    Operation,
    Pack,
    StartWrite,
)
from ptstore_mpi.protocol.match import cut, match_broadcast
from ptstore_mpi.protocol.messages import PublishRequest, ReserveReply, ReserveRequest, WriteReply
from ptstore_mpi.protocol.placement import place
from ptstore_mpi.types import BlockHashes, SegmentRef, ServerIndex

__all__ = ["Increment", "Stored", "store"]


@dataclass(frozen=True, slots=True, eq=False)
class Increment:
    """What a client wants to be known.

    Attributes
    ----------
    namespace
        Digest of its namespace.
    hashes
        Chained hashes of all whole blocks of the prompt.
    views
        Where block ``i`` of the prompt is: block ``i`` of every view.
    tensor_bytes
        Bytes of one block of each tensor.
    segment_blocks
        Blocks of a full segment.
    """

    namespace: bytes
    hashes: BlockHashes
    views: Views
    tensor_bytes: tuple[int, ...]
    segment_blocks: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Outcome of a store: blocks newly visible, and the reason where there are none."""

    block_count: int
    reason: str


def store(
    context: ClientContext, increment: Increment, *, verified_blocks: int, until: float
) -> Operation[Stored]:
    """Store the blocks beyond the longest known prefix.

    Parameters
    ----------
    context
        This client.
    increment
        The prompt and its KV.
    verified_blocks
        Depth that the caller's load verified: a match beyond it is not trusted as a base (P8).
    until
        Deadline on the transport's clock, s.

    Raises
    ------
    CapacityError
        The increment is larger than an arena; nothing was written.
    """
    outcome = Stored(0, "gone")
    for _ in range(2):  # a parent that went meanwhile: match again, once (P7)
        now = yield Now()
        match_until = min(until, now + context.config.match_timeout_s)
        found = yield from match_broadcast(context, increment.hashes, match_until, is_use=False)
        if found.partial:
            return Stored(0, "partial")
        base = min(found.block_count, verified_blocks)
        if base >= len(increment.hashes):
            return Stored(0, "known")
        ancestors = cut(found.refs, base, increment.hashes)
        server = place(
            context.config.placement,
            increment.hashes[base].tobytes(),
            server_count=context.server_count,
            near=context.near,
            free_bytes=found.free_bytes,
        )
        outcome = yield from _store_at(
            context, increment, base, ancestors, server=server, until=until
        )
        if outcome.reason != "gone":
            break
    return outcome


def _store_at(
    context: ClientContext,
    increment: Increment,
    base: int,
    ancestors: tuple[SegmentRef, ...],
    *,
    server: ServerIndex,
    until: float,
) -> Operation[Stored]:
    """Reserve, write and publish the blocks from ``base`` on at ``server``."""
    block_bytes = sum(increment.tensor_bytes)
    new_blocks = len(increment.hashes) - base
    if new_blocks * block_bytes > context.config.arena_bytes:
        raise CapacityError(
            f"the increment needs {new_blocks * block_bytes} bytes ({new_blocks} blocks of "
            f"{block_bytes}), an arena holds {context.config.arena_bytes}"
        )
    whole, rest = divmod(new_blocks, increment.segment_blocks)
    counts = (increment.segment_blocks,) * whole + ((rest,) if rest else ())
    op = context.ledger.open()
    settled = False
    try:
        reserve = ReserveRequest(
            *context.ledger.key(op, server),
            increment.namespace,
            ancestors,
            increment.hashes[base:].tobytes(),
            counts,
            increment.tensor_bytes,
            remaining_s=0.0,  # set at each sending
            mapped=server in context.near,
        )
        called = yield from call(context, {server: reserve}, until)
        answer = called.get(server)
        if answer is not None and isinstance(answer.reply, ReserveReply):
            if answer.reply.status != "reserved":
                settled = True
                return Stored(0, answer.reply.status)
            checksums = yield from _write(
                context,
                increment,
                base,
                op=op,
                server=server,
                images=list(zip(answer.reply.offsets, counts, strict=True)),
                until=until,
            )
            if checksums is not None:
                publish = PublishRequest(*context.ledger.key(op, server), checksums)
                called = yield from call(context, {server: publish}, until)
                answer = called.get(server)
                if answer is not None and isinstance(answer.reply, WriteReply):
                    settled = True
                    stored = answer.reply.status == "published"
                    return Stored(
                        new_blocks if stored else 0, "stored" if stored else answer.reply.status
                    )
        return Stored(0, "late")
    finally:
        if not settled:
            context.abandoned.append((server, op))
        context.ledger.close(op)


def _write(
    context: ClientContext,
    increment: Increment,
    base: int,
    *,
    op: int,
    server: ServerIndex,
    images: list[tuple[int, int]],
    until: float,
) -> Operation[bytes | None]:
    """Write the segments at ``images`` (offset, blocks); return checksums, None when late."""
    block_bytes = sum(increment.tensor_bytes)
    checksums: list[bytes] = []
    tokens: set[int] = set()
    view_block = base
    for offset, blocks in images:
        if (yield Now()) >= until:
            return None
        if server in context.near:
            image = Image(server, offset, blocks, 0, blocks)
            checksums.append((yield from _pack(context, increment, view_block, image)))
            context.count("stored_local_bytes", blocks * block_bytes)
        else:
            extent = yield from _borrow(context, blocks * block_bytes, tokens, until=until)
            if extent is None:
                return None
            try:
                image = Image(None, extent.offset, blocks, 0, blocks)
                checksums.append((yield from _pack(context, increment, view_block, image)))
                token = yield StartWrite(server, op, extent.offset, blocks * block_bytes)
                context.ledger.start(token, Transfer(op, (server,), extent))
            finally:
                context.ledger.give_back(extent)
            tokens.add(token)
            context.count("stored_sent_bytes", blocks * block_bytes)
        view_block += blocks
    while tokens:
        done = yield AwaitTokens(until)
        if not done:
            return None
        context.ledger.finish(done)
        tokens.difference_update(done)
    return b"".join(checksums)


def _pack(
    context: ClientContext, increment: Increment, view_block: int, image: Image
) -> Operation[bytes]:
    """Fill an image from the views; return its checksums, empty where nobody verifies."""
    wanted = context.config.verify != "off"
    sums: Checksums = yield Pack(increment.views, view_block, image, checksums=wanted)
    return b"" if sums is None else sums.tobytes()


def _borrow(
    context: ClientContext, nbytes: int, tokens: set[int], *, until: float
) -> Operation[Extent | None]:
    """Take staging bytes, waiting for transfers to end where there is no room; None when late."""
    while True:
        extent = context.ledger.borrow(nbytes)
        if extent is not None or not context.ledger.transfer_count:
            return extent
        done = yield AwaitTokens(until)
        if not done:
            return None
        context.ledger.finish(done)
        tokens.difference_update(done)
