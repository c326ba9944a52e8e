"""Wrong arguments of the public face: tokens, matches, numbers of tokens, names, layouts, views."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from refusals import refused

import ptstore_mpi as pt
from ptstore_mpi import ConfigError, KVLayout, LayoutMismatchError, TensorSpec, TensorView
from ptstore_mpi.testing.actor import SMALL
from ptstore_mpi.types import SegmentRef


def kind(name, *values):
    return pytest.param(*values, id=name)


FLAT = "flat.* sequence of token ids"
TOKENS = [
    kind("none", None, ValueError, FLAT, r"shape \(\)"),
    kind("number", 5, ValueError, FLAT, r"shape \(\)"),
    kind("text", "abc", ValueError, FLAT, r"shape \(\)"),
    kind("dictionary", {1: 2}, ValueError, FLAT, r"shape \(\)"),
    kind("set", {1, 2}, ValueError, FLAT, r"shape \(\)"),
    kind("generator", (i for i in range(5)), ValueError, FLAT, r"shape \(\)"),
    kind("empty", [], ValueError, FLAT, r"shape \(0,\)"),
    kind("empty_2d", np.zeros((0, 4), int), ValueError, FLAT, r"shape \(0, 4\)"),
    kind("nested", [[1, 2], [3, 4]], ValueError, FLAT, r"shape \(2, 2\)"),
    kind("ragged", [[1], [2, 3]], TypeError, FLAT, "got list: .*inhomogeneous"),
    kind("floats", [1.0, 2.0], TypeError, "integer", "float64"),
    kind("nan", np.full(5, np.nan), TypeError, "integer", "float64"),
    kind("booleans", [True, False], TypeError, "integer", "bool"),
    kind("complex", [1j, 2], TypeError, "integer", "complex128"),
    kind("texts", ["a", "b"], TypeError, "integer", "<U1"),
    kind("mixed", [1, "a"], TypeError, "integer", "<U"),
    kind("with_none", [1, None], TypeError, "integer", "object"),
    kind("dates", np.array([1, 2], "datetime64[s]"), TypeError, "integer", "datetime64"),
    kind("durations", np.array([1, 2], "timedelta64[s]"), TypeError, "integer", "timedelta64"),
    kind("records", np.zeros(5, [("a", "i4")]), TypeError, "integer", r"\('a', '<i4'\)"),
    kind("negative", [-1, 2], ValueError, r"0 \.\. 4294967295", r"-1 \.\. 2"),
    kind("33_bits", [1, 2**32], ValueError, r"0 \.\. 4294967295", r"1 \.\. 4294967296"),
    kind("64_bits", np.array([2**64 - 1], np.uint64), ValueError, r"0 \.\.", "184467440737095516"),
    kind("70_bits", [2**70], TypeError, "integer", "object"),
]


def in_torch(name, make, *said):
    """Return a kind that needs torch; ``make`` gets the module."""
    return kind(f"torch_{name}", make, *said)


TORCH_TOKENS = [
    in_torch("floats", lambda torch: torch.zeros(5), "integer", "float32"),
    in_torch("bfloat16", lambda torch: torch.zeros(5).bfloat16(), FLAT, "Tensor: .*BFloat16"),
    in_torch("gradient", lambda torch: torch.zeros(5, requires_grad=True), FLAT, "requires grad"),
    in_torch("sparse", lambda torch: torch.zeros(5).to_sparse(), FLAT, "Sparse"),
    in_torch("no_memory", lambda torch: torch.zeros(5, device="meta"), FLAT, "meta"),
]


@pytest.mark.parametrize(("tokens", "error", "expected", "given"), TOKENS)
def test_tokens(bench, tokens, error, expected, given):
    for call in (
        lambda: bench.namespace.match(tokens),
        lambda: bench.namespace.store(tokens, bench.kv),
        lambda: bench.namespace.block_hashes(tokens),
    ):
        refused(call, error, expected, given)


@pytest.mark.parametrize(("make", "expected", "given"), TORCH_TOKENS)
def test_tokens_of_torch(bench, make, expected, given):
    tokens = make(pytest.importorskip("torch"))
    refused(lambda: bench.namespace.match(tokens), TypeError, expected, given)
    refused(lambda: bench.namespace.store(tokens, bench.kv), TypeError, expected, given)


def test_more_tokens_than_the_kv_holds(bench):
    refused(
        lambda: bench.namespace.store(np.arange(36), bench.kv),
        LayoutMismatchError,
        "room for 9 blocks of 64 bytes",
        "got 8 ",
    )


MATCHES = [
    kind("none", lambda match: None, TypeError, "a Match", "NoneType"),
    kind("tuple", lambda match: (1, 2), TypeError, "a Match", "tuple"),
    kind("a_load_result", lambda match: pt.LoadResult(0), TypeError, "a Match", "LoadResult"),
    kind("made_up", lambda match: pt.Match(0, 5, "cold"), ValueError, "of this", "no namespace"),
    kind(
        "of_no_namespace", lambda match: dataclasses.replace(match, namespace=None),
        ValueError, "of this namespace", "no namespace",
    ),
    kind(
        "of_another_namespace", lambda match: dataclasses.replace(match, namespace=b"x" * 16),
        ValueError, "of this namespace", (b"x" * 16).hex(),
    ),
    kind(
        "shortened", lambda match: dataclasses.replace(match, tokens=16),
        ValueError, "32 tokens in its segments", "tokens = 16",
    ),
    kind(
        "lengthened", lambda match: dataclasses.replace(match, tokens=64),
        ValueError, "32 tokens in its segments", "tokens = 64",
    ),
    kind(
        "tokens_of_text", lambda match: dataclasses.replace(match, tokens="32"),
        ValueError, "32 tokens in its segments", "tokens = '32'",
    ),
    kind(
        "segments_of_text", lambda match: dataclasses.replace(match, segments=("a",)),
        TypeError, "a tuple of SegmentRef", "'a'",
    ),
    kind(
        "no_segments", lambda match: dataclasses.replace(match, segments=None),
        TypeError, "a tuple of SegmentRef", "None",
    ),
    kind(
        "of_a_larger_job",
        lambda match: dataclasses.replace(
            match, segments=(SegmentRef(7 << 48, 8, b"h" * 16),), tokens=32
        ),
        ValueError, r"of this job, which has \d server", "names server 7",
    ),
    kind(
        "of_a_shorter_prompt", lambda match: dataclasses.replace(match, prompt_tokens=31),
        ValueError, "of a prompt of at least 32 tokens", "prompt_tokens = 31",
    ),
    kind(
        "of_no_prompt", lambda match: dataclasses.replace(match, prompt_tokens=None),
        ValueError, "of a prompt of at least 32 tokens", "prompt_tokens = None",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "expected", "given"), MATCHES)
def test_matches(bench, change, error, expected, given):
    match = change(bench.match)
    refused(lambda: bench.namespace.load(match, bench.out()), error, expected, given)
    refused(lambda: bench.namespace.drop_tail(match), error, expected, given)
    prompt = np.append(bench.prompt, 99)
    refused(lambda: bench.namespace.cut(match, prompt, 4), error, expected, given)


BLOCKS = [
    kind("negative", -4, ValueError, "multiple of block_tokens", "-4"),
    kind("part_of_a_block", 6, ValueError, "multiple of block_tokens", "6"),
    kind("float", 4.0, TypeError, "an integer", r"4\.0"),
    kind("text", "4", TypeError, "an integer", "'4'"),
    kind("list", [4], TypeError, "an integer", r"\[4\]"),
    kind("array", np.array([4]), TypeError, "an integer", r"array\(\[4\]\)"),
    kind("boolean", True, ValueError, "multiple of block_tokens", "True"),
]


@pytest.mark.parametrize(("tokens", "error", "expected", "given"), BLOCKS)
def test_numbers_of_tokens(bench, tokens, error, expected, given):
    refused(
        lambda: bench.namespace.load(bench.match, bench.out(), skip_tokens=tokens),
        error, f"skip_tokens.*{expected}", given,
    )  # fmt: skip
    refused(
        lambda: bench.namespace.cut(bench.match, np.append(bench.prompt, 99), tokens),
        error, f"token_count.*{expected}", given,
    )  # fmt: skip
    prompt, kv = bench.fresh()
    refused(
        lambda: bench.namespace.store(prompt, kv, verified_tokens=tokens),
        error, f"verified_tokens.*{expected}", given,
    )  # fmt: skip


@pytest.mark.parametrize("progress", [0, "x", [1]])
def test_progress_is_a_function(bench, progress):
    refused(
        lambda: bench.namespace.load(bench.match, bench.out(), progress=progress),
        TypeError, "progress: expected a function", re.escape(repr(progress)),
    )  # fmt: skip


WIDE = KVLayout((TensorSpec("a", 1 << 47),), 4)
NAMESPACES = [
    kind("no_layout", lambda s: s.namespace("m", None), TypeError, "a KVLayout", "None"),
    kind("layout_of_text", lambda s: s.namespace("m", "x"), TypeError, "a KVLayout", "'x'"),
    kind("layout_dictionary", lambda s: s.namespace("m", {}), TypeError, "a KVLayout", "{}"),
    kind("no_model", lambda s: s.namespace(None, SMALL), TypeError, "model: .*text", "None"),
    kind("model_number", lambda s: s.namespace(5, SMALL), TypeError, "model: .*text", "5"),
    kind("model_bytes", lambda s: s.namespace(b"x", SMALL), TypeError, "model: .*text", "b'x'"),
    kind("salt", lambda s: s.namespace("m", SMALL, salt=5), TypeError, "salt: .*text", "5"),
    kind("identity", lambda s: s.namespace("m", SMALL, lora=7), TypeError, "lora: .*text", "7"),
    kind("surrogate", lambda s: s.namespace("\udc80", SMALL), ValueError, "Unicode", "udc80"),
    kind(
        "blocks_that_do_not_fill_a_segment", lambda s: s.namespace("m", KVLayout(SMALL.tensors, 5)),
        ConfigError, r"a multiple of the layout's block_tokens \(5\)", "got 8",
    ),
    kind("no_memory_to_stage", lambda s: s.namespace("m", WIDE), ConfigError, "bytes to stage",
         "no memory of 562949953421312"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "expected", "given"), NAMESPACES)
def test_namespaces(bench, call, error, expected, given):
    refused(lambda: call(bench.store), error, expected, given)


PINGS = [
    kind("negative", {"request_bytes": -1}, ValueError, r"request_bytes: .*0 \.\.", "-1"),
    kind("huge", {"reply_bytes": 1 << 60}, ValueError, r"reply_bytes: .*0 \.\.", str(1 << 60)),
    kind("text", {"request_bytes": "9"}, TypeError, "an integer", "'9'"),
    kind("float", {"reply_bytes": 1.5}, TypeError, "an integer", r"1\.5"),
    kind("none", {"count": 0}, ValueError, r"count: .*1 \.\. 4096", "0"),
]


@pytest.mark.parametrize(("sizes", "error", "expected", "given"), PINGS)
def test_pings(bench, sizes, error, expected, given):
    refused(lambda: bench.store.ping(**sizes), error, expected, given)


ATTENTION = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
LEAST = "an integer of at least 1"


def attention(**changes):
    return KVLayout.for_attention(**{**ATTENTION, **changes})


LAYOUTS = [
    kind("no_tensors", lambda: KVLayout((), 4), "at least one tensor", "none"),
    kind("tensors_none", lambda: KVLayout(None, 4), "at least one tensor", "none"),
    kind("tensors_number", lambda: KVLayout(5, 4), "tuple of TensorSpec", "got 5"),
    kind("pairs", lambda: KVLayout((("a", 4),), 4), "TensorSpec", r"\('a', 4\)"),
    kind("name_number", lambda: KVLayout((TensorSpec(5, 4),), 4), "TensorSpec", "name=5"),
    kind("name_list", lambda: KVLayout((TensorSpec([], 4),), 4), "TensorSpec", r"name=\[\]"),
    kind("two_names", lambda: KVLayout((TensorSpec("a", 4),) * 2, 4), "unique", "twice: a"),
    kind("block_bytes_0", lambda: KVLayout((TensorSpec("a", 0),), 4), LEAST, "got 0"),
    kind("block_bytes_float", lambda: KVLayout((TensorSpec("a", 4.0),), 4), LEAST, r"got 4\.0"),
    kind("block_bytes_huge", lambda: KVLayout((TensorSpec("a", 2**60),), 4), "at most", str(2**60)),
    kind("block_tokens_0", lambda: KVLayout(SMALL.tensors, 0), f"block_tokens.*{LEAST}", "got 0"),
    kind("block_tokens_text", lambda: KVLayout(SMALL.tensors, "4"), LEAST, "got '4'"),
    kind("block_tokens_boolean", lambda: KVLayout(SMALL.tensors, True), LEAST, "got True"),
    kind("dtype_none", lambda: KVLayout(SMALL.tensors, 4, None), "dtype must be a name", "None"),
    kind("dtype_unknown", lambda: attention(dtype="float31"), "one of .*float32", "'float31'"),
    kind("dtype_class", lambda: attention(dtype=np.float32), "one of .*float32", "numpy.float32"),
    kind("dtype_list", lambda: attention(dtype=[]), "one of .*float32", r"\[\]"),
    kind("layers_negative", lambda: attention(layers=-1), f"layers.*{LEAST}", "-1"),
    kind("kv_heads_float", lambda: attention(kv_heads=1.5), f"kv_heads.*{LEAST}", r"1\.5"),
    kind("head_dim_none", lambda: attention(head_dim=None), f"head_dim.*{LEAST}", "None"),
    kind("attention_blocks", lambda: attention(block_tokens="a"), f"block_tokens.*{LEAST}", "'a'"),
]


@pytest.mark.parametrize(("call", "expected", "given"), LAYOUTS)
def test_layouts(call, expected, given):
    refused(call, ConfigError, expected, given)


PAGES, HEADS = np.zeros((4, 8)), np.zeros((2, 8, 4))
TABLE = "1-d table of integers"
VIEWS = [
    kind("contiguous_none", lambda: TensorView.contiguous(None), "in host memory", "NoneType"),
    kind("contiguous_list", lambda: TensorView.contiguous([1]), "in host memory", "list"),
    kind("contiguous_text", lambda: TensorView.contiguous("a"), "in host memory", "str"),
    kind("contiguous_gaps", lambda: TensorView.contiguous(PAGES[:, ::2]), "C-contig", r"\(64, 16"),
    kind("paged_none", lambda: TensorView.paged(None, [0]), "in host memory", "NoneType"),
    kind("paged_scalar", lambda: TensorView.paged(np.zeros(()), [0]), r"\[blocks", "without axes"),
    kind("paged_gaps", lambda: TensorView.paged(PAGES[:, ::2], [0]), "dense blocks", r"\(64, 16"),
    kind("table_none", lambda: TensorView.paged(PAGES, None), TABLE, r"shape \(\)"),
    kind("table_text", lambda: TensorView.paged(PAGES, "ab"), TABLE, r"shape \(\)"),
    kind("table_ragged", lambda: TensorView.paged(PAGES, [[1], [1, 2]]), TABLE, "inhomogeneous"),
    kind("table_2d", lambda: TensorView.paged(PAGES, [[0, 1]]), TABLE, r"shape \(1, 2\)"),
    kind("table_floats", lambda: TensorView.paged(PAGES, [0.5]), TABLE, "float64"),
    kind("table_booleans", lambda: TensorView.paged(PAGES, [True]), TABLE, "bool"),
    kind("table_beyond", lambda: TensorView.paged(PAGES, [4]), r"0\.\.3", r"4\.\.4"),
    kind("table_negative", lambda: TensorView.paged(PAGES, [-1]), r"0\.\.3", r"-1\.\.-1"),
    kind("table_64_bits", lambda: TensorView.paged(PAGES, [2**63]), r"0\.\.3", str(2**63)),
    kind("table_70_bits", lambda: TensorView.paged(PAGES, [2**70]), TABLE, "object"),
    kind("heads_none", lambda: TensorView.heads(None, 4), "in host memory", "NoneType"),
    kind("heads_2d", lambda: TensorView.heads(PAGES, 4), r"\[heads, tokens, dim\]", r"\(4, 8\)"),
    kind("heads_batch", lambda: TensorView.heads(np.zeros((2, 2, 8, 4)), 4), "heads,", r"\(2, 2"),
    kind("heads_gaps", lambda: TensorView.heads(HEADS[:, :, ::2], 4), "dense tokens", "strides"),
    kind("heads_blocks_0", lambda: TensorView.heads(HEADS, 0), LEAST, "got 0"),
    kind("heads_blocks_text", lambda: TensorView.heads(HEADS, "4"), LEAST, "got '4'"),
    kind("heads_blocks_float", lambda: TensorView.heads(HEADS, 4.0), LEAST, r"got 4\.0"),
]


@pytest.mark.parametrize(("call", "expected", "given"), VIEWS)
def test_views(call, expected, given):
    refused(call, LayoutMismatchError, expected, given)


CLOSED = {
    "namespace": lambda store, namespace, match, kv: store.namespace("model", SMALL),
    "match": lambda store, namespace, match, kv: namespace.match(np.arange(33)),
    "load": lambda store, namespace, match, kv: namespace.load(match, kv),
    "store": lambda store, namespace, match, kv: namespace.store(np.arange(32), kv),
    "clear": lambda store, namespace, match, kv: namespace.clear(),
    "drop_tail": lambda store, namespace, match, kv: namespace.drop_tail(match),
    "server_stats": lambda store, namespace, match, kv: store.server_stats(),
    "ping": lambda store, namespace, match, kv: store.ping(),
}


@pytest.mark.parametrize("name", CLOSED)
def test_use_after_close(name):
    job = pt.launch(pt.Config(memory_bytes=1 << 20, segment_tokens=8))
    namespace = job.client.namespace("model", SMALL)
    kv = [np.zeros((8, spec.block_bytes), np.uint8) for spec in SMALL.tensors]
    namespace.store(np.arange(32), kv)
    match = namespace.match(np.arange(33))
    job.close()
    refused(
        lambda: CLOSED[name](job.client, namespace, match, kv),
        pt.ClosedError, "the store is closed", "its job has ended",
    )  # fmt: skip
