"""Anything at all as an argument: refused by a check of ours, or done right; never harmful."""

from __future__ import annotations

import contextlib
import importlib.util

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.lib.stride_tricks import as_strided
from refusals import refused_or_done

import ptstore_mpi as pt
from ptstore_mpi import ConfigError, LayoutMismatchError, TensorView
from ptstore_mpi.testing.actor import SMALL
from ptstore_mpi.testing.oracle import Oracle
from ptstore_mpi.write_targets import check_apart

FIXTURE = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}
FIELDS = sorted(pt.Config.__struct_fields__)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(),
    st.text(),
)  # fmt: skip
DTYPES = st.one_of(
    arrays.scalar_dtypes(), arrays.unicode_string_dtypes(), arrays.array_dtypes(), st.just("O")
)
SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)


@st.composite
def zeros(draw):
    """Draw an array of any type and shape, whole or as a view with strange strides."""
    array = np.zeros(draw(SHAPES), draw(DTYPES))
    match draw(st.integers(0, 4)):
        case 1:
            array = array.T
        case 2 if array.ndim:
            array = array[:: draw(st.sampled_from([-1, 2, 3]))]
        case 3:
            array = np.broadcast_to(array, (2, *array.shape))
        case 4:
            array.flags.writeable = False
    return array


@st.composite
def tensors(draw):
    """Draw a torch tensor of any kind that needs no device."""
    import torch

    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    tensor = torch.zeros(draw(SHAPES), dtype=dtype)
    match draw(st.integers(0, 4)):
        case 1:
            tensor = tensor.to("meta")
        case 2 if dtype.is_floating_point:
            tensor.requires_grad_()
        case 3:
            tensor = tensor.to_sparse()
        case 4:
            tensor = tensor.transpose(0, -1) if tensor.ndim else tensor
    return tensor


THINGS = zeros() | LEAVES
if importlib.util.find_spec("torch") is not None:
    THINGS |= tensors()
ANYTHING = st.recursive(
    THINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(), inner, max_size=2),
    max_leaves=6,
)
BUFFERS = ANYTHING | st.tuples(THINGS, THINGS)


@pytest.fixture
def quick(benches):
    """Return the bench in one process; it is checked once, after all examples."""
    yield benches["local"]
    benches["local"].check_unharmed()


@settings(max_examples=150, **FIXTURE)
@given(tokens=ANYTHING)
def test_any_tokens(quick, tokens):
    match = refused_or_done(lambda: quick.namespace.match(tokens))
    if match is not None:
        assert match.prompt_tokens == len(tokens) > 0
        refused_or_done(lambda: quick.namespace.store(tokens, [np.zeros(1)]))


@settings(max_examples=150, **FIXTURE)
@given(out=BUFFERS)
def test_any_buffers(quick, out):
    """None of them can hold the whole match but by chance, and then they do."""
    result = refused_or_done(lambda: quick.namespace.load(quick.match, out))
    assert result is None or result.tokens == 32
    prompt, _ = quick.fresh(32)
    stored = refused_or_done(lambda: quick.namespace.store(prompt, out))
    assert stored is None or quick.namespace.drop_tail(quick.namespace.match([*prompt, 0]))


