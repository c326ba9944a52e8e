"""
Native core: block hashes, prefix index, allocator, eviction queue, copies, checksums.
"""

from collections.abc import Callable
from typing import Annotated

import numpy
from numpy.typing import NDArray


def hash_blocks(tokens: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, block_tokens: int, root: bytes, seed: bytes) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 16), order='C', device='cpu')]:
    """
    Chained 128-bit hashes of the whole blocks of tokens, uint8 (n_blocks, 16).
    """

def siphash128(key: bytes, message: bytes) -> bytes:
    """SipHash-2-4 with a 128-bit result of message under a 16-byte key."""

def crc32c(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], initial: int = 0) -> int:
    """
    CRC-32C of data, continuing from the checksum initial of what came before.
    """

def crc32c_uses_hardware() -> bool:
    """True if checksums use instructions of this CPU."""

def block_checksums(memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], *, offset: int, block_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], segment_blocks: int, segment_block: int, block_count: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')]:
    """
    CRC-32C of each block of a segment image, chained over its pieces in tensor order.
    """

class PrefixIndex:
    """Block hash -> set of (segment, position). Calls hold the GIL."""

    def __init__(self) -> None: ...

    def insert(self, hashes: Annotated[NDArray[numpy.uint8], dict(shape=(None, 16), order='C', device='cpu', writable=False)], segment: int, first_position: int = 0) -> None:
        """Add (segment, first_position + i) to hashes[i]; present entries stay."""

    def remove(self, hashes: Annotated[NDArray[numpy.uint8], dict(shape=(None, 16), order='C', device='cpu', writable=False)], segment: int) -> int:
        """Remove the entries of this segment alone; return how many there were."""

    def deepest(self, hashes: Annotated[NDArray[numpy.uint8], dict(shape=(None, 16), order='C', device='cpu', writable=False)]) -> tuple[int, int, int] | None:
        """
        (depth_blocks, segment, position) of the last hash present, lowest segment; or None.
        """

    def __contains__(self, hash: bytes) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def entry_count(self) -> int:
        """Entries of all hashes together."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory this index occupies."""

class RegionAllocator:
    """Free space of an arena, best fit. Calls hold the GIL."""

    def __init__(self, capacity_bytes: int, *, alignment_bytes: int = 4096) -> None: ...

    def allocate(self, nbytes: int) -> int | None:
        """
        Offset of nbytes rounded up to the alignment, or None when nothing is that large.
        """

    def release(self, offset: int, nbytes: int) -> None:
        """
        Free an aligned part of allocated space; free or unaligned space is a ValueError.
        """

    def grow(self, capacity_bytes: int) -> None:
        """Add the space between the old and the new, larger capacity."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def alignment_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    @property
    def largest_free_bytes(self) -> int: ...

class EvictionQueue:
    """Keys by priority, the lowest eligible first. Calls hold the GIL."""

    def __init__(self) -> None: ...

    def set(self, key: int, priority: float, order: int | None = None) -> None:
        """
        Add an item, eligible, or rank it anew; its flag stays. Of equal priorities the lowest order comes first; without one it comes after every order so far.
        """

    def remove(self, key: int) -> bool:
        """Forget an item; return whether it was there."""

    def set_eligible(self, key: int, eligible: bool) -> None:
        """Let an item be lowest(), or not; an unknown key is a ValueError."""

    def lowest(self) -> tuple[int, float] | None:
        """(key, priority) of the eligible item that goes first, or None."""

    def __contains__(self, key: int) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def eligible_count(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory this queue occupies."""

class TensorViews:
    """
    Where an engine keeps the tensors of a layout, in layout order. The caller keeps their memory alive.
    """

    def __init__(self) -> None: ...

    def append(self, address: int, *, block_count: int, block_stride: int, piece_count: int, piece_bytes: int, piece_stride: int, block_table: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None:
        """Add the next tensor; the table is copied."""

    def __len__(self) -> int: ...

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block, per tensor."""

class CopyPool:
    """
    Copies between tensor views and segment images; the calling thread and thread_count - 1 sleeping ones work. The GIL is released.
    """

    def __init__(self, thread_count: int) -> None: ...

    def pack(self, views: TensorViews, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], *, view_block: int, block_count: int, offset: int, segment_blocks: int, segment_block: int, checksums: bool = False) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')] | None:
        """
        Copy blocks of the views into the segment image at memory[offset:]; return the CRC-32C of each block, as block_checksums does, or None where not asked for.
        """

    def unpack(self, views: TensorViews, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], *, view_block: int, block_count: int, offset: int, segment_blocks: int, segment_block: int, checksums: bool = False) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')] | None:
        """
        Copy blocks of the segment image at memory[offset:] into the views; return as pack.
        """

    @property
    def thread_count(self) -> int:
        """Threads that copy, caller included."""

def array_info(array: object | None, stream_of: Callable[[int], int]) -> tuple[int, tuple[int, ...], tuple[int, ...], int, bool, int | None]:
    """
    (address, shape, strides_bytes, itemsize, writable, device) of an array. device is None in host memory, else the ordinal of a CUDA device; the stream that stream_of(device) gives then waits for the work that is under way on the array.
    """
