"""The copies of device views: the same bytes as the host's own copies, in few driver calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptstore_mpi import KVLayout, TensorSpec, TensorView, _native, cuda
from ptstore_mpi.device_views import DeviceViews
from ptstore_mpi.tensor_view import bind_views

BLOCK_TOKENS = 2


@st.composite
def tensors(draw):
    """Draw an array and how to view it: ``(array, view, block_bytes)``, with 5 blocks of room."""
    kind = draw(st.sampled_from(["contiguous", "paged", "heads"]))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.float32]))
    seed = np.random.default_rng(draw(st.integers(0, 99)))
    width = draw(st.integers(1, 5))
    if kind == "contiguous":
        array = seed.integers(0, 256, (5, width)).astype(dtype)
        return array, lambda array: array, width * array.itemsize
    if kind == "paged":
        step = draw(st.sampled_from([1, 2, -1]))
        array = seed.integers(0, 256, (16, BLOCK_TOKENS, width)).astype(dtype)
        table = draw(st.permutations(range(8)))[:5] if draw(st.booleans()) else [1, 2, 3, 5, 7]
        view = lambda array: TensorView.paged(array[::step], table)  # noqa: E731
        return array, view, BLOCK_TOKENS * width * array.itemsize
    heads, start = draw(st.integers(1, 7)), draw(st.integers(0, 2))
    array = seed.integers(0, 256, (heads, 13, width)).astype(dtype)
    return (
        array,
        lambda array: TensorView.heads(array[:, start:], BLOCK_TOKENS),
        heads * BLOCK_TOKENS * width * array.itemsize,
    )


@st.composite
def images(draw):
    """Draw which of 5 blocks go where in an image."""
    view_block = draw(st.integers(0, 4))
    count = draw(st.integers(1, 5 - view_block))
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return {
        "view_block": view_block,
        "block_count": count,
        "offset": draw(st.integers(0, 70)),
        "segment_blocks": before + count + after,
        "segment_block": before,
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(tensors(), min_size=1, max_size=3), image=images())
def test_the_same_bytes_as_on_the_host(stand_in, drawn, image):
    layout = KVLayout(
        tuple(TensorSpec(str(i), nbytes) for i, (_, _, nbytes) in enumerate(drawn)), BLOCK_TOKENS
    )
    on_host = [array.copy() for array, _, _ in drawn]
    on_device = [stand_in.array(array) for array in on_host]

    def bound(arrays, *, writable):
        views = [view(array) for array, (_, view, _) in zip(arrays, drawn, strict=True)]
        return bind_views(layout, views, 5, writable=writable)

    pool, memory_bytes = _native.CopyPool(1), 200 + layout.block_bytes * image["segment_blocks"]
    expected, memory = np.full((2, memory_bytes), 0xA5, np.uint8)
    pool.pack(bound(on_host, writable=False), expected, **image)
    views = bound(on_device, writable=False)
    with cuda.device(0).copying(
        views.copies(memory_bytes=memory_bytes, **image), memory, to_device=False
    ):
        pass
    assert np.array_equal(memory, expected)

    memory = np.random.default_rng(7).integers(0, 256, memory_bytes).astype(np.uint8)
    pool.unpack(bound(on_host, writable=True), memory, **image)
    views = bound(on_device, writable=True)
    with cuda.device(0).copying(
        views.copies(memory_bytes=memory_bytes, **image), memory, to_device=True
    ):
        pass
    for host, device in zip(on_host, on_device, strict=True):
        assert host.tobytes() == device.inside.tobytes()


def copies_of(address=1 << 40, *, blocks=6, segment_blocks=6, **strides):
    views = DeviceViews(0)
    views.append(address, block_count=blocks, **strides)
    image = {"offset": 0, "segment_blocks": segment_blocks, "segment_block": 0}
    return [
        (copy.row_bytes, copy.row_count, copy.pitch)
        for copy in views.copies(view_block=0, block_count=blocks, memory_bytes=1 << 40, **image)
    ]


def paged(table, block_stride=64, piece_bytes=64):
    return copies_of(
        blocks=len(table),
        block_stride=block_stride,
        piece_count=1,
        piece_bytes=piece_bytes,
        piece_stride=piece_bytes,
        block_table=np.array(table),
    )


def heads(count, blocks, *, piece_stride=1 << 20):
    return copies_of(
        blocks=blocks,
        segment_blocks=blocks,
        block_stride=64,
        piece_count=count,
        piece_bytes=64,
        piece_stride=piece_stride,
    )


def test_what_touches_is_one_copy():
    assert paged([3, 4, 5, 6, 7, 8]) == [(6 * 64, 1, 6 * 64)]
    assert paged([7, 8, 9, 1, 2, 0]) == [(192, 1, 192), (128, 1, 128), (64, 1, 64)]
    assert heads(8, 1, piece_stride=64) == [(8 * 64, 1, 8 * 64)], "a cache of one block"


def test_rows_at_one_distance_are_one_copy():
    assert paged([0, 2, 4, 6, 8, 10]) == [(64, 6, 128)]
    assert paged([0, 1, 10, 11, 20, 21]) == [(128, 3, 640)]
    assert paged(range(6), block_stride=256) == [(64, 6, 256)], "pages with keys and values"


def test_heads_take_a_copy_per_head_or_per_block_whichever_are_fewer():
    assert heads(3, 6) == [(64, 6, 64)] * 3
    assert heads(8, 6) == [(64, 8, 1 << 20)] * 6


def test_what_no_rows_can_say_is_copied_run_by_run():
    assert paged([5, 3, 1]) == [(64, 1, 64)] * 3, "backwards"
    assert paged([4, 4, 4]) == [(64, 1, 64)] * 3, "one page for all"
    assert paged([0, 1, 2], block_stride=1 << 31) == [(64, 1, 64)] * 3, "too far for a pitch"
    assert heads(2, 1, piece_stride=-4096) == [(64, 1, 64)] * 2, "heads in reverse"
    strides = {"block_stride": 1 << 31, "piece_count": 2, "piece_bytes": 64, "piece_stride": 128}
    assert copies_of(blocks=3, segment_blocks=3, **strides) == [(64, 2, 128)] * 3


def test_tensors_of_equal_strides_follow_tables_of_their_own():
    views = DeviceViews(0)
    for address, table in ((1 << 40, [0, 1]), (1 << 41, [5, 3])):
        views.append(
            address,
            block_count=2,
            block_stride=64,
            piece_count=1,
            piece_bytes=64,
            piece_stride=64,
            block_table=np.array(table),
        )
    copies = views.copies(
        view_block=0, block_count=2, offset=0, segment_blocks=2, segment_block=0, memory_bytes=256
    )
    starts = [(copy.address, copy.offset) for copy in copies]
    assert starts == [(1 << 40, 0), ((1 << 41) + 5 * 64, 128), ((1 << 41) + 3 * 64, 192)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"view_block": 1}, "view blocks in 0..6, got 1..7"),
        ({"view_block": -1}, "view blocks in 0..6, got -1..5"),
        ({"block_count": 0}, "view blocks"),
        ({"segment_block": 1}, "segment blocks in 0..6, got 1..7"),
        ({"offset": 1}, "image bytes in 0..384, got 1..385"),
        ({"offset": -1}, "image bytes"),
        ({"segment_blocks": 7}, "image bytes in 0..384, got 0..448"),
    ],
)
def test_ranges_are_checked_before_the_first_copy(change, named):
    """An image's offset comes from another rank: it must not reach beyond its memory."""
    views = DeviceViews(0)
    views.append(
        1 << 40, block_count=6, block_stride=64, piece_count=1, piece_bytes=64, piece_stride=64
    )
    image = {"view_block": 0, "block_count": 6, "offset": 0, "segment_blocks": 6}
    image |= {"segment_block": 0, "memory_bytes": 384, **change}
    with pytest.raises(ValueError, match=named):
        views.copies(**image)
