"""Views of an engine's memory: what they accept, what they refuse, and that they copy nothing."""

from __future__ import annotations

import array
import ctypes

import numpy as np
import pytest

from ptstore_mpi import KVLayout, LayoutMismatchError, TensorSpec, TensorView, _native
from ptstore_mpi.tensor_view import bind_bands, bind_views

LAYOUT = KVLayout((TensorSpec("a", 32), TensorSpec("b", 48)), block_tokens=4)


def packed(layout, arrays, blocks):
    """Return the segment image of the first blocks of the arrays."""
    views = bind_views(layout, arrays, blocks, writable=False)
    memory = np.zeros(layout.block_bytes * blocks, np.uint8)
    _native.CopyPool(1).pack(
        views,
        memory,
        view_block=0,
        block_count=blocks,
        offset=0,
        segment_blocks=blocks,
        segment_block=0,
    )
    return memory


def test_contiguous_takes_any_shape_of_the_same_bytes():
    data = np.arange(96, dtype=np.uint8)
    for shaped in (data, data.reshape(3, 32), data.view(np.float64), data.reshape(1, 3, 4, 8)):
        image = packed(KVLayout(LAYOUT.tensors[:1], 4), [shaped], 3)
        assert np.array_equal(image, data)


def test_contiguous_takes_plain_buffers():
    wanted = np.arange(96, dtype=np.uint8)
    ctypes_array = (ctypes.c_float * 8 * 3).from_buffer_copy(wanted)  # says no strides
    for buffer in (ctypes_array, bytearray(wanted), array.array("i", wanted.view(np.int32))):
        image = packed(KVLayout(LAYOUT.tensors[:1], 4), [buffer], 3)
        assert np.array_equal(image, wanted)


def test_paged_follows_the_table():
    pages = np.arange(6 * 32, dtype=np.uint8).reshape(6, 4, 8)
    view = TensorView.paged(pages, [5, 0, 3])
    assert view.block_count == 3
    image = packed(KVLayout(LAYOUT.tensors[:1], 4), [view], 3)
    assert np.array_equal(image.reshape(3, 4, 8), pages[[5, 0, 3]])


def test_paged_takes_pages_apart_in_memory():
    pages = np.arange(12 * 32, dtype=np.uint16).astype(np.uint8).reshape(12, 32)
    for strided in (pages[::2], pages[::-1]):
        image = packed(KVLayout(LAYOUT.tensors[:1], 4), [TensorView.paged(strided, [4, 1])], 2)
        assert np.array_equal(image.reshape(2, 32), strided[[4, 1]])


@pytest.mark.parametrize("step", [1, 2, -1])
def test_another_table_is_the_view_that_paged_makes(step):
    pages = np.arange(12 * 32, dtype=np.uint16).astype(np.uint8).reshape(12, 4, 8)[::step]
    for table in ([5, 0, 3], np.array([1, 2], np.int32), np.arange(5), []):
        view = TensorView.paged(pages, [1]).with_table(table)
        same = TensorView.paged(pages, table)
        for name in TensorView.__struct_fields__:
            assert np.array_equal(getattr(view, name), getattr(same, name)), name
    image = packed(KVLayout(LAYOUT.tensors[:1], 4), [view.with_table([4, 1])], 2)
    assert np.array_equal(image.reshape(2, 4, 8), pages[[4, 1]])


def test_all_tensors_may_share_one_table():
    """Tables are compared by identity where it is told whether outputs are apart."""
    table = np.array([2, 0])
    pages = np.zeros((4, 80), np.uint8)
    views = [TensorView.paged(part, [0]) for part in (pages[:, :32], pages[:, 32:])]
    views = [view.with_table(table) for view in views]
    assert all(view.block_table is table for view in views)
    assert len(bind_views(LAYOUT, views, 2, writable=True)) == 2


def test_another_table_does_not_look_at_the_array_again(monkeypatch):
    view = TensorView.paged(np.zeros((4, 32), np.uint8), [0])
    monkeypatch.setattr("ptstore_mpi.tensor_view.describe", None)
    assert view.with_table([3, 1]).total_bytes == 64


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([4], r"0\.\.3, got 4\.\.4"),
        (np.array([1, -1]), r"0\.\.3, got -1\.\.1"),
        (np.array([0, 1 << 62]), r"0\.\.3"),
        (np.array([[0, 1]]), "1-d"),
        ([0.5], "table of integers"),
        (None, "1-d"),
    ],
)
def test_another_table_is_refused_as_paged_does(table, message):
    pages = np.zeros((4, 32), np.uint8)
    with pytest.raises(LayoutMismatchError, match=message):
        TensorView.paged(pages, [0]).with_table(table)
    with pytest.raises(LayoutMismatchError, match=message):
        TensorView.paged(pages, table)


