"""Copies between views of NumPy and torch arrays and segment images."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptstore_mpi import _native

HEADS, DIM, BLOCK_TOKENS = 3, 8, 4
BLOCK_SHAPE = (HEADS, BLOCK_TOKENS, DIM)
BLOCK_BYTES = HEADS * BLOCK_TOKENS * DIM * 2


@dataclass
class Kind:
    """One kind of view: its array, how it is appended and its blocks as a copy."""

    array: np.ndarray
    append: Callable[[_native.TensorViews], None]
    blocks: Callable[[], np.ndarray]  # uint8 (blocks, BLOCK_BYTES)


def random_array(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**16, shape, dtype=np.uint16)


def as_rows(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(-1, BLOCK_BYTES)


def contiguous(count: int, seed: int) -> Kind:
    array = random_array((count, *BLOCK_SHAPE), seed)

    def append(views: _native.TensorViews) -> None:
        views.append(
            array.ctypes.data,
            block_count=count,
            block_stride=BLOCK_BYTES,
            piece_count=1,
            piece_bytes=BLOCK_BYTES,
            piece_stride=BLOCK_BYTES,
        )

    return Kind(array, append, lambda: as_rows(array))


def paged(count: int, seed: int) -> Kind:
    array = random_array((count + 4, *BLOCK_SHAPE), seed)
    table = np.random.default_rng(seed).permutation(count + 4)[:count].astype(np.int64)
    table[: count // 2].sort()  # some pages follow each other

    def append(views: _native.TensorViews) -> None:
        views.append(
            array.ctypes.data,
            block_count=count,
            block_stride=array.strides[0],
            piece_count=1,
            piece_bytes=BLOCK_BYTES,
            piece_stride=BLOCK_BYTES,
            block_table=table,
        )

    return Kind(array, append, lambda: as_rows(array[table]))


def heads(count: int, seed: int) -> Kind:
    tokens = (count + 1) * BLOCK_TOKENS
    array = random_array((HEADS, tokens, DIM), seed)
    piece_bytes = BLOCK_TOKENS * DIM * 2

    def append(views: _native.TensorViews) -> None:
        views.append(
            array.ctypes.data,
            block_count=count,
            block_stride=piece_bytes,
            piece_count=HEADS,
            piece_bytes=piece_bytes,
            piece_stride=array.strides[0],
        )

    def blocks() -> np.ndarray:
        whole = array[:, : count * BLOCK_TOKENS]
        return as_rows(whole.reshape(HEADS, count, BLOCK_TOKENS, DIM).transpose(1, 0, 2, 3))

    return Kind(array, append, blocks)


KINDS = (contiguous, paged, heads)


@dataclass
class Where:
    """The ranges of one copy."""

    view_block: int
    block_count: int
    offset: int
    segment_blocks: int
    segment_block: int

    def image(self, memory: np.ndarray, tensor: int) -> np.ndarray:
        """Return the copied blocks of one tensor in the segment image, as rows."""
        size = self.segment_blocks * BLOCK_BYTES
        begin = self.offset + tensor * size
        rows = memory[begin : begin + size].reshape(-1, BLOCK_BYTES)
        return rows[self.segment_block : self.segment_block + self.block_count]

    def sums(self, memory: np.ndarray, kinds: list[int]) -> list[int]:
        """Return the CRC-32C of the copied blocks of the segment image, by another library."""
        images = [self.image(memory, tensor) for tensor in range(len(kinds))]
        return [
            google_crc32c.value(b"".join(image[block].tobytes() for image in images))
            for block in range(self.block_count)
        ]


@st.composite
def places(draw: st.DrawFn) -> tuple[Where, int]:
    view_block, count, before, after = (draw(st.integers(0, 4)) for _ in range(4))
    where = Where(
        view_block=view_block,
        block_count=count,
        offset=draw(st.integers(0, 70)),
        segment_blocks=before + count + after,
        segment_block=before,
    )
    return where, max(view_block + count + draw(st.integers(0, 2)), 1)


def make(kinds: list[int], count: int) -> tuple[list[Kind], _native.TensorViews]:
    tensors = [KINDS[kind](count, seed) for seed, kind in enumerate(kinds)]
    views = _native.TensorViews()
    for tensor in tensors:
        tensor.append(views)
    return tensors, views


KIND_LISTS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@settings(deadline=None)
@given(kinds=KIND_LISTS, place=places(), threads=st.integers(1, 3))
def test_pack(kinds: list[int], place: tuple[Where, int], threads: int) -> None:
    where, count = place
    tensors, views = make(kinds, count)
    size = where.offset + len(kinds) * where.segment_blocks * BLOCK_BYTES + 10
    memory = np.full(size, 0xA5, np.uint8)
    expected = memory.copy()
    for i, tensor in enumerate(tensors):
        chosen = tensor.blocks()[where.view_block : where.view_block + where.block_count]
        where.image(expected, i)[:] = chosen
    pool = _native.CopyPool(threads)
    assert pool.pack(views, memory, **vars(where)) is None
    assert (memory == expected).all()
    memory[:] = 0xA5
    assert (
        pool.pack(views, memory, checksums=True, **vars(where)) == where.sums(memory, kinds)
    ).all()
    assert (memory == expected).all()


@settings(deadline=None)
@given(kinds=KIND_LISTS, place=places(), threads=st.integers(1, 3), checked=st.booleans())
def test_unpack(kinds: list[int], place: tuple[Where, int], threads: int, checked: bool) -> None:
    where, count = place
    tensors, views = make(kinds, count)
    size = where.offset + len(kinds) * where.segment_blocks * BLOCK_BYTES
    memory = np.random.default_rng(9).integers(0, 256, size, dtype=np.uint8)
    memory.flags.writeable = False
    expected = [tensor.blocks() for tensor in tensors]
    untouched = [tensor.array.copy() for tensor in tensors]
    pool = _native.CopyPool(threads)
    if checked:
        sums = pool.unpack(views, memory, checksums=True, **vars(where))
        assert (sums == where.sums(memory, kinds)).all()
    else:
        assert pool.unpack(views, memory, **vars(where)) is None
    for i, tensor in enumerate(tensors):
        chosen = expected[i][where.view_block : where.view_block + where.block_count]
        chosen[:] = where.image(memory, i)
        assert (tensor.blocks() == expected[i]).all()
        changed = int((tensor.array != untouched[i]).sum())
        assert changed * 2 <= where.block_count * BLOCK_BYTES


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_large_copies_there_and_back(kind: int, threads: int) -> None:
    """Several MiB: threads and stores past the caches take part."""
    count = 12_000
    (tensor,), views = make([kind], count)
    pool = _native.CopyPool(threads)
    where = Where(1, count - 2, 13, count, 0)
    memory = np.zeros(13 + count * BLOCK_BYTES, np.uint8)
    pool.pack(views, memory, **vars(where))
    rows = tensor.blocks()
    assert (where.image(memory, 0) == rows[1:-1]).all()
    tensor.array[:] = 0
    pool.unpack(views, memory, **vars(where))
    assert (tensor.blocks()[1:-1] == rows[1:-1]).all()
    assert not tensor.blocks()[[0, -1]].any()


def test_torch_bfloat16_heads_there_and_back() -> None:
    torch = pytest.importorskip("torch")
    source = torch.randn(HEADS, 10 * BLOCK_TOKENS, DIM).to(torch.bfloat16)
    target = torch.zeros_like(source)
    pool = _native.CopyPool(2)
    where = Where(0, 10, 0, 10, 0)
    memory = np.zeros(10 * BLOCK_BYTES, np.uint8)
    for tensor, copy in ((source, pool.pack), (target, pool.unpack)):
        address, shape, strides, itemsize, *_ = _native.array_info(tensor, int)
        views = _native.TensorViews()
        views.append(
            address,
            block_count=shape[1] // BLOCK_TOKENS,
            block_stride=BLOCK_TOKENS * strides[1],
            piece_count=shape[0],
            piece_bytes=BLOCK_TOKENS * DIM * itemsize,
            piece_stride=strides[0],
        )
        copy(views, memory, **vars(where))
    assert torch.equal(source, target)


def test_the_block_table_is_copied() -> None:
    array = random_array((4, *BLOCK_SHAPE), 0)
    table = np.array([2, 0], np.int64)
    views = _native.TensorViews()
    views.append(
        array.ctypes.data,
        block_count=2,
        block_stride=BLOCK_BYTES,
        piece_count=1,
        piece_bytes=BLOCK_BYTES,
        piece_stride=BLOCK_BYTES,
        block_table=table,
    )
    table[:] = 3
    memory = np.zeros(2 * BLOCK_BYTES, np.uint8)
    _native.CopyPool(1).pack(views, memory, **vars(Where(0, 2, 0, 2, 0)))
    assert (memory.reshape(2, -1) == as_rows(array[[2, 0]])).all()
    assert (len(views), views.block_bytes) == (1, [BLOCK_BYTES])


def test_calls_from_several_threads_take_turns() -> None:
    pool = _native.CopyPool(2)
    results = []

    def work(seed: int) -> None:
        (tensor,), views = make([seed % 3], 3000)
        memory = np.zeros(3000 * BLOCK_BYTES, np.uint8)
        where = Where(0, 3000, 0, 3000, 0)
        for _ in range(5):
            pool.pack(views, memory, **vars(where))
        results.append((where.image(memory, 0) == tensor.blocks()).all())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"view_block": 1}, "exceeds the 4 blocks of the view of tensor 0"),
        ({"view_block": -1}, "view_block must be at least 0"),
        ({"block_count": -1}, "block_count must be at least 0"),
        ({"offset": 1}, "exceeds memory"),
        ({"offset": -1}, "offset must be at least 0"),
        ({"segment_block": 1}, "exceeds segment_blocks 4"),
        ({"segment_blocks": 3}, "exceeds segment_blocks 3"),
        ({"segment_blocks": 5}, "exceeds memory"),
    ],
)
def test_a_range_that_does_not_fit_is_named(change: dict[str, int], message: str) -> None:
    tensors, views = make([0], 4)
    pool = _native.CopyPool(1)
    memory = np.zeros(4 * BLOCK_BYTES, np.uint8)
    arguments = vars(Where(0, 4, 0, 4, 0)) | change
    for copy in (pool.pack, pool.unpack):
        with pytest.raises(ValueError, match=message):
            copy(views, memory, **arguments)
    assert not memory.any()
    assert tensors[0].array.any()


def test_memory_is_not_converted_and_must_be_writable_to_pack() -> None:
    _, views = make([0], 4)
    pool = _native.CopyPool(1)
    where = vars(Where(0, 4, 0, 4, 0))
    read_only = np.zeros(4 * BLOCK_BYTES, np.uint8)
    read_only.flags.writeable = False
    other_dtype = np.zeros(4 * BLOCK_BYTES, np.int8)
    gaps = np.zeros(8 * BLOCK_BYTES, np.uint8)[::2]
    for memory in (read_only, other_dtype, gaps):
        with pytest.raises(TypeError):
            pool.pack(views, memory, **where)  # type: ignore[arg-type]
    for memory in (other_dtype, gaps):
        with pytest.raises(TypeError):
            pool.unpack(views, memory, **where)  # type: ignore[arg-type]


def test_wrong_views_and_pools_are_named() -> None:
    views = _native.TensorViews()
    shape = {"block_count": 2, "block_stride": 8, "piece_count": 1, "piece_bytes": 8}
    with pytest.raises(ValueError, match="2 entries, got 3"):
        views.append(64, **shape, piece_stride=8, block_table=np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="at least 0, got -1"):
        views.append(64, **shape, piece_stride=8, block_table=np.array([0, -1]))
    with pytest.raises(TypeError):
        views.append(64, **shape, piece_stride=8, block_table=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="piece_bytes must be at least 1"):
        views.append(64, **(shape | {"piece_bytes": 0}), piece_stride=8)  # type: ignore[arg-type]
    assert len(views) == 0
    with pytest.raises(ValueError, match="thread_count must be at least 1, got 0"):
        _native.CopyPool(0)
    assert _native.CopyPool(3).thread_count == 3
