"""The oracle itself: any other token, position, tensor, salt or byte must be seen."""

from __future__ import annotations

import numpy as np
import pytest

from ptstore_mpi import KVLayout, TensorSpec
from ptstore_mpi.testing.buffers import available_kinds, make_buffers
from ptstore_mpi.testing.oracle import BLANK, Oracle

LAYOUT = KVLayout((TensorSpec("a", 24), TensorSpec("b", 13)), block_tokens=4)
TOKENS = np.arange(40)


def test_a_block_depends_on_every_token_before_it_and_on_none_after():
    oracle = Oracle(LAYOUT)
    before = oracle.arrays(TOKENS)
    for position in range(40):
        other = TOKENS.copy()
        other[position] += 1
        for old, new in zip(before, oracle.arrays(other), strict=True):
            changed = (old != new).any(axis=1)
            assert changed.tolist() == [block >= position // 4 for block in range(10)]


def test_swapped_tokens_tensors_and_salts_differ():
    oracle = Oracle(LAYOUT)
    swapped = TOKENS.copy()
    swapped[[1, 2]] = swapped[[2, 1]]
    first = oracle.blocks(TOKENS, 0)
    assert (first != oracle.blocks(swapped, 0)).any(axis=1).all()
    assert (first[:, :13] != oracle.blocks(TOKENS, 1)).any(axis=1).all()
    assert (first != Oracle(LAYOUT, salt=1).blocks(TOKENS, 0)).any(axis=1).all()
    assert len({row.tobytes() for row in first}) == 10


def test_the_same_everywhere_and_for_every_integer_type():
    oracle = Oracle(LAYOUT)
    assert oracle.blocks(TOKENS, 1)[2].tobytes().hex() == "5c35ba866e24e0726e803c451e"
    for kind in (np.uint8, np.int32, np.uint64):
        assert np.array_equal(oracle.blocks(TOKENS.astype(kind), 0), oracle.blocks(TOKENS, 0))
    assert np.array_equal(oracle.blocks(TOKENS.tolist(), 0), oracle.blocks(TOKENS, 0))


def test_check_names_the_first_wrong_block():
    oracle = Oracle(LAYOUT)
    arrays = oracle.arrays(TOKENS)
    oracle.check(TOKENS, arrays, until_tokens=40)
    arrays[1][6, 12] ^= 1
    oracle.check(TOKENS, arrays, until_tokens=24)
    oracle.check(TOKENS, arrays, from_tokens=28, until_tokens=40)
    with pytest.raises(AssertionError, match=r"'b': block 6 .*1 of 10"):
        oracle.check(TOKENS, arrays, until_tokens=40)
    with pytest.raises(AssertionError, match="'a': block 0"):
        oracle.check(TOKENS, oracle.blank(10), until_tokens=40)
    with pytest.raises(AssertionError, match=r"'a': expected .*\(10, 24\)"):
        oracle.check(TOKENS, [array[:5] for array in arrays], until_tokens=40)


def test_blank_is_not_what_any_block_holds():
    assert all((array == BLANK).all() for array in Oracle(LAYOUT).blank(3))


@pytest.mark.parametrize("kind", available_kinds())
def test_buffers_give_back_what_they_were_made_of(kind):
    layout = KVLayout.for_attention(
        layers=1, kv_heads=2, head_dim=3, dtype="float32", block_tokens=4
    )
    blocks = Oracle(layout).arrays(TOKENS)
    buffers = make_buffers(kind, layout, blocks)
    assert len(buffers.views) == 2
    for found, expected in zip(buffers.read(), blocks, strict=True):
        assert np.array_equal(found, expected)