@pytest.mark.parametrize(
    "view",
    [TensorView.contiguous(np.zeros((4, 32))), TensorView.heads(np.zeros((2, 4, 8)), 4)],
)
def test_only_pages_have_a_table(view):
    with pytest.raises(LayoutMismatchError, match="expected a paged view"):
        view.with_table([0])


def test_bands_are_the_views_of_their_tensors():
    arrays = [np.full((3, 32), 1, np.uint8), TensorView.paged(np.full((3, 48), 2, np.uint8), [1])]
    found = [(end, views.block_bytes) for end, views in bind_bands(LAYOUT, arrays, [1, 2])]
    assert found == [(1, [32]), (2, [48])]
    ((end, views),) = bind_bands(LAYOUT, arrays, [2])
    assert (end, views.block_bytes) == (2, [32, 48])


def test_heads_takes_slices_of_a_longer_cache():
    cache = np.arange(2 * 20 * 2, dtype=np.float64).reshape(1, 2, 20, 2)
    layout = KVLayout((TensorSpec("a", 2 * 4 * 2 * 8),), 4)
    view = TensorView.heads(cache[:, :, 3:16], 4)
    assert view.block_count == 3
    image = packed(layout, [view], 3).view(np.float64).reshape(3, 2, 4, 2)
    for block in range(3):
        start = 3 + 4 * block
        assert np.array_equal(image[block], cache[0, :, start : start + 4])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 8))[:, ::2],
        np.zeros((4, 8)).T,
        np.zeros((4, 8))[::-1],
        np.zeros((4, 8, 2))[:, :, 0],
    ],
)
def test_contiguous_refuses_gaps(array):
    with pytest.raises(LayoutMismatchError, match="C-contiguous"):
        TensorView.contiguous(array)


@pytest.mark.parametrize(
    ("array", "table", "message"),
    [
        (np.zeros((4, 8))[:, ::2], [0], "dense blocks"),
        (np.zeros((4, 8)), [4], r"0\.\.3"),
        (np.zeros((4, 8)), [-1], r"0\.\.3"),
        (np.zeros((4, 8)), [[0, 1]], "1-d"),
        (np.zeros((4, 8)), [[]], "1-d"),
        (np.zeros((4, 8)), [0.5], "table"),
        (np.zeros(()), [0], "block"),
    ],
)
def test_paged_refuses(array, table, message):
    with pytest.raises(LayoutMismatchError, match=message):
        TensorView.paged(array, table)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 8)),
        np.zeros((2, 2, 4, 8)),
        np.zeros((2, 4, 8))[:, :, ::2],
        np.zeros((2, 8, 4)).transpose(0, 2, 1),
    ],
)
def test_heads_refuses(array):
    with pytest.raises(LayoutMismatchError, match=r"expected (\[heads|dense tokens)"):
        TensorView.heads(array, 4)


@pytest.mark.parametrize("thing", ["text", None, object(), [1, 2], np.array(["a"])])
def test_what_is_no_array_is_refused_with_the_tensors_name(thing):
    with pytest.raises(LayoutMismatchError, match="tensor 'b'"):
        bind_views(LAYOUT, [np.zeros(32, np.uint8), thing], 1, writable=False)


def test_bind_checks_number_room_and_writability():
    right = [np.zeros((3, 32), np.uint8), np.zeros((3, 48), np.uint8)]
    assert len(bind_views(LAYOUT, right, 3, writable=True)) == 2
    with pytest.raises(LayoutMismatchError, match=r"expected 2 arrays.*got 1"):
        bind_views(LAYOUT, right[:1], 3, writable=False)
    with pytest.raises(LayoutMismatchError, match=r"'a'.*room for 4 blocks of 32 bytes, got 3"):
        bind_views(LAYOUT, right, 4, writable=False)
    right[1].flags.writeable = False
    bind_views(LAYOUT, right, 3, writable=False)
    with pytest.raises(LayoutMismatchError, match=r"'b'.*read-only"):
        bind_views(LAYOUT, right, 3, writable=True)


def test_bind_checks_the_bytes_of_a_block():
    views = [
        TensorView.paged(np.zeros((4, 32), np.uint8), [0, 1]),
        TensorView.paged(np.zeros((4, 40), np.uint8), [0, 1]),
    ]
    with pytest.raises(LayoutMismatchError, match=r"'b': expected 48 bytes per block, got 1 .* 40"):
        bind_views(LAYOUT, views, 2, writable=False)


def test_views_copy_nothing_and_keep_their_array_alive():
    array = np.zeros((4, 32), np.uint8)
    view = TensorView.paged(array, [2])
    assert view.address == array.ctypes.data
    assert view.owner is array
    assert not np.shares_memory(view.block_table, np.zeros(1))
