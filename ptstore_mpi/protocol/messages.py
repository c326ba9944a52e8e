"""What clients ask servers, and what these answer: every message, typed.

A request carries its key ``(client, op, attempt, low)`` (rules P1 and P3 of the protocol); a reply
echoes ``op`` and ``attempt``, so that the client can tell whose answer it is and from when its
lease counts (P12). A request that contradicts itself is refused when it is decoded: a server never
sees one. What servers tell each other is in `peer_messages`, the wire form of all in `wire`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ptstore_mpi.cache.times import LONGEST_S, Times
from ptstore_mpi.types import HASH_BYTES, BalanceDecision, SegmentRef

__all__ = [
    "REPLY_TO",
    "AbandonRequest",
    "AcquireReply",
    "AcquireRequest",
    "AwaitReply",
    "AwaitRequest",
    "ByeRequest",
    "ClearRequest",
    "CountReply",
    "DropRequest",
    "FilledRequest",
    "Grant",
    "LostRequest",
    "MatchReply",
    "MatchRequest",
    "PingReply",
    "PingRequest",
    "PublishRequest",
    "ReleaseRequest",
    "ReplicaPlace",
    "ReplicaWish",
    "Reply",
    "Request",
    "ReserveReply",
    "ReserveRequest",
    "StatsReply",
    "StatsRequest",
    "WriteReply",
    "WriteStatus",
]

WriteStatus = Literal[
    "reserved",
    "published",
    "dedup",
    "full",
    "gone",
    "expired",
    "abandoned",
    "unconfirmed",
    "corrupt",
]
"""State of a write at its owner, as answered to its writer."""


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]  # finite: a lease must end

_SecondsPerGB = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]

_CHECKSUM_BYTES = 4


class _Keyed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Key of a client's request (P1).

    ``op`` grows by one per operation of that client; ``attempt`` per repetition; ``low`` is the
    smallest op of that client still live at the server it is sent to (P3).
    """

    client: _Count
    op: _Count
    attempt: _Count
    low: _Count


class MatchRequest(_Keyed, frozen=True):
    """Find the deepest of these chained block hashes (16 bytes each, concatenated).

    ``is_use``: a prompt is about to be answered, which uses what is found, wherever its bytes are
    then read: owners do not see what is read from replicas.
    """

    hashes: bytes
    is_use: bool = True

    def __post_init__(self) -> None:
        _check_length("hashes", self.hashes, HASH_BYTES)


class ReplicaWish(msgspec.Struct, frozen=True, array_like=True):
    """Segments of other servers whose replicas are asked for, all of one namespace.

    ``tensor_bytes`` are the bytes of one block of each tensor. ``may_fill`` says that a slot may
    be opened for what is not here: else only complete replicas are granted (P18).
    """

    refs: tuple[SegmentRef, ...]
    namespace: bytes
    tensor_bytes: tuple[_Positive, ...]
    may_fill: bool


class AcquireRequest(_Keyed, frozen=True):
    """Lease these segments for ``remaining_s`` seconds from the moment they are granted (P11).

    ``refs`` are the receiver's own, ``wish`` names others'. ``keepers`` says of each of ``refs``
    which server will keep a replica of it, -1: none; empty: none of any. ``may_redirect`` allows
    the owner to name a server with a replica instead; ``stale`` says of each of ``refs`` which
    server it named in vain (P18). ``lent`` is what the client heard of late: servers, and the
    bytes they have lent to other nodes in all.
    """

    refs: tuple[SegmentRef, ...]
    remaining_s: _Seconds
    checksums: bool
    wish: ReplicaWish | None = None
    keepers: tuple[int, ...] = ()
    may_redirect: bool = False
    stale: tuple[int, ...] = ()
    lent: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for servers in (self.keepers, self.stale):
            if servers and len(servers) != len(self.refs):
                raise ValueError(f"{len(self.refs)} segments, servers of {len(servers)}")


