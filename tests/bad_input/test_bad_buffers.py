"""Wrong memory for KV: dtype, shape, strides, room, read-only, overlapping; stores too large."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from refusals import Bench, refused

import ptstore_mpi as pt
from ptstore_mpi import CapacityError, KVLayout, LayoutMismatchError, TensorSpec, TensorView
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import SMALL, small_config
from ptstore_mpi.testing.oracle import Oracle

BLOCKS = 8
VALUE = np.zeros((BLOCKS, 24), np.uint8)


def kind(name, *values):
    return pytest.param(*values, id=name)


def zeros(*shape, dtype=np.uint8):
    return np.zeros(shape, dtype)


IN_HOST = "'key': expected an array in host memory or on a CUDA device"
ROOM = "'key': expected room for 8 blocks of 64 bytes"
BUFFERS = [
    kind("none", lambda: None, "expected 2 arrays", "got NoneType"),
    kind("number", lambda: 5, "expected 2 arrays", "got int"),
    kind("generator", lambda: (array for array in ()), "expected 2 arrays", "got generator"),
    kind("no_array", list, "expected 2 arrays", "got 0"),
    kind("one_array", lambda: [zeros(8, 64)], "expected 2 arrays", "got 1"),
    kind("three_arrays", lambda: [zeros(8, 64)] * 3, "expected 2 arrays", "got 3"),
    kind("text", lambda: "ab", IN_HOST, "got str"),
    kind("array_none", lambda: [None, VALUE], IN_HOST, "got NoneType"),
    kind("array_number", lambda: [5, VALUE], IN_HOST, "got int"),
    kind("array_list", lambda: [[0] * 512, VALUE], IN_HOST, "got list"),
    kind("array_class", lambda: [np.ndarray, VALUE], IN_HOST, "got "),
    kind("dictionary", lambda: {"key": zeros(8, 64), "value": VALUE}, IN_HOST, "got str"),
    kind("objects", lambda: [zeros(512, dtype=object), VALUE], IN_HOST, "got ndarray"),
    kind("texts", lambda: [zeros(64, dtype="U8"), VALUE], IN_HOST, "got ndarray"),
    kind("records", lambda: [zeros(512, dtype=[("a", "u1")]), VALUE], IN_HOST, "got ndarray"),
    kind("dates", lambda: [zeros(64, dtype="M8[s]"), VALUE], IN_HOST, "got ndarray"),
    kind("other_byte_order", lambda: [zeros(128, dtype=">f4"), VALUE], IN_HOST, "got ndarray"),
    kind("scalar", lambda: [np.array(5), VALUE], ROOM, "got 0"),
    kind("empty", lambda: [zeros(0), VALUE], ROOM, "got 0"),
    kind("one_byte_short", lambda: [zeros(511), VALUE], ROOM, r"got 7 \(511 bytes\)"),
    kind("one_block_short", lambda: [zeros(7, 64), VALUE], ROOM, "got 7"),
    kind("swapped", lambda: [VALUE, zeros(8, 64)], ROOM, "got 3"),
    kind("transposed", lambda: [zeros(64, 8).T, VALUE], "C-contiguous", r"strides \(1, 8\)"),
    kind("fortran", lambda: [zeros(8, 64).copy("F"), VALUE], "C-contiguous", r"strides \(1, 8\)"),
    kind("every_second", lambda: [zeros(16, 64)[::2], VALUE], "C-contiguous", r"strides \(128, 1"),
    kind("backwards", lambda: [zeros(8, 64)[::-1], VALUE], "C-contiguous", r"strides \(-64, 1\)"),
    kind("one_row_8_times", lambda: [as_strided(zeros(64), (8, 64), (0, 1)), VALUE],
         "C-contiguous", r"strides \(0, 1\)"),
    kind("pages_too_few", lambda: [TensorView.paged(zeros(8, 64), range(7)), VALUE], ROOM, "got 7"),
    kind("pages_too_small", lambda: [TensorView.paged(zeros(8, 32), range(8)), VALUE],
         "'key': expected 64 bytes per block", "got 1 pieces of 32 bytes"),
    kind("heads_too_small", lambda: [TensorView.heads(zeros(2, 32, 5), 4), VALUE],
         "'key': expected 64 bytes per block", "got 2 pieces of 20 bytes"),
    kind("heads_of_other_blocks", lambda: [TensorView.heads(zeros(2, 64, 8), 8), VALUE],
         "'key': expected 64 bytes per block", "got 2 pieces of 64 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "expected", "given"), BUFFERS)
def test_buffers(bench, make, expected, given):
    refused(lambda: bench.namespace.load(bench.match, make()), LayoutMismatchError, expected, given)
    prompt, _ = bench.fresh(32)
    refused(lambda: bench.namespace.store(prompt, make()), LayoutMismatchError, expected, given)


TORCH = [
    kind("torch_no_memory", lambda torch: torch.zeros(512, device="meta"), "Tensor: .*"),
    kind("torch_gradient", lambda torch: torch.zeros(128, requires_grad=True), "Tensor: .*grad"),
    kind("torch_sparse", lambda torch: torch.zeros((8, 16)).to_sparse(), "Tensor: .*"),
    kind("torch_conjugate", lambda torch: torch.zeros(64).to(torch.complex64).conj(), "Tensor: .*"),
    kind("torch_nested", lambda torch: torch.nested.as_nested_tensor(
        [torch.zeros(3), torch.zeros(4)], layout=torch.jagged), "NestedTensor: .*"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "given"), TORCH)
def test_buffers_of_torch(bench, make, given):
    array = make(pytest.importorskip("torch"))
    prompt, _ = bench.fresh(32)
    for call in (
        lambda: bench.namespace.load(bench.match, [array, VALUE]),
        lambda: bench.namespace.store(prompt, [array, VALUE]),
    ):
        refused(call, LayoutMismatchError, IN_HOST, f"got {given}")


FLOATS = KVLayout.for_attention(layers=1, kv_heads=2, head_dim=4, dtype="float32", block_tokens=4)
ELEMENTS = [
    kind("float64", np.float64, "8"),
    kind("float16", np.float16, "2"),
    kind("int64", np.int64, "8"),
    kind("complex64", np.complex64, "8"),
]


@pytest.mark.parametrize(("dtype", "given"), ELEMENTS)
def test_elements_of_another_size_than_the_layouts(bench, dtype, given):
    namespace = bench.store.namespace("floats", FLOATS)
    kv = [np.zeros((8, 128 // np.dtype(dtype).itemsize), dtype) for _ in FLOATS.tensors]
    refused(
        lambda: namespace.store(np.arange(32), kv),
        LayoutMismatchError, r"elements of 4 bytes \(float32\)", f"got elements of {given} bytes",
    )  # fmt: skip


def read_only(array):
    array.flags.writeable = False
    return array


POOL = np.zeros((24, 64), np.uint8)
CACHE = np.zeros((4, 64, 8), np.uint8)
SAME_ROWS = as_strided(np.zeros(256, np.uint8), (2, 32, 8), (128, 8, 1))
VALUES = POOL.reshape(-1)[:192].reshape(8, 24)
READ_ONLY = "'key': the output array is read-only"
APART = "outputs that are apart in memory"
BOTH = "'key' and 'value'"
OUTPUTS = [
    kind("read_only", lambda: [read_only(zeros(8, 64)), VALUE], READ_ONLY),
    kind("bytes", lambda: [bytes(512), VALUE], READ_ONLY),
    kind("read_only_memoryview", lambda: [memoryview(bytes(512)), VALUE], READ_ONLY),
    kind("broadcast", lambda: [np.broadcast_to(np.uint8(0), (8, 64)), VALUE], "C-contiguous"),
    kind("read_only_pages", lambda: [TensorView.paged(read_only(zeros(8, 64)), range(8)), VALUE],
         READ_ONLY),
    kind("twice_the_same", lambda: [POOL, POOL], APART, "'(key' and 'value|value' and 'key)'"),
    kind("overlapping", lambda: [POOL[:8], POOL.reshape(-1)[511:]], APART, BOTH),
    kind("inside_another", lambda: [POOL[:8], POOL.reshape(-1)[100:292]], APART, BOTH),
    kind("a_page_twice", lambda: [TensorView.paged(POOL, [0, 1, 2, 3, 4, 5, 6, 3]), VALUE],
         "'key': .*a page of its own", "page 3 twice"),
    kind("a_page_of_two_tensors",
         lambda: [TensorView.paged(POOL, range(0, 16, 2)),
                  TensorView.paged(POOL[:, :24], [1, 3, 5, 7, 9, 11, 13, 14])], APART,
         BOTH),
    kind("pages_that_overlap",
         lambda: [TensorView.paged(as_strided(POOL, (8, 64), (32, 1)), range(8)), VALUE],
         APART, "blocks of tensor 'key'"),
    kind("pages_in_one_place",
         lambda: [TensorView.paged(as_strided(POOL, (8, 64), (0, 1)), range(8)), VALUE],
         APART, "blocks of tensor 'key'"),
    kind("heads_that_overlap", lambda: [TensorView.heads(SAME_ROWS, 4), VALUE],
         APART, "blocks of tensor 'key'"),
    kind("heads_over_another",
         lambda: [TensorView.heads(CACHE[::2], 4), CACHE.reshape(-1)[1100:1292]], APART,
         BOTH),
    kind("tokens_over_the_heads_of_another",
         lambda: [TensorView.heads(CACHE[:2, :32], 4), CACHE.reshape(-1)[600:]], APART,
         BOTH),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), [
    pytest.param(case.values[0], case.values[1:], id=case.id) for case in OUTPUTS
])  # fmt: skip
def test_outputs(bench, make, said):
    out = make()
    refused(lambda: bench.namespace.load(bench.match, out), LayoutMismatchError, *said)


def test_equal_sources_are_fine(bench):
    """What is only read may be in one place: blocks of zeros in one page, for example."""
    prompt, _ = bench.fresh(32)
    page = TensorView.paged(POOL, [0] * 8)
    assert bench.namespace.store(prompt, [page, POOL.reshape(-1)[:192]]).reason == "stored"
    match = bench.namespace.match(np.append(prompt, 0))
    while match.tokens:
        assert bench.namespace.drop_tail(match)
        match = bench.namespace.match(np.append(prompt, 0))


def test_outputs_in_turn_and_what_is_skipped_are_fine(bench):
    """Keys and values page by page, and one page for all blocks that will not be written."""
    pages = np.full((10, 2, 64), 7, np.uint8)
    table = [9, 9, 9, 9, 3, 0, 5, 2]
    views = [
        TensorView.paged(pages[:, 0], table),
        TensorView.paged(pages[:, 1, :24], table),
    ]
    result = bench.namespace.load(bench.match, views, skip_tokens=16)
    assert (result.tokens, result.by_source["engine"]) == (32, 16)
    heads = [TensorView.heads(CACHE[::2], 4), CACHE.reshape(-1)[300:492]]
    assert bench.namespace.load(bench.match, heads).tokens == 32
    for view, tensor in zip((pages[:, 0], pages[:, 1, :24]), bench.kv, strict=True):
        assert np.array_equal(view[table[4:]], tensor[4:])
    assert (pages[9] == 7).all()


def test_a_store_larger_than_the_arena(bench):
    """Nothing is written; the fixture sees that others are unaffected."""
    wide = KVLayout((TensorSpec("a", 1 << 16),), 4)
    namespace = bench.store.namespace("wide", wide)
    prompt = np.arange(4 * 40)
    kv = Oracle(wide).arrays(prompt)
    held = bench.store.config.arena_bytes
    refused(lambda: namespace.store(prompt, kv), CapacityError, f"40 blocks of {1 << 16}",
            f"an arena holds {held}")  # fmt: skip
    assert namespace.match(np.append(prompt, 0)).tokens == 0


def test_a_store_larger_than_what_is_free_is_a_counted_miss():
    cluster = Cluster(small_config(slots=10), server_nodes=(0,), client_nodes=(0,))
    bench = Bench(cluster.store(cluster.clients[0]))
    prompt, kv = bench.fresh(64)
    assert bench.namespace.store(prompt, kv).reason == "full"
    assert bench.store.stats()["reasons"]["store"]["full"] == 1
    assert bench.store.server_stats()[0]["write_full_count"] == 1
    bench.check_unharmed()


def test_another_layout_is_a_miss(bench):
    """Not an error: it is another namespace."""
    for layout in (KVLayout(SMALL.tensors, 8), KVLayout(SMALL.tensors[::-1], 4), FLOATS):
        match = bench.store.namespace("model", layout).match(np.append(bench.prompt, 99))
        assert (match.tokens, match.reason) == (0, "cold")
    before = bench.store.stats()["reasons"]["match"]["cold"]
    assert before >= 3


def test_a_changed_prompt_is_a_miss(bench):
    match = bench.namespace.match(np.append(bench.prompt + 1, 99))
    assert (match.tokens, match.reason) == (0, "cold")
    assert bench.namespace.load(match, []).tokens == 0


def test_the_error_of_a_load_in_a_job_names_the_tensor_that_does_not_fit():
    def main(store):
        bench = Bench(store)
        out = bench.out()
        refused(
            lambda: bench.namespace.load(bench.match, [out[0], out[1][:7]]),
            LayoutMismatchError, "tensor 'value': expected room for 8 blocks", "got 7",
        )  # fmt: skip
        bench.check_unharmed()

    pt.run(main, pt.Config(memory_bytes=1 << 20, segment_tokens=8))
