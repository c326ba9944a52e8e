"""Plan of a load: which bytes of which segment go where, as few contiguous Gets as possible.

A *part* is what one segment contributes to a load. Parts that cross a wire are grouped into
*fetches*: neighbours in the prefix whose images are also neighbours in one arena become one
staging extent and, if whole, one Get. A part whose replica is to be kept lands in the slot of
that replica instead, and fetches of slots are neighbours there too.

Where somebody waits for the first tensors, parts of this node are copied in *bands*: consecutive
tensors of all parts, then the next ones. A band of a segment image is an image at a later offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ptstore_mpi.device_views import Views
from ptstore_mpi.protocol.context import Extent
from ptstore_mpi.protocol.effects import Image
from ptstore_mpi.protocol.messages import Grant
from ptstore_mpi.types import SegmentRef, ServerIndex, segment_owner

__all__ = [
    "NO_GRANT",
    "Band",
    "Fetch",
    "Part",
    "Piece",
    "band_ends",
    "bands_of",
    "group",
    "interleave",
    "parts_of",
]

NO_GRANT = Grant(0, 0, b"")
"""Of a part that nobody has leased yet."""

BAND_BYTES = 2 << 20
"""Bytes that a load copies at least before it says how far it is; below, saying is what costs."""

COPY_BYTES = 1 << 20
"""Bytes of a band in one segment, but of the first band: the core copies fewer half as fast."""

BAND_COUNT = 16
"""Bands of a load, at most."""


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive tensors up to ``end``, in views of their own.

    Of one block, ``block_bytes`` are theirs and ``before_bytes`` those of the tensors before them.
    """

    views: Views
    end: int
    before_bytes: int
    block_bytes: int