class FilledRequest(_Keyed, frozen=True):
    """These slots of operation ``op`` are filled; never answered (P17).

    ``hashes`` and ``checksums`` (uint32 each, or nothing) are those of all their blocks.
    """

    refs: tuple[SegmentRef, ...]
    hashes: bytes
    checksums: bytes

    def __post_init__(self) -> None:
        blocks = sum(ref.block_count for ref in self.refs)
        if len(self.hashes) != blocks * HASH_BYTES:
            raise ValueError(f"{blocks} blocks, {len(self.hashes)} bytes of hashes")
        if len(self.checksums) not in (0, blocks * _CHECKSUM_BYTES):
            raise ValueError(f"{blocks} blocks, {len(self.checksums)} bytes of checksums")


class AwaitRequest(_Keyed, frozen=True):
    """Lease the replicas of these segments as soon as others' fills of them have ended (P17)."""

    refs: tuple[SegmentRef, ...]
    remaining_s: _Seconds
    checksums: bool


class ReleaseRequest(_Keyed, frozen=True):
    """End every lease of operation ``op``; never answered.

    ``times`` are what the client has measured of late, as `Times`, or nothing.
    """

    times: tuple[_SecondsPerGB, ...] = ()

    def __post_init__(self) -> None:
        if len(self.times) not in (0, len(Times._fields)):
            raise ValueError(f"expected {len(Times._fields)} times or none, got {len(self.times)}")


class ReserveRequest(_Keyed, frozen=True):
    """Reserve one region for new segments behind the last of ``ancestors``.

    ``ancestors`` is the flat record of the prefix they continue as the client knows it, empty at
    position 0; its last is the parent, the path to it is taken from the parent's owner. ``hashes``
    are those of the new blocks; ``segment_block_counts`` adds up to their number; ``mapped`` says
    that the writer maps the owner's arena and writes it by itself. ``tensor_bytes`` are the
    bytes of one block of each tensor.
    """

    namespace: bytes
    ancestors: tuple[SegmentRef, ...]
    hashes: bytes
    segment_block_counts: tuple[_Positive, ...]
    tensor_bytes: tuple[_Positive, ...]
    remaining_s: _Seconds
    mapped: bool

    def __post_init__(self) -> None:
        _check_length("hashes", self.hashes, HASH_BYTES)
        blocks = sum(self.segment_block_counts)
        if not blocks or blocks * HASH_BYTES != len(self.hashes) or not self.tensor_bytes:
            raise ValueError(
                f"{blocks} blocks of {len(self.tensor_bytes)} tensors in segments, "
                f"{len(self.hashes) // HASH_BYTES} hashes"
            )


class PublishRequest(_Keyed, frozen=True):
    """Make the reserved region visible. ``checksums``: uint32 per block, or empty (P5)."""

    checksums: bytes

    def __post_init__(self) -> None:
        _check_length("checksums", self.checksums, _CHECKSUM_BYTES)


class AbandonRequest(_Keyed, frozen=True):
    """Give the reservation up; it can no longer be published. Never answered."""


class ClearRequest(_Keyed, frozen=True):
    """Forget a namespace on this server."""

    namespace: bytes


class LostRequest(_Keyed, frozen=True):
    """The bytes of this segment failed their checksum at the reader. Never answered.

    The owner looks for itself: only what is bad in its arena is lost (P15), not what a wire bent.
    """

    ref: SegmentRef


class DropRequest(_Keyed, frozen=True):
    """Drop one published segment, named to its last block, that nothing is linked to (P15)."""

    ref: SegmentRef


class StatsRequest(_Keyed, frozen=True):
    """Ask for the counters of this server, and for its last ``decisions`` about replicas."""

    decisions: bool = False


class PingRequest(_Keyed, frozen=True):
    """Ask for ``reply_bytes`` bytes: what a message of this size costs, and nothing else."""

    payload: bytes
    reply_bytes: int


