"""load: acquire leases, fetch through store-owned memory, check the clock, copy out.

::

    acquire  --> every owner in parallel: leases on a prefix of what it was asked for
    near     arena  ------------------------ unpack --> out     clock checked after the last byte
    far      arena == Get ==> staging ------ unpack --> out     (P12), per segment
    release  --> every owner

Bytes are verified while they are copied. The result is the longest prefix of segments that were
all trusted; ``out`` beyond it is unspecified. Gets that outlive the deadline keep their staging
bytes until they end (P13).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ptstore_mpi.device_views import Views
from ptstore_mpi.protocol.call import Called, call
from ptstore_mpi.protocol.context import ClientContext, Transfer
from ptstore_mpi.protocol.effects import (
    AwaitTokens,
    Checksums,
    Image,
    Now,
    Operation,
    Send,
    StartGet,
    Unpack,
)
from ptstore_mpi.protocol.messages import (
    AcquireReply,
    AcquireRequest,
    Grant,
    LostRequest,
    ReleaseRequest,
)
from ptstore_mpi.protocol.plan import Fetch, Part, group, interleave, parts_of
from ptstore_mpi.types import SegmentRef, ServerIndex

__all__ = ["LEASE_MARGIN", "Loaded", "load"]

LEASE_MARGIN = 0.01
"""Share of a lease that is not used: clocks of two nodes may run at different speeds (P12)."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Trusted blocks of a load by where they came from; they follow the skipped ones."""

    near_blocks: int
    far_blocks: int
    reason: str


@dataclass(slots=True, eq=False)
class _Load:
    """State of one load while it runs."""

    context: ClientContext
    op: int
    views: Views
    tensor_bytes: tuple[int, ...]
    until: float
    parts: list[Part] = field(default_factory=list)
    waiting: deque[Fetch] = field(default_factory=deque)
    started: list[Fetch] = field(default_factory=list)
    by_token: dict[int, Fetch] = field(default_factory=dict)
    reason: str = "loaded"
    rma_bytes: int = 0
    used_rma_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        return sum(self.tensor_bytes)


def load(
    context: ClientContext,
    refs: Sequence[SegmentRef],
    views: Views,
    *,
    tensor_bytes: tuple[int, ...],
    skip_blocks: int,
    until: float,
) -> Operation[Loaded]:
    """Bring the blocks of ``refs`` beyond the first ``skip_blocks`` into ``views``.

    Parameters
    ----------
    context
        This client.
    refs
        Flat record of the prefix, from a match.
    views
        Where block ``i`` of the prefix goes: block ``i`` of every view.
    tensor_bytes
        Bytes of one block of each tensor.
    skip_blocks
        Leading blocks that the caller has already.
    until
        Deadline on the transport's clock, s.
    """
    op = context.ledger.open()
    state = _Load(context, op, views, tensor_bytes, until)
    try:
        wanted = parts_of(refs, skip_blocks)
        called = yield from _acquire(state, wanted)
        far = [part for part in state.parts if part.server not in context.near]
        state.waiting.extend(interleave(group(far, tensor_bytes, context.config.get_bytes)))
        direct = deque(part for part in state.parts if part.server in context.near)
        yield from _move(state, direct)
        for server in called:
            yield Send(server, ReleaseRequest(*context.ledger.key(op, server)))
        return _result(state, complete=len(state.parts) == len(wanted))
    finally:
        for fetch in state.started:
            if fetch.extent is not None:
                context.ledger.give_back(fetch.extent)
        context.ledger.close(op)
        context.count("rma_bytes", state.rma_bytes)
        context.count("discarded_bytes", state.rma_bytes - state.used_rma_bytes)


