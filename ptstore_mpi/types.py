"""Values that every layer shares: identifiers, references and results. No behaviour, no I/O.

A segment id packs three fields into 64 bits::

     63            48 47                        20 19             0
    +----------------+----------------------------+----------------+
    | owner (server) | slot                       | generation     |
    +----------------+----------------------------+----------------+

The generation tells reuses of one slot apart *quickly*; safety never rests on it, because every
reference also carries the chained hash of its last used block (rule P4 of the protocol).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NewType

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "GENERATION_BITS",
    "HASH_BYTES",
    "PAGE_BYTES",
    "SOURCES",
    "BalanceDecision",
    "BlockHash",
    "BlockHashes",
    "LoadResult",
    "Match",
    "SegmentId",
    "SegmentRef",
    "ServerIndex",
    "StoreResult",
    "TransportChoice",
    "pack_segment_id",
    "segment_owner",
    "segment_slot",
    "whole_pages",
]

ServerIndex = NewType("ServerIndex", int)
"""Position of a server among the servers of the job, 0-based; not an MPI rank."""

SegmentId = NewType("SegmentId", int)
"""64-bit name of a segment: owner, slot, generation."""

BlockHash = NewType("BlockHash", bytes)
"""128-bit chained hash of one block, 16 bytes."""

BlockHashes = npt.NDArray[np.uint8]
"""Chained hashes of consecutive blocks, shape (blocks, 16), C-contiguous."""

HASH_BYTES = 16
PAGE_BYTES = 4096
GENERATION_BITS = 20
_SLOT_BITS = 28

SOURCES = ("engine", "owned", "replica", "remote", "disk")
"""Where reused tokens come from; what is left of the tokens asked for is ``recomputed``."""


def pack_segment_id(owner: int, slot: int, generation: int) -> SegmentId:
    """Return the id of ``slot`` on server ``owner`` in its ``generation``-th use."""
    return SegmentId(
        (owner << (_SLOT_BITS + GENERATION_BITS)) | (slot << GENERATION_BITS) | generation
    )


def segment_owner(segment: int) -> ServerIndex:
    """Return the server that owns ``segment``."""
    return ServerIndex(segment >> (_SLOT_BITS + GENERATION_BITS))


def segment_slot(segment: int) -> int:
    """Return the slot of ``segment`` in its owner's table."""
    return (segment >> GENERATION_BITS) & ((1 << _SLOT_BITS) - 1)


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class SegmentRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A segment as somebody else names it (rule P4).

    Attributes
    ----------
    segment
        64-bit id.
    block_count
        Blocks of the segment that are used, counted from its first.
    last_hash
        Chained hash of the last used block: what makes the reference safe.
    """

    segment: Annotated[int, msgspec.Meta(ge=0)]
    block_count: Annotated[int, msgspec.Meta(ge=1)]
    last_hash: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class BalanceDecision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one server once decided about its share for replicas; see ``Config.replica_share``.

    Attributes
    ----------
    time_s
        When, on the server's clock, s.
    share
        Share of the arena for replicas from then on, 0 to 1.
    moved_bytes
        By how much that is more than before; 0: it stayed.
    replica_more_s, replica_less_s
        Seconds that a step more for replicas would have saved of late, and one less have cost.
    owned_more_s, owned_less_s
        The same for owned segments.
    local_s, remote_s, disk_s, recompute_s
        Seconds for 1 GB (10**9 bytes) of KV that this rests on; 0: not known.
    """

    time_s: float
    share: float
    moved_bytes: int
    replica_more_s: float
    replica_less_s: float
    owned_more_s: float
    owned_less_s: float
    local_s: float
    remote_s: float
    disk_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix of a prompt. ``tokens == 0`` is an ordinary result.

    Attributes
    ----------
    tokens
        Length of the prefix in tokens: whole blocks, at most ``prompt_tokens - 1``.
    prompt_tokens
        Length of the prompt that was asked for.
    reason
        Why the match ends where it does: ``whole`` (nothing more could match), ``diverged``
        (a block nobody has), ``cold`` (not even the first block), ``short`` (the prompt has no
        whole block to match), ``partial`` (a server did not answer in time) or ``cut`` (that is
        where `Namespace.cut` ended it).
    segments
        Flat record of the prefix, from position 0.
    namespace
        Digest of the namespace it was found in.
    seconds
        Time the query took.
    """

    tokens: int
    prompt_tokens: int
    reason: str
    segments: tuple[SegmentRef, ...] = ()
    namespace: bytes = b""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load brought into the caller's memory.

    Attributes
    ----------
    tokens
        Prefix that the caller now has, in tokens: what was skipped, and what was loaded beyond
        it into ``out``, verified. Bytes of ``out`` beyond it are unspecified.
    by_source
        Tokens by source; the keys are ``types.SOURCES``.
    by_server
        The same without ``engine``, by the server whose memory they were read from.
    reason
        ``loaded`` (all of the match), or why it is shorter: ``nothing`` (the match is empty, or
        was skipped), ``gone``, ``late`` (a deadline or a lease ran out), ``corrupt`` (a checksum
        failed).
    seconds
        Time the load took.
    """

    tokens: int
    by_source: dict[str, int] = field(default_factory=dict)
    by_server: dict[int, int] = field(default_factory=dict)
    reason: str = "nothing"
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What a store added.

    Attributes
    ----------
    tokens
        Tokens newly visible to every later match.
    bytes
        Bytes of these tokens.
    reason
        ``stored``; ``known`` (nothing new); ``short`` (not one whole block); ``dedup`` (somebody
        else published it first); ``full`` (no room at the owner); ``gone`` (the parent was
        dropped meanwhile); ``expired``, ``abandoned`` or ``late`` (a deadline ran out);
        ``corrupt`` (the bytes that reached the owner fail their checksums); ``partial`` (a server
        did not answer the match, so storing could duplicate); ``unconfirmed`` (too many writes of
        this client are still unsettled at the owner).
    seconds
        Time the store took.
    """

    tokens: int
    bytes: int
    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """What carries the bytes of a job, equal on every rank.

    Attributes
    ----------
    name
        ``local``, ``mpi``, ``p2p`` or ``sim``.
    reason
        Why this one.
    library
        First line of the MPI library's version; ``none`` without MPI.
    is_fallback
        Whether the job would rather use another one.
    probe_s
        Time of the slowest client's probe; None where nothing was probed.
    """

    name: str
    reason: str
    library: str = "none"
    is_fallback: bool = False
    probe_s: float | None = None