@dataclass(slots=True, eq=False)
class Part:
    """Blocks ``first_block .. first_block + block_count`` of one segment, for ``view_block`` on.

    ``server`` is whose arena it is read from: its owner's, or that of a replica. ``slot`` is where
    a replica of it is to be kept: the server of this node, and the offset in its arena;
    ``is_awaited``: another client of this node is fetching it. ``tensor_count`` leading tensors of
    it are in place and trusted; it is ``trusted`` itself when all are.
    """

    ref: SegmentRef
    server: ServerIndex
    first_block: int
    block_count: int
    view_block: int
    grant: Grant = NO_GRANT
    sent_s: float = 0.0
    granted_s: float = 0.0
    slot: tuple[ServerIndex, int] | None = None
    is_awaited: bool = False
    tensor_count: int = 0
    trusted: bool = False

    @property
    def owner(self) -> ServerIndex:
        """Server that owns the segment."""
        return segment_owner(self.ref.segment)

    @property
    def is_granted(self) -> bool:
        """Whether a lease on it is held."""
        return self.grant is not NO_GRANT

    @property
    def is_whole(self) -> bool:
        """Whether every block of the segment is wanted."""
        return self.first_block == 0 and self.block_count == self.grant.segment_blocks

    def arena_image(self, band: Band) -> Image:
        """Return the image of a band of the part in the arena it is read from."""
        return Image(
            self.server,
            self.grant.offset + self.grant.segment_blocks * band.before_bytes,
            self.grant.segment_blocks,
            self.first_block,
            self.block_count,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """One contiguous Get; ``start`` is relative to where its fetch lands."""

    offset: int
    start: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Fetch:
    """Consecutive parts that travel together, into one staging extent or neighbouring slots."""

    parts: list[Part]
    nbytes: int
    extent: Extent | None = None
    pieces_left: list[Piece] = field(default_factory=list)
    in_flight_count: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether it lands in slots of replicas, not in staging memory."""
        return self.parts[0].slot is not None

    @property
    def target(self) -> tuple[ServerIndex | None, int]:
        """Where it lands: a server of this node or None for staging, and the offset there."""
        if self.parts[0].slot is not None:
            return self.parts[0].slot
        assert self.extent is not None, "no staging memory was borrowed for a fetch"
        return None, self.extent.offset

    def images(self, block_bytes: int) -> Iterator[tuple[Part, Image]]:
        """Yield each part with its compact image where it landed."""
        into, offset = self.target
        for part in self.parts:
            yield part, Image(into, offset, part.block_count, 0, part.block_count)
            offset += part.block_count * block_bytes


def parts_of(refs: Iterable[SegmentRef], skip_blocks: int) -> list[Part]:
    """Return the parts of a record beyond its first ``skip_blocks`` blocks."""
    parts: list[Part] = []
    depth = 0
    for ref in refs:
        first = min(max(skip_blocks - depth, 0), ref.block_count)
        if first < ref.block_count:
            parts.append(
                Part(ref, segment_owner(ref.segment), first, ref.block_count - first, depth + first)
            )
        depth += ref.block_count
    return parts


def band_ends(tensor_bytes: Sequence[int], refs: Iterable[SegmentRef], skip: int) -> list[int]:
    """Return where the bands of a load end, among the tensors of a layout.

    A band is whole pairs, the key and the value of a layer, of `BAND_BYTES` at least. The first is
    as small as may be; the others are about equal, `BAND_COUNT` in all at most.

    Parameters
    ----------
    tensor_bytes
        Bytes of one block of each tensor.
    refs, skip
        What is loaded, and its leading blocks that are not.
    """
    parts = parts_of(refs, skip)
    block_count = sum(part.block_count for part in parts)
    left = sum(tensor_bytes) * block_count
    least = BAND_BYTES
    later = max(BAND_BYTES, COPY_BYTES * len(parts), -(-left // (BAND_COUNT - 1)))
    ends: list[int] = []
    nbytes = 0
    for end in range(2, len(tensor_bytes), 2):
        pair_bytes = sum(tensor_bytes[end - 2 : end]) * block_count
        nbytes += pair_bytes
        left -= pair_bytes
        if nbytes >= least and left >= BAND_BYTES:
            ends.append(end)
            nbytes, least = 0, later
    return [*ends, len(tensor_bytes)]


def bands_of(runs: Iterable[tuple[int, Views]], tensor_bytes: Sequence[int]) -> list[Band]:
    """Return the bands with these ends and views."""
    bands: list[Band] = []
    first = 0
    for end, views in runs:
        before, own = sum(tensor_bytes[:first]), sum(tensor_bytes[first:end])
        bands.append(Band(views, end, before, own))
        first = end
    return bands


def group(parts: Sequence[Part], tensor_bytes: Sequence[int], get_bytes: int) -> list[Fetch]:
    """Group parts into fetches, with the Gets of each.

    Parameters
    ----------
    parts
        Granted parts in prefix order.
    tensor_bytes
        Bytes of one block of each tensor.
    get_bytes
        Largest single Get.
    """
    block_bytes = sum(tensor_bytes)
    fetches: list[Fetch] = []
    previous: Part | None = None
    for part in parts:
        nbytes = part.block_count * block_bytes
        if (
            previous is not None
            and _are_neighbours(previous, part, block_bytes)
            and fetches[-1].nbytes + nbytes <= get_bytes
        ):
            fetches[-1].parts.append(part)
            fetches[-1].nbytes += nbytes
        else:
            fetches.append(Fetch([part], nbytes))
        previous = part
    for fetch in fetches:
        fetch.pieces_left = _pieces(fetch.parts, tensor_bytes, get_bytes)
    return fetches


def _are_neighbours(one: Part, other: Part, block_bytes: int) -> bool:
    """Tell whether two parts can be read as one, and land as one."""
    if one.server != other.server or not (one.is_whole and other.is_whole):
        return False
    nbytes = one.block_count * block_bytes
    if one.grant.offset + nbytes != other.grant.offset:
        return False
    if one.slot is None or other.slot is None:
        return one.slot is other.slot
    return one.slot[0] == other.slot[0] and one.slot[1] + nbytes == other.slot[1]


def interleave(fetches: Sequence[Fetch]) -> list[Fetch]:
    """Return the fetches with their owners taking turns, each owner's in prefix order.

    Asking one owner after the other leaves the others' links idle.
    """
    queues: dict[ServerIndex, list[Fetch]] = {}
    for fetch in fetches:
        queues.setdefault(fetch.parts[0].server, []).append(fetch)
    turns: list[Fetch] = []
    for turn in range(max(map(len, queues.values()), default=0)):
        turns.extend(queue[turn] for queue in queues.values() if turn < len(queue))
    return turns


def _pieces(parts: Sequence[Part], tensor_bytes: Sequence[int], get_bytes: int) -> list[Piece]:
    ranges: list[list[int]] = []  # [offset, start, nbytes], neighbours merged
    staged = 0
    for part in parts:
        tensor_offset = part.grant.offset
        for size in tensor_bytes:
            offset = tensor_offset + part.first_block * size
            nbytes = part.block_count * size
            if ranges and ranges[-1][0] + ranges[-1][2] == offset:
                ranges[-1][2] += nbytes
            else:
                ranges.append([offset, staged, nbytes])
            staged += nbytes
            tensor_offset += part.grant.segment_blocks * size
    return [
        Piece(offset + done, start + done, min(get_bytes, nbytes - done))
        for offset, start, nbytes in ranges
        for done in range(0, nbytes, get_bytes)
    ]
