"""What stands before each segment in a slab: who it is, and how its bytes are checked. No I/O.

The header is compared as a whole with what the reader expects (P4): place, id and chained hashes,
so that a slot that was written by somebody else, or for something else, is never taken for it. It
also says all that a later job needs to take the segment over: namespace, hashes and the hash
before the first, block checksums, bytes of a block per tensor.

::

    0                                                      whole pages
    | fixed | tensor bytes | block hashes | block checksums | zeros |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ptstore_mpi import _native
from ptstore_mpi.types import HASH_BYTES, BlockHashes, whole_pages

__all__ = ["NO_PARENT", "Header", "SegmentContent", "SlotPlace", "pack_header", "parse_header"]

NO_PARENT = bytes(HASH_BYTES)
"""In place of the hash before the first block, where that is at position 0."""

_MAGIC = b"PTSLOT\r\n"
_VERSION = 1
# magic, checksum | version, slab, blocks, tensors, 0 | offset, payload, id | tier, names, parent
_START = struct.Struct("<8sI")
_FIXED = struct.Struct("<IIIIIQQQ16s16s16s")
_TENSOR_BYTES = 8
_BLOCK_BYTES = HASH_BYTES + 4


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SegmentContent:
    """What a segment is, wherever its bytes lie.

    Attributes
    ----------
    namespace
        Digest of its namespace, 16 bytes.
    segment
        64-bit id.
    hashes
        Chained hashes of its blocks, shape (blocks, 16), uint8.
    tensor_bytes
        Bytes of one block of each tensor.
    checksums
        CRC-32C of each block, 4 bytes each; empty: computed when it is written.
    parent_hash
        Chained hash of the block before the first, 16 bytes.
    """

    namespace: bytes
    segment: int
    hashes: BlockHashes
    tensor_bytes: tuple[int, ...]
    checksums: bytes = b""
    parent_hash: bytes = NO_PARENT

    @property
    def block_count(self) -> int:
        """Blocks of the segment."""
        return len(self.hashes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all blocks, in whole pages."""
        return whole_pages(self.block_count * sum(self.tensor_bytes))

    @property
    def header_bytes(self) -> int:
        """Bytes of the header, in whole pages."""
        return _header_bytes(self.block_count, len(self.tensor_bytes))


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where a slot is: the tier's own 16 bytes, the number of the slab, and the offset there."""

    tier: bytes
    slab: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header that was found and is whole."""

    place: SlotPlace
    content: SegmentContent


def pack_header(place: SlotPlace, content: SegmentContent, checksums: bytes) -> bytes:
    """Return the header of ``content`` at ``place``, ``content.header_bytes`` long.

    Parameters
    ----------
    place, content
        The slot and what it holds.
    checksums
        CRC-32C of each block, 4 bytes each; those of ``content`` may not be known yet.
    """
    assert len(place.tier) == len(content.namespace) == len(content.parent_hash) == HASH_BYTES
    assert len(checksums) == 4 * content.block_count
    fixed = _FIXED.pack(
        _VERSION,
        place.slab,
        content.block_count,
        len(content.tensor_bytes),
        0,
        place.offset,
        content.payload_bytes,
        content.segment,
        place.tier,
        content.namespace,
        content.parent_hash,
    )
    tensors = struct.pack(f"<{len(content.tensor_bytes)}Q", *content.tensor_bytes)
    body = fixed + tensors + content.hashes.tobytes() + checksums
    body += bytes(content.header_bytes - _START.size - len(body))
    return _START.pack(_MAGIC, _crc(body)) + body


def parse_header(data: bytes) -> Header | None:
    """Return the header that ``data`` begins with, or None where there is no whole one."""
    if len(data) < _START.size + _FIXED.size:
        return None
    magic, checksum = _START.unpack_from(data)
    version, slab, blocks, tensors, _, *rest = _FIXED.unpack_from(data, _START.size)
    nbytes = _header_bytes(blocks, tensors)
    if magic != _MAGIC or version != _VERSION or len(data) < nbytes:
        return None
    if _crc(data[_START.size : nbytes]) != checksum:
        return None
    offset, _, segment, tier, namespace, parent_hash = rest
    at = _START.size + _FIXED.size
    tensor_bytes = struct.unpack_from(f"<{tensors}Q", data, at)
    at += _TENSOR_BYTES * tensors
    hashes = np.frombuffer(data, dtype=np.uint8, count=HASH_BYTES * blocks, offset=at)
    at += HASH_BYTES * blocks
    content = SegmentContent(
        namespace=namespace,
        segment=segment,
        hashes=hashes.reshape(blocks, HASH_BYTES),
        tensor_bytes=tensor_bytes,
        checksums=data[at : at + 4 * blocks],
        parent_hash=parent_hash,
    )
    return Header(SlotPlace(tier, slab, offset), content)


def _header_bytes(block_count: int, tensor_count: int) -> int:
    listed = _TENSOR_BYTES * tensor_count + _BLOCK_BYTES * block_count
    return whole_pages(_START.size + _FIXED.size + listed)


def _crc(data: bytes) -> int:
    return _native.crc32c(np.frombuffer(data, dtype=np.uint8))
