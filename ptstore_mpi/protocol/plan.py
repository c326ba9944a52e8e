"""Plan of a load: which bytes of which segment go where, as few contiguous Gets as possible.

A *part* is what one segment contributes to a load. Parts that cross a wire are grouped into
*fetches*: neighbours in the prefix whose images are also neighbours in one arena become one
staging extent and, if whole, one Get. A part whose replica is to be kept lands in the slot of
that replica instead, and fetches of slots are neighbours there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ptstore_mpi.protocol.context import Extent
from ptstore_mpi.protocol.effects import Image
from ptstore_mpi.protocol.messages import Grant
from ptstore_mpi.types import SegmentRef, ServerIndex, segment_owner

__all__ = ["NO_GRANT", "Fetch", "Part", "Piece", "group", "interleave", "parts_of"]

NO_GRANT = Grant(0, 0, b"")
"""Of a part that nobody has leased yet."""


@dataclass(slots=True, eq=False)
class Part:
    """Blocks ``first_block .. first_block + block_count`` of one segment, for ``view_block`` on.

    ``server`` is whose arena it is read from: its owner's, or that of a replica. ``slot`` is where
    a replica of it is to be kept: the server of this node, and the offset in its arena;
    ``is_awaited``: another client of this node is fetching it.
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

    def arena_image(self) -> Image:
        """Return the part's image in the arena it is read from."""
        return Image(
            self.server,
            self.grant.offset,
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
