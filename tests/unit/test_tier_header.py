"""The header of a slot: whole or nothing, and equal only to its own."""

from __future__ import annotations

import pytest
from tier_hand import PAGE, block_sums, content_of, payload_of

from ptstore_mpi.tiers.header import SlotPlace, pack_header, parse_header

PLACE = SlotPlace(b"t" * 16, 7, 3 * PAGE)


@pytest.mark.parametrize(
    ("blocks", "tensors", "pages"), [(1, 1, 1), (16, 64, 1), (200, 2, 2), (16, 600, 2)]
)
def test_a_header_says_all_that_a_later_job_needs(blocks, tensors, pages):
    content = content_of(9, blocks=blocks, tensor_bytes=(24,) * tensors)
    sums = block_sums(content, payload_of(content))
    packed = pack_header(PLACE, content, sums)
    assert len(packed) == content.header_bytes == pages * PAGE
    found = parse_header(packed + b"payload")
    assert found.place == PLACE
    assert found.content.namespace == content.namespace
    assert found.content.segment == 9
    assert found.content.tensor_bytes == content.tensor_bytes
    assert found.content.hashes.tolist() == content.hashes.tolist()
    assert found.content.checksums == sums
    assert found.content.parent_hash == content.parent_hash


def test_a_header_with_any_bit_flipped_is_none():
    content = content_of()
    packed = bytearray(pack_header(PLACE, content, block_sums(content, payload_of(content))))
    for at in [*range(300), PAGE - 1]:
        packed[at] ^= 0x10
        assert parse_header(bytes(packed)) is None, at
        packed[at] ^= 0x10
    assert parse_header(bytes(packed)) is not None
    assert parse_header(bytes(packed[: PAGE - 1])) is None
    assert parse_header(b"") is None
