"""CRC-32C against google-crc32c, and the checksums of the blocks of a segment."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptstore_mpi import _native


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_the_check_value() -> None:
    assert _native.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


@given(data=st.binary(max_size=2000), initial=st.integers(0, 2**32 - 1))
def test_equals_the_reference(data: bytes, initial: int) -> None:
    array = np.frombuffer(data, np.uint8)
    assert _native.crc32c(array) == google_crc32c.value(data)
    assert _native.crc32c(array, initial) == google_crc32c.extend(initial, data)


@pytest.mark.parametrize("size", [191, 192, 193, 4096, 12_288, 12_289, 100_003, 1_000_000])
def test_equals_the_reference_on_long_buffers(size: int) -> None:
    data = random_bytes(size + 3)[3:]  # unaligned
    assert _native.crc32c(data) == google_crc32c.value(data.tobytes())


@given(data=st.binary(max_size=500), cut=st.integers(0, 500))
def test_can_be_continued(data: bytes, cut: int) -> None:
    array = np.frombuffer(data, np.uint8)
    assert _native.crc32c(array[cut:], _native.crc32c(array[:cut])) == _native.crc32c(array)


@pytest.mark.parametrize("data", [np.zeros(8, np.int8), np.zeros(8, np.uint8)[::2], "abc", None])
def test_other_data_is_refused(data: object) -> None:
    with pytest.raises(TypeError):
        _native.crc32c(data)  # type: ignore[arg-type]


def test_blocks_are_chained_over_their_pieces() -> None:
    block_bytes = np.array([40, 8, 4096], np.int64)
    segment_blocks, offset = 5, 17
    memory = random_bytes(offset + segment_blocks * int(block_bytes.sum()) + 9)
    found = _native.block_checksums(
        memory,
        offset=offset,
        block_bytes=block_bytes,
        segment_blocks=segment_blocks,
        segment_block=1,
        block_count=3,
    )
    assert found.dtype == np.uint32
    for index, block in enumerate(range(1, 4)):
        begin, joined = offset, b""
        for size in block_bytes.tolist():
            joined += memory[begin + block * size : begin + (block + 1) * size].tobytes()
            begin += segment_blocks * size
        assert found[index] == google_crc32c.value(joined)


def test_no_blocks_have_no_checksums() -> None:
    found = _native.block_checksums(
        random_bytes(10),
        offset=10,
        block_bytes=np.array([8], np.int64),
        segment_blocks=0,
        segment_block=0,
        block_count=0,
    )
    assert found.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 1}, "exceeds memory of 80 bytes"),
        ({"offset": -1}, "offset must be at least 0, got -1"),
        ({"segment_block": 1}, "exceeds segment_blocks 10"),
        ({"block_count": -1}, "block_count"),
        ({"segment_blocks": 2**62}, "exceeds memory"),
        ({"block_bytes": np.array([8, -8], np.int64)}, "block_bytes must be at least 1, got -8"),
    ],
)
def test_a_range_that_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "offset": 0,
        "block_bytes": np.array([8], np.int64),
        "segment_blocks": 10,
        "segment_block": 0,
        "block_count": 10,
    }
    memory = random_bytes(80)
    assert _native.block_checksums(memory, **arguments).shape == (10,)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        _native.block_checksums(memory, **(arguments | change))  # type: ignore[arg-type]


def test_block_sizes_are_not_converted() -> None:
    with pytest.raises(TypeError):
        _native.block_checksums(
            random_bytes(80),
            offset=0,
            block_bytes=np.array([8], np.int32),
            segment_blocks=10,
            segment_block=0,
            block_count=10,
        )