def _acquire(state: _Load, wanted: list[Part]) -> Operation[dict[ServerIndex, Called]]:
    """Lease what is wanted; ``state.parts`` becomes the prefix that was granted."""
    context = state.context
    asked: dict[ServerIndex, list[SegmentRef]] = {}
    for part in wanted:
        asked.setdefault(part.server, []).append(part.ref)
    requests = {
        server: AcquireRequest(
            *context.ledger.key(state.op, server),
            tuple(refs),
            remaining_s=0.0,  # set at each sending
            checksums=context.config.verify == "always"
            or (context.config.verify == "remote" and server not in context.near),
        )
        for server, refs in asked.items()
    }
    called = yield from call(context, requests, state.until)
    grants: dict[ServerIndex, Iterator[Grant]] = {
        server: iter(answer.reply.grants)
        for server, answer in called.items()
        if isinstance(answer.reply, AcquireReply)
    }
    for part in wanted:
        if part.server not in grants:
            state.reason = "late"
            break
        grant = next(grants[part.server], None)
        if grant is None:
            state.reason = "gone"
            break
        answer = called[part.server]
        assert isinstance(answer.reply, AcquireReply)
        part.grant, part.sent_s, part.granted_s = grant, answer.sent_s, answer.reply.granted_s
        state.parts.append(part)
    return called


def _move(state: _Load, direct: deque[Part]) -> Operation[None]:
    """Move all parts, Gets in flight and local copies in between, until done or late."""
    ledger = state.context.ledger
    while state.reason != "late":
        yield from _start_gets(state)
        if direct:
            part = direct.popleft()
            yield from _copy_out(state, part, part.arena_image())
            state.context.count("local_bytes", part.block_count * state.block_bytes)
            if not ledger.transfer_count:
                continue
        elif not state.by_token and not state.waiting:
            return
        done = yield AwaitTokens(0.0 if direct else state.until)
        ledger.finish(done)
        for token in done:
            fetch = state.by_token.pop(token, None)  # None: left over from an earlier load
            if fetch is not None:
                fetch.in_flight_count -= 1
                if not fetch.in_flight_count and not fetch.pieces_left:
                    yield from _land(state, fetch)
        if not done and not direct:
            state.reason = "late"


def _start_gets(state: _Load) -> Operation[None]:
    """Start Gets while staging room and the limit of Gets in flight allow."""
    context, ledger = state.context, state.context.ledger
    while state.waiting and ledger.transfer_count < context.config.gets_in_flight_count:
        fetch = state.waiting[0]
        if fetch.extent is None:
            fetch.extent = ledger.borrow(fetch.nbytes)
            if fetch.extent is None:
                assert ledger.transfer_count, "staging is too small for one fetch"
                return
            state.started.append(fetch)
        piece = fetch.pieces_left.pop(0)
        server = fetch.parts[0].server
        token = yield StartGet(
            server, piece.offset, fetch.extent.offset + piece.staging_start, piece.nbytes
        )
        ledger.start(token, Transfer(state.op, server, fetch.extent))
        state.by_token[token] = fetch
        fetch.in_flight_count += 1
        state.rma_bytes += piece.nbytes
        if not fetch.pieces_left:
            state.waiting.popleft()


def _land(state: _Load, fetch: Fetch) -> Operation[None]:
    """Copy out a fetch that has arrived, then let its staging bytes go."""
    for part, image in fetch.staged_images(state.block_bytes):
        yield from _copy_out(state, part, image)
    assert fetch.extent is not None
    state.context.ledger.give_back(fetch.extent)
    fetch.extent = None


def _copy_out(state: _Load, part: Part, image: Image) -> Operation[None]:
    """Unpack a part; trust it if its lease still held after its last byte and the bytes are right.

    Bytes read after the lease (P12) may be others by now: wrong ones are then nobody's fault.
    """
    sums = part.grant.checksums
    found: Checksums = yield Unpack(state.views, part.view_block, image, checksums=bool(sums))
    if not (yield from _is_in_time(part)):
        state.reason = "late"
        return
    if found is not None:
        first, end = 4 * part.first_block, 4 * (part.first_block + part.block_count)
        if found.tobytes() != sums[first:end]:
            state.reason = "corrupt"
            state.context.count("corrupt_count", 1)
            key = state.context.ledger.key(state.op, part.server)
            yield Send(part.server, LostRequest(*key, part.ref))
            return
    part.trusted = True


def _is_in_time(part: Part) -> Operation[bool]:
    now = yield Now()
    return bool(now - part.sent_s < (1 - LEASE_MARGIN) * part.granted_s)


def _result(state: _Load, *, complete: bool) -> Loaded:
    near = far = 0
    for part in state.parts:
        if not part.trusted:
            complete = False
            break
        if part.server in state.context.near:
            near += part.block_count
        else:
            far += part.block_count
    state.used_rma_bytes = far * state.block_bytes
    return Loaded(near, far, "loaded" if complete else state.reason)
