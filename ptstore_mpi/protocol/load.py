"""load: acquire leases, fetch through store-owned memory, check the clock, copy out.

::

    lease    --> see `ptstore_mpi.protocol.lease`
    near     arena  ------------------------ unpack --> out     clock checked after the last byte
    far      arena == Get ==> staging ------ unpack --> out     (P12), per segment
    kept     arena == Get ==> replica's slot unpack --> out     then found by all of this node
    release  --> everybody who lent

Bytes are verified while they are copied. The result is the longest prefix of segments that were
all trusted; ``out`` beyond it is unspecified. Gets that outlive the deadline keep their staging
bytes until they end (P13).

Who wants to begin with the first layers hears how many tensors of the whole prefix are there. Near
parts are then copied in bands (see `ptstore_mpi.protocol.plan`), each of them judged by the clock.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ptstore_mpi.device_views import Views
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
from ptstore_mpi.protocol.lease import Leasing
from ptstore_mpi.protocol.messages import FilledRequest, LostRequest, ReleaseRequest
from ptstore_mpi.protocol.plan import Band, Fetch, Part, group, interleave, parts_of
from ptstore_mpi.protocol.times import ClientTimes
from ptstore_mpi.types import SegmentRef

__all__ = ["LEASE_MARGIN", "Loaded", "load"]

LEASE_MARGIN = 0.01
"""Share of a lease that is not used: clocks of two nodes may run at different speeds (P12)."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Trusted blocks of a load by source, and by whose memory; they follow the skipped ones.

    What had to be read from a file first is ``disk``, on whichever node.
    """

    blocks: dict[str, int]
    by_server: dict[int, int]
    reason: str

    @property
    def block_count(self) -> int:
        """All of them."""
        return sum(self.blocks.values())


@dataclass(slots=True, eq=False)
class _Load:
    """State of one load while it runs."""

    context: ClientContext
    leasing: Leasing
    whole: Band
    parts: list[Part]
    progress: Callable[[int], None] | None
    bands: Sequence[Band]
    told_count: int = 0
    waiting: deque[Fetch] = field(default_factory=deque)
    started: list[Fetch] = field(default_factory=list)
    by_token: dict[int, Fetch] = field(default_factory=dict)
    reason: str = "loaded"
    rma_bytes: int = 0
    used_rma_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        return self.whole.block_bytes


def load(
    context: ClientContext,
    refs: Sequence[SegmentRef],
    views: Views,
    *,
    namespace: bytes,
    tensor_bytes: tuple[int, ...],
    skip_blocks: int,
    until: float,
    progress: Callable[[int], None] | None = None,
    bands: Sequence[Band] = (),
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
    namespace
        Digest of its namespace.
    tensor_bytes
        Bytes of one block of each tensor.
    skip_blocks
        Leading blocks that the caller has already.
    until
        Deadline on the transport's clock, s.
    progress
        Called with the number of leading tensors of which all blocks are there and trusted, each
        time that there are more; never again once anything was not trusted.
    bands
        Runs of tensors in which near parts are copied; default: each part as a whole.
    """
    op = context.ledger.open()
    leasing = Leasing(context, op, until, namespace, tensor_bytes)
    whole = Band(views, len(tensor_bytes), 0, sum(tensor_bytes))
    state = _Load(context, leasing, whole, parts_of(refs, skip_blocks), progress, bands)
    try:
        started_s = 0.0 if context.times is None else (yield Now())
        yield from leasing.lease(state.parts)
        wanted = leasing.cut(state.parts)
        if len(wanted) < len(state.parts):
            state.bands = ()  # no tensor will be there as a whole, and whole parts count
        yield from _fetch(state, [part for part in wanted if part.is_granted])
        yield from _fetch(state, (yield from leasing.lease_waiting()))
        if context.times is not None:
            _measure(state, context.times, (yield Now()) - started_s)
        for server in sorted(leasing.servers):
            times = context.times.times if context.times and server in context.near else ()
            yield Send(server, ReleaseRequest(*context.ledger.key(op, server), times))
        return _result(state)
    finally:
        for fetch in state.started:
            if fetch.extent is not None:
                context.ledger.give_back(fetch.extent)
        context.ledger.close(op)
        context.count("rma_bytes", state.rma_bytes)
        context.count("discarded_bytes", state.rma_bytes - state.used_rma_bytes)


def _fetch(state: _Load, parts: list[Part]) -> Operation[None]:
    """Bring the longest prefix of these parts that is leased."""
    parts = list(itertools.takewhile(lambda part: part.is_granted, parts))
    near = state.context.near
    far = [part for part in parts if part.server not in near]
    fetches = group(far, state.leasing.tensor_bytes, state.context.config.get_bytes)
    state.waiting.extend(interleave(fetches))
    yield from _move(state, _copies(state, [part for part in parts if part.server in near]))
    _tell(state)


def _copies(state: _Load, parts: list[Part]) -> deque[tuple[Part, Band]]:
    """Return the copies of near parts, in their order.

    Checksums are those of whole blocks, so parts that have any are not copied in bands.
    """
    if len(state.bands) < 2:
        return deque((part, state.whole) for part in parts)
    copies = deque((part, state.whole) for part in parts if part.grant.checksums)
    banded = [part for part in parts if not part.grant.checksums]
    copies.extend((part, band) for band in state.bands for part in banded)
    return copies


