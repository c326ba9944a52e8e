"""Plan of a load: parts, merged Gets, and turns between owners."""

from __future__ import annotations

import numpy as np
import pytest

from ptstore_mpi.protocol.context import Extent
from ptstore_mpi.protocol.messages import Grant
from ptstore_mpi.protocol.plan import Piece, group, interleave, parts_of
from ptstore_mpi.types import SegmentRef, pack_segment_id

SIZES = (1024, 3072)  # bytes of one block of each tensor: a block is a page
BLOCK = sum(SIZES)


def ref(owner, slot, blocks):
    return SegmentRef(pack_segment_id(owner, slot, 0), blocks, b"h" * 16)


def granted(parts, offsets, segment_blocks):
    for part, offset, blocks in zip(parts, offsets, segment_blocks, strict=True):
        part.grant = Grant(offset, blocks, b"")
    return parts


def spans(parts):
    return [(part.first_block, part.block_count, part.view_block) for part in parts]


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        (0, [(0, 4, 0), (0, 2, 4), (0, 3, 6)]),
        (1, [(1, 3, 1), (0, 2, 4), (0, 3, 6)]),
        (4, [(0, 2, 4), (0, 3, 6)]),
        (5, [(1, 1, 5), (0, 3, 6)]),
        (8, [(2, 1, 8)]),
        (9, []),
        (99, []),
    ],
)
def test_parts_beyond_the_skipped_blocks(skip, expected):
    refs = [ref(0, 0, 4), ref(1, 0, 2), ref(0, 1, 3)]
    parts = parts_of(refs, skip)
    assert spans(parts) == expected
    assert [part.ref for part in parts] == refs[len(refs) - len(parts) :]


def test_neighbours_in_prefix_and_arena_are_one_get():
    parts = parts_of([ref(0, slot, 2) for slot in range(3)], 0)
    granted(parts, [8192, 16384, 24576], [2, 2, 2])
    (fetch,) = group(parts, SIZES, 1 << 20)
    assert fetch.parts == parts
    assert fetch.nbytes == 6 * BLOCK
    assert fetch.pieces_left == [Piece(8192, 0, 6 * BLOCK)]


@pytest.mark.parametrize(
    ("owners", "offsets", "segment_blocks", "fetches"),
    [
        ((0, 0), (0, 2 * BLOCK), (2, 2), 1),
        ((0, 1), (0, 2 * BLOCK), (2, 2), 2),  # another owner
        ((0, 0), (0, 3 * BLOCK), (2, 2), 2),  # a gap between them
        ((0, 0), (2 * BLOCK, 0), (2, 2), 2),  # the wrong way round
        ((0, 0), (0, 2 * BLOCK), (3, 2), 2),  # the first is not whole
        ((0, 0), (0, 2 * BLOCK), (2, 3), 2),  # the second is not whole
    ],
)
def test_what_is_merged(owners, offsets, segment_blocks, fetches):
    parts = parts_of([ref(owner, slot, 2) for slot, owner in enumerate(owners)], 0)
    granted(parts, offsets, segment_blocks)
    assert len(group(parts, SIZES, 1 << 20)) == fetches


def test_a_fetch_is_never_larger_than_a_get_unless_one_segment_is():
    parts = parts_of([ref(0, slot, 2) for slot in range(5)], 0)
    granted(parts, [2 * BLOCK * slot for slot in range(5)], [2] * 5)
    assert [len(f.parts) for f in group(parts, SIZES, 4 * BLOCK)] == [2, 2, 1]
    small = group(parts, SIZES, BLOCK + 100)
    assert [len(fetch.parts) for fetch in small] == [1] * 5
    assert small[1].pieces_left == [
        Piece(2 * BLOCK, 0, BLOCK + 100),
        Piece(3 * BLOCK + 100, BLOCK + 100, BLOCK - 100),
    ]


def test_part_of_a_segment_is_one_piece_per_tensor():
    (part,) = granted(parts_of([ref(0, 0, 3)], 1), [4096], [5])
    (fetch,) = group([part], SIZES, 1 << 20)
    # tensor 0 has 5 blocks of 1024 at 4096; tensor 1 follows; blocks 1 and 2 are wanted
    assert fetch.pieces_left == [
        Piece(4096 + 1024, 0, 2 * 1024),
        Piece(4096 + 5 * 1024 + 3072, 2 * 1024, 2 * 3072),
    ]
    assert fetch.nbytes == 2 * BLOCK


def test_the_beginning_of_a_segment_does_not_merge_across_tensors():
    (part,) = granted(parts_of([ref(0, 0, 2)], 0), [0], [4])
    (fetch,) = group([part], SIZES, 1 << 20)
    assert [piece.nbytes for piece in fetch.pieces_left] == [2 * 1024, 2 * 3072]


@pytest.mark.parametrize("get_bytes", [1, 100, 4096, 10**6])
def test_pieces_bring_exactly_the_wanted_bytes(get_bytes):
    """Carry the plan out on real bytes and compare with the image that was asked for."""
    arena = np.random.default_rng(1).integers(0, 256, 1 << 15, np.uint8)
    parts = granted(
        parts_of([ref(0, 0, 2), ref(0, 1, 2), ref(0, 2, 3)], 1), [0, 60, 999], [3, 2, 4]
    )
    sizes = (7, 13)
    for fetch in group(parts, sizes, get_bytes):
        staging = np.zeros(fetch.nbytes, np.uint8)
        for piece in fetch.pieces_left:
            end = piece.start + piece.nbytes
            staging[piece.start : end] = arena[piece.offset :][: piece.nbytes]
        fetch.extent = Extent(0, fetch.nbytes)
        for part, image in fetch.images(sum(sizes)):
            wanted = []
            start = part.grant.offset
            for size in sizes:
                wanted.append(arena[start + part.first_block * size :][: part.block_count * size])
                start += part.grant.segment_blocks * size
            nbytes = part.block_count * sum(sizes)
            assert np.array_equal(staging[image.offset :][:nbytes], np.concatenate(wanted))
            assert (image.segment_blocks, image.first_block) == (part.block_count, 0)


def test_owners_take_turns_each_in_prefix_order():
    parts = parts_of([ref(owner, slot, 1) for slot, owner in enumerate((0, 0, 0, 1, 2, 1))], 0)
    granted(parts, [10**6 * i for i in range(6)], [1] * 6)
    turns = interleave(group(parts, SIZES, 1))
    assert [fetch.parts[0].view_block for fetch in turns] == [0, 3, 4, 1, 5, 2]
    assert interleave([]) == []