class ByeRequest(_Keyed, frozen=True):
    """The client leaves: its ``low`` is infinite from now on (P3). Never answered."""


Request = (
    MatchRequest
    | AcquireRequest
    | FilledRequest
    | AwaitRequest
    | ReleaseRequest
    | ReserveRequest
    | PublishRequest
    | AbandonRequest
    | ClearRequest
    | LostRequest
    | DropRequest
    | StatsRequest
    | PingRequest
    | ByeRequest
)


class _Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What every reply echoes: the server that answers, and the key it answers."""

    server: int
    op: int
    attempt: int


class MatchReply(_Answer, frozen=True):
    """Deepest match on this server: its flat record, empty where nothing matched."""

    refs: tuple[SegmentRef, ...]
    free_bytes: int


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """A leased segment: where its image starts in the arena, and its shape.

    ``checksums`` holds uint32 per used block, or nothing where none were stored or asked for;
    ``hashes`` those of the used blocks, where a replica is to be kept. ``from_disk`` says that
    this acquire has waited for the segment to be read from a file.
    """

    offset: int
    segment_blocks: int
    checksums: bytes
    hashes: bytes = b""
    from_disk: bool = False


class ReplicaPlace(msgspec.Struct, frozen=True, array_like=True):
    """What became of one wish.

    ``here``: leased, as ``grant`` says. ``fill``: a slot of the asking operation begins at the
    grant's offset. ``wait``: another operation is filling one. ``none``: not kept here.
    """

    status: Literal["here", "fill", "wait", "none"]
    grant: Grant = Grant(0, 0, b"")


class AcquireReply(_Answer, frozen=True):
    """Leases on a prefix of the segments asked for: the first that is gone ends it.

    ``redirects`` lists, as (position, server), which of them are not leased, because that server
    has a replica (P18). ``places`` answer the wish, one by one. ``lent_bytes`` is what this server
    has lent to other nodes in all.
    """

    grants: tuple[Grant, ...]
    granted_s: float
    redirects: tuple[tuple[int, int], ...] = ()
    places: tuple[ReplicaPlace, ...] = ()
    lent_bytes: int = 0


class AwaitReply(_Answer, frozen=True):
    """Replicas that others have filled, ``here`` or ``none``."""

    places: tuple[ReplicaPlace, ...]
    granted_s: float


class ReserveReply(_Answer, frozen=True):
    """Outcome of a reservation; ``offsets`` is where each new segment starts in the arena."""

    status: WriteStatus
    offsets: tuple[int, ...] = ()


class WriteReply(_Answer, frozen=True):
    """Outcome of a publish."""

    status: WriteStatus


class CountReply(_Answer, frozen=True):
    """How many segments a maintenance operation removed."""

    count: int


class StatsReply(_Answer, frozen=True):
    """Counters of one server by name, bytes and counts; its last decisions, if asked for."""

    counters: dict[str, int]
    decisions: tuple[BalanceDecision, ...] = ()


class PingReply(_Answer, frozen=True):
    """As many bytes as were asked for."""

    payload: bytes


Reply = (
    MatchReply
    | AcquireReply
    | AwaitReply
    | ReserveReply
    | WriteReply
    | CountReply
    | StatsReply
    | PingReply
)

REPLY_TO: dict[type, type] = {
    MatchRequest: MatchReply,
    AcquireRequest: AcquireReply,
    AwaitRequest: AwaitReply,
    ReserveRequest: ReserveReply,
    PublishRequest: WriteReply,
    ClearRequest: CountReply,
    DropRequest: CountReply,
    StatsRequest: StatsReply,
    PingRequest: PingReply,
}
"""What answers what: requests of one operation share its number."""


def _check_length(name: str, data: bytes, unit_bytes: int) -> None:
    if len(data) % unit_bytes:
        raise ValueError(f"{name}: expected a multiple of {unit_bytes} bytes, got {len(data)}")