@settings(max_examples=100, **FIXTURE)
@given(
    shapes=st.tuples(*(st.sampled_from([(n,), (8, n // 8), (2, n // 2)]) for n in (512, 192))),
    dtypes=st.tuples(*(st.sampled_from(["u1", "i1", "?", "f4", "<u2", ">u2", "c8"]) for _ in "ab")),
    offset=st.integers(0, 600),
)
def test_what_is_accepted_is_filled_with_the_right_bytes(quick, shapes, dtypes, offset):
    """Two outputs somewhere in one memory: apart, or refused."""
    memory = np.full(1400, 0xA5, np.uint8)
    raw = [memory[:512], memory[offset : offset + 192]]
    try:
        out = [raw[i].view(dtypes[i]).reshape(-1, *shapes[i][1:]) for i in range(2)]
    except ValueError:
        assume(False)
    result = refused_or_done(lambda: quick.namespace.load(quick.match, out))
    assert (result is not None) == (offset >= 512 and not any(each[0] == ">" for each in dtypes))
    if result is not None:
        quick.oracle.check(
            quick.prompt, [raw[0].reshape(8, 64), raw[1].reshape(8, 24)], until_tokens=32
        )
        assert (memory[512:offset] == 0xA5).all()


@settings(max_examples=100, **FIXTURE)
@given(match=ANYTHING, count=ANYTHING, layout=ANYTHING, name=ANYTHING)
def test_any_other_argument(quick, match, count, layout, name):
    namespace, store = quick.namespace, quick.store
    prompt, kv = quick.fresh(8)
    refused_or_done(lambda: namespace.load(match, quick.out()))
    refused_or_done(lambda: namespace.drop_tail(match))
    refused_or_done(lambda: namespace.load(quick.match, quick.out(), skip_tokens=count))
    refused_or_done(lambda: namespace.cut(quick.match, np.append(quick.prompt, 99), count))
    refused_or_done(lambda: namespace.cut(quick.match, match, 4))
    refused_or_done(lambda: TensorView.paged(np.zeros((4, 8)), [0]).with_table(match))
    if count is not None and refused_or_done(
        lambda: namespace.store(prompt, kv, verified_tokens=count)
    ):
        namespace.drop_tail(namespace.match([*prompt, 0]))
    refused_or_done(lambda: store.namespace(name, SMALL, salt="s", lora=name))
    refused_or_done(lambda: store.namespace("m", layout))
    refused_or_done(lambda: store.ping(request_bytes=count))
    refused_or_done(lambda: pt.KVLayout(layout, count))
    refused_or_done(lambda: pt.KVLayout((pt.TensorSpec(name, count),), 4, name))
    refused_or_done(lambda: pt.KVLayout.for_attention(
        layers=1, kv_heads=1, head_dim=count, dtype=name))  # fmt: skip


@settings(max_examples=100)
@given(array=THINGS, table=ANYTHING, block_tokens=LEAVES | st.integers(1, 4))
def test_any_view(array, table, block_tokens):
    for call in (
        lambda: TensorView.contiguous(array),
        lambda: TensorView.paged(array, table),
        lambda: TensorView.heads(array, block_tokens),
    ):
        refused_or_done(call)


# -- outputs that overlap ------------------------------------------------------------------------


@st.composite
def outputs(draw):
    """Draw views of blocks of 8 bytes somewhere in one small memory."""
    memory = np.zeros(600, np.uint8)
    views = []
    shared, stride = np.array(draw(st.permutations(range(8)))), draw(st.sampled_from([16, 24]))
    alike, upwards = draw(st.booleans()), draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        part = memory[draw(st.sampled_from([0, 4, 8, 10, 16, 20]) | st.integers(0, 300)) :]
        match 3 if alike else draw(st.integers(0, 2)):
            case 0:
                views.append(TensorView.contiguous(part))
            case 1:
                pages = as_strided(part, (8, 8), (draw(st.integers(4, 30)), 1))
                table = draw(st.just(shared) | st.lists(st.integers(0, 7), min_size=5))
                views.append(TensorView.paged(pages, table))
            case 2:
                heads = as_strided(part, (2, 12, 2), (draw(st.integers(10, 60)), 2, 1))
                views.append(TensorView.heads(heads, 2))
            case 3:
                pages = as_strided(part, (8, 8), (stride, 1))[:: 1 if upwards else -1]
                views.append(TensorView.paged(pages, shared))
    return memory, views


def times_written(memory, views, first, until):
    """Return how often each byte is written, by counting."""
    counts = np.zeros(len(memory), int)
    start = memory.ctypes.data
    for view in views:
        for block in range(first, until):
            place = block if view.block_table is None else view.block_table[block]
            stride = 8 if view.block_count is None else view.block_stride
            pieces = range(view.piece_count if view.block_count is not None else 1)
            size = 8 if view.block_count is None else view.piece_bytes
            for piece in pieces:
                at = view.address - start + place * stride + piece * view.piece_stride
                counts[at : at + size] += 1
    return counts


@settings(max_examples=300)
@given(outputs(), st.integers(0, 3), st.integers(1, 2))
def test_outputs_are_refused_exactly_where_a_byte_is_written_twice(drawn, first, count):
    memory, views = drawn
    twice = times_written(memory, views, first, first + count).max() > 1
    named = [(f"t{place}", view, 8) for place, view in enumerate(views)]
    with pytest.raises(LayoutMismatchError) if twice else contextlib.nullcontext():
        check_apart(named, first=first, until=first + count)


# -- settings ------------------------------------------------------------------------------------


def config_or_refusal(call):
    try:
        config = call()
    except ConfigError:
        return refused_or_done(call)
    assert config.arena_bytes >= 4096
    assert len(config.seed) == 16
    return config


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4))
def test_any_values_of_settings(values):
    config_or_refusal(lambda: pt.Config(**values))
    config_or_refusal(lambda: pt.Config.load(environment={}, **values))


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["1", "0", "-1", "1e3", "nan", "inf", "1GiB", "true"]
)
LINES = st.lists(st.tuples(st.sampled_from([*FIELDS, "typo", "[store]"]), TEXTS), max_size=4)


@settings(max_examples=150)
@given(
    lines=LINES,
    text=st.binary(max_size=40) | st.none(),
    variables=st.dictionaries(st.sampled_from(FIELDS).map(str.upper), TEXTS, max_size=3),
)
def test_any_file_and_environment(tmp_path_factory, lines, text, variables):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    body = "\n".join(f"{name} = {value}" for name, value in lines).encode(errors="replace")
    path.write_bytes(body if text is None else text)
    environment = {f"PTSTORE_{name}": value for name, value in variables.items()}
    config_or_refusal(lambda: pt.Config.load(path, environment=environment))


@settings(max_examples=25)
@given(
    st.fixed_dictionaries(
        {"memory_bytes": st.integers(1 << 15, 1 << 20)},
        optional={
            "segment_tokens": st.integers(1, 9),
            "staging_bytes": st.integers(1, 1 << 20),
            "get_bytes": st.integers(1, 1 << 17) | st.just((1 << 48) - 1),
            "copy_threads": st.integers(0, 9),
            "verify": st.sampled_from(["off", "remote", "always"]),
            "verify_publish": st.booleans(),
            "unconfirmed_count": st.integers(1, 3),
            "gets_in_flight_count": st.integers(1, 3),
            "lease_cap_s": st.floats(0.5, 1e9),
            "match_timeout_s": st.floats(0.5, 1e9),
            "idle": st.sampled_from(["adaptive", "spin"]),
        },
    )
)
def test_a_job_works_with_any_settings_that_it_accepts(values):
    def main(store):
        namespace = refused_or_done(lambda: store.namespace("m", SMALL))
        if namespace is None:
            return
        prompt, out = np.arange(8), Oracle(SMALL).blank(2)
        assert namespace.store(prompt, Oracle(SMALL).arrays(prompt)).reason in ("stored", "full")
        result = namespace.load(namespace.match(np.append(prompt, 1)), out)
        Oracle(SMALL).check(prompt, out, until_tokens=result.tokens)

    refused_or_done(lambda: pt.run(main, pt.Config(**values)))
