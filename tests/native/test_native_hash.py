"""Block hashes against siphash-cffi and a chain in pure Python."""

from __future__ import annotations

import numpy as np
import pytest
import siphash  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from ptstore_mpi import _native

KEY = bytes(range(16))
ROOT = bytes(range(100, 116))
SIXTEEN_BYTES = st.binary(min_size=16, max_size=16)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def chain(tokens: list[int], block_tokens: int, root: bytes, seed: bytes) -> list[bytes]:
    """Hash the whole blocks as DESIGN words it, with another implementation of the hash."""
    hashes = []
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[first : first + block_tokens]
        message = b"".join(token.to_bytes(4, "little") for token in block)
        root = siphash.siphash_128(seed, root + message)
        hashes.append(root)
    return hashes


@pytest.mark.parametrize("length", range(64))
def test_published_vectors_of_every_length(length: int) -> None:
    message = bytes(range(length))
    assert _native.siphash128(KEY, message) == siphash.siphash_128(KEY, message)


def test_first_published_vector() -> None:
    assert _native.siphash128(KEY, b"").hex() == "a3817f04ba25a8e66df67214c7550293"


@given(key=SIXTEEN_BYTES, message=st.binary(max_size=300))
def test_siphash_equals_the_reference(key: bytes, message: bytes) -> None:
    assert _native.siphash128(key, message) == siphash.siphash_128(key, message)


@given(tokens=TOKENS, block_tokens=st.integers(1, 20), root=SIXTEEN_BYTES, seed=SIXTEEN_BYTES)
def test_blocks_are_chained(tokens: list[int], block_tokens: int, root: bytes, seed: bytes) -> None:
    array = np.array(tokens, dtype=np.uint32)
    hashes = _native.hash_blocks(array, block_tokens=block_tokens, root=root, seed=seed)
    assert hashes.dtype == np.uint8
    assert hashes.shape == (len(tokens) // block_tokens, 16)
    assert [row.tobytes() for row in hashes] == chain(tokens, block_tokens, root, seed)


def test_a_changed_token_changes_its_block_and_all_later_ones() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    before = _native.hash_blocks(tokens, block_tokens=16, root=ROOT, seed=KEY)
    tokens[20] += 1
    after = _native.hash_blocks(tokens, block_tokens=16, root=ROOT, seed=KEY)
    assert (before == after).all(axis=1).tolist() == [True, False, False, False]


def test_the_result_outlives_its_arguments_and_is_writable() -> None:
    hashes = _native.hash_blocks(np.zeros(160_000, np.uint32), block_tokens=16, root=ROOT, seed=KEY)
    copy = hashes.copy()
    hashes[0, 0] ^= 1
    assert (hashes[1:] == copy[1:]).all()


@pytest.mark.parametrize(
    "tokens",
    [
        np.zeros(16, np.int64),
        np.zeros(16, np.int32),
        np.zeros(32, np.uint32)[::2],
        np.zeros((4, 4), np.uint32),
        [1] * 16,
        None,
    ],
)
def test_other_tokens_are_refused_and_not_converted(tokens: object) -> None:
    with pytest.raises(TypeError):
        _native.hash_blocks(tokens, block_tokens=16, root=ROOT, seed=KEY)  # type: ignore[arg-type]


def test_read_only_tokens_are_fine() -> None:
    tokens = np.arange(16, dtype=np.uint32)
    expected = _native.hash_blocks(tokens, block_tokens=16, root=ROOT, seed=KEY)
    tokens.flags.writeable = False
    found = _native.hash_blocks(tokens, block_tokens=16, root=ROOT, seed=KEY)
    assert (found == expected).all()


def test_wrong_values_are_named() -> None:
    tokens = np.zeros(16, np.uint32)
    with pytest.raises(ValueError, match="block_tokens"):
        _native.hash_blocks(tokens, block_tokens=0, root=ROOT, seed=KEY)
    with pytest.raises(ValueError, match="root must be 16 bytes, got 3"):
        _native.hash_blocks(tokens, block_tokens=16, root=b"abc", seed=KEY)
    with pytest.raises(ValueError, match="seed must be 16 bytes, got 17"):
        _native.hash_blocks(tokens, block_tokens=16, root=ROOT, seed=bytes(17))
    with pytest.raises(ValueError, match="key must be 16 bytes"):
        _native.siphash128(b"", b"")