def _move(state: _Load, direct: deque[tuple[Part, Band]]) -> Operation[None]:
    """Move all parts, Gets in flight and local copies in between, until done or late."""
    ledger = state.context.ledger
    while state.reason != "late":
        yield from _start_gets(state)
        if direct:
            part, band = direct.popleft()
            yield from _copy_out(state, part, part.arena_image(band), band)
            state.context.count("local_bytes", part.block_count * band.block_bytes)
            if not direct or direct[0][1].end > band.end:
                _tell(state)
            if not ledger.transfer_count:
                continue
        elif not state.by_token and not state.waiting:
            return
        done = yield AwaitTokens(0.0 if direct else state.leasing.until)
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
        if fetch.extent is None and not fetch.is_kept:
            fetch.extent = ledger.borrow(fetch.nbytes)
            if fetch.extent is None:
                assert ledger.transfer_count, "staging is too small for one fetch"
                return
            state.started.append(fetch)
        piece = fetch.pieces_left.pop(0)
        server = fetch.parts[0].server
        into, start = fetch.target
        token = yield StartGet(server, piece.offset, into, start + piece.start, piece.nbytes)
        touched = (server,) if into is None else (server, into)
        ledger.start(token, Transfer(state.leasing.op, touched, fetch.extent))
        state.by_token[token] = fetch
        fetch.in_flight_count += 1
        state.rma_bytes += piece.nbytes
        if not fetch.pieces_left:
            state.waiting.popleft()


def _land(state: _Load, fetch: Fetch) -> Operation[None]:
    """Copy out a fetch that has arrived; let its staging bytes go, or its replicas be found."""
    for part, image in fetch.images(state.block_bytes):
        yield from _copy_out(state, part, image, state.whole)
    if fetch.extent is not None:
        state.context.ledger.give_back(fetch.extent)
        fetch.extent = None
    if fetch.is_kept:
        yield from _publish_replicas(state, [part for part in fetch.parts if part.trusted])


def _publish_replicas(state: _Load, parts: list[Part]) -> Operation[None]:
    """Tell who keeps them that these slots are filled, each with all of its bytes (P17)."""
    for keeper, group_ in itertools.groupby(parts, lambda part: part.slot and part.slot[0]):
        kept = list(group_)
        assert keeper is not None
        yield Send(
            keeper,
            FilledRequest(
                *state.context.ledger.key(state.leasing.op, keeper),
                tuple(part.ref for part in kept),
                b"".join(part.grant.hashes for part in kept),
                b"".join(part.grant.checksums for part in kept),
            ),
        )


def _copy_out(state: _Load, part: Part, image: Image, band: Band) -> Operation[None]:
    """Unpack a part; trust it if its lease still held after its last byte and the bytes are right.

    A part that comes in bands is trusted after the last of them; one that is late ends the load.
    Bytes read after the lease (P12) may be others by now: wrong ones are then nobody's fault.
    """
    sums = part.grant.checksums
    found: Checksums = yield Unpack(band.views, part.view_block, image, checksums=bool(sums))
    if not (yield from _is_in_time(part)):
        state.reason = "late"
        return
    if found is not None:
        first, end = 4 * part.first_block, 4 * (part.first_block + part.block_count)
        if found.tobytes() != sums[first:end]:
            state.reason = "corrupt"
            state.context.count("corrupt_count", 1)
            key = state.context.ledger.key(state.leasing.op, part.server)
            yield Send(part.server, LostRequest(*key, part.ref))
            return
    part.tensor_count = band.end
    part.trusted = band.end == state.whole.end


def _tell(state: _Load) -> None:
    """Say how many leading tensors of the whole load are there, if there are more by now."""
    if state.progress is None or state.reason != "loaded":
        return
    count = min((part.tensor_count for part in state.parts), default=0)
    if count > state.told_count:
        state.told_count = count
        state.progress(count)


def _is_in_time(part: Part) -> Operation[bool]:
    now = yield Now()
    return bool(now - part.sent_s < (1 - LEASE_MARGIN) * part.granted_s)


def _measure(state: _Load, times: ClientTimes, seconds: float) -> None:
    """Take note of how long a load took that brought everything."""
    if all(part.trusted for part in state.parts):
        nbytes: Counter[str] = Counter()
        for part in state.parts:
            nbytes[_source(part, state.context)] += part.block_count * state.block_bytes
        times.loaded(nbytes, seconds)


def _result(state: _Load) -> Loaded:
    blocks = dict.fromkeys(("owned", "replica", "remote", "disk"), 0)
    trusted = list(itertools.takewhile(lambda part: part.trusted, state.parts))
    by_server: Counter[int] = Counter()
    for part in trusted:
        blocks[_source(part, state.context)] += part.block_count
        by_server[part.server] += part.block_count
    near = state.context.near
    crossed = sum(part.block_count for part in trusted if part.server not in near)
    state.used_rma_bytes = crossed * state.block_bytes
    complete = len(trusted) == len(state.parts)
    if not complete and state.reason == "loaded":  # the first that is missing was not leased
        state.reason = "late" if state.leasing.late else "gone"
    return Loaded(blocks, dict(by_server), "loaded" if complete else state.reason)


def _source(part: Part, context: ClientContext) -> str:
    if part.grant.from_disk:
        return "disk"
    if part.server not in context.near:
        return "remote"
    return "owned" if part.server == part.owner else "replica"
