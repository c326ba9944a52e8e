"""The owned cache of one server, state by state: room, leases, zombies, index."""

from __future__ import annotations

import pytest
from hand import NAMESPACE, TENSOR_BYTES, hashes_of

from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.room import Room
from ptstore_mpi.cache.segment import Record, SegmentState
from ptstore_mpi.types import SegmentRef

PAGE = 4096
META = 1024  # of a segment
BLOCK_META = 80
A, B = (1, 10), (2, 10)  # lease keys of two clients


def reserve(cache, blocks, *, counts=None, inherited=()):
    record = Record(NAMESPACE, TENSOR_BYTES, tuple(inherited), len(inherited))
    hashes = hashes_of(*blocks)
    counts = [len(blocks)] if counts is None else counts
    return cache.reserve(record, hashes[len(hashes) - sum(counts) :], counts)


def publish(cache, blocks, **options):
    segments = reserve(cache, blocks, **options)
    cache.publish(segments, b"")
    return segments


def used(cache):
    return cache.room.capacity_bytes - cache.room.free_bytes


def test_a_region_is_contiguous_and_every_segment_whole_pages():
    cache = OwnedCache(0, Room(64 * PAGE))
    segments = reserve(cache, [1, 2, 3, 4, 5, 6, 7], counts=[3, 3, 1])
    assert [(s.offset, s.nbytes) for s in segments] == [
        (0, 2 * PAGE),
        (2 * PAGE, 2 * PAGE),
        (4 * PAGE, PAGE),
    ]
    assert cache.reserved_bytes == 5 * PAGE
    assert cache.metadata_bytes == 3 * META + 7 * BLOCK_META
    assert used(cache) == cache.reserved_bytes + cache.metadata_bytes
    assert [ref.block_count for ref in segments[0].record.refs] == [3, 3, 1]
    assert [s.place for s in segments] == [0, 1, 2]
    assert [s.parent for s in segments] == [None, *segments[0].record.refs[:2]]
    assert [list(s.links.items()) for s in segments] == [
        [(segments[1].serial, segments[1].id)],
        [(segments[2].serial, segments[2].id)],
        [],
    ]


def test_without_contiguous_room_a_region_is_in_pieces_or_not_at_all():
    cache = OwnedCache(0, Room(64 * PAGE, populated_bytes=8 * PAGE))
    singles = [publish(cache, [block], counts=[1]) for block in range(1, 9)]
    for (segment,) in singles[:6:2]:
        cache.retire(segment, now=0.0)
    free = cache.room.free_bytes
    assert reserve(cache, range(50, 54), counts=[1] * 4) is None
    assert cache.room.free_bytes == free, "nothing taken"
    segments = reserve(cache, range(50, 53), counts=[1] * 3)
    assert [segment.offset for segment in segments] == [0, 2 * PAGE, 4 * PAGE]


def test_inherited_refs_are_part_of_the_record_and_of_its_cost():
    cache = OwnedCache(0, Room(64 * PAGE))
    inherited = [SegmentRef(1 << 48, 2, bytes(hashes_of(1, 2)[1]))]
    (segment,) = reserve(cache, [1, 2, 3], counts=[1], inherited=inherited)
    assert segment.parent == inherited[0]
    assert cache.metadata_bytes == META + BLOCK_META + 16
    cache.publish([segment], b"")
    match = cache.match(hashes_of(1, 2, 3))
    assert match == (*inherited, SegmentRef(segment.id, 1, bytes(hashes_of(1, 2, 3)[2])))


def test_publish_makes_every_block_visible_in_one_step():
    cache = OwnedCache(0, Room(64 * PAGE))
    segments = reserve(cache, [1, 2, 3], counts=[2, 1])
    hashes = hashes_of(1, 2, 3)
    assert cache.match(hashes) == ()
    assert not cache.is_published(bytes(hashes[2]))
    cache.publish(segments, b"aaaabbbbcccc")
    assert [s.checksums for s in segments] == [b"aaaabbbb", b"cccc"]
    assert all(cache.is_published(bytes(block)) for block in hashes)
    assert cache.match(hashes) == segments[0].record.refs
    assert cache.match(hashes[:1]) == (SegmentRef(segments[0].id, 1, bytes(hashes[0])),)
    assert cache.counters() == {
        "capacity_bytes": 64 * PAGE,
        "free_bytes": 62 * PAGE - 2 * META - 3 * BLOCK_META,
        "owned_bytes": 2 * PAGE,
        "reserved_bytes": 0,
        "zombie_bytes": 0,
        "metadata_bytes": 2 * META + 3 * BLOCK_META,
        "leased_bytes": 0,
        "segment_count": 2,
        "block_count": 3,
        "retired_slot_count": 0,
    }


def test_full_by_metadata_by_bytes_and_by_fragments():
    cache = OwnedCache(0, Room(4 * PAGE))
    assert reserve(cache, range(8)) is None, "4 pages leave nothing for the metadata"
    first, second, third = (publish(cache, [10 * n])[0] for n in (1, 2, 3))
    assert reserve(cache, [40]) is None, "a page is free, but not its metadata"
    assert cache.room.free_bytes == PAGE - 3 * (META + BLOCK_META)
    cache.retire(first, 0.0)
    cache.retire(third, 0.0)
    assert cache.room.free_bytes > 2 * PAGE
    assert reserve(cache, [50, 51, 52, 53]) is not None, "page 2 and 3 coalesce"
    assert second.state is SegmentState.PUBLISHED
    cache = OwnedCache(0, Room(5 * PAGE))
    first, second, third = (publish(cache, [10 * n])[0] for n in (1, 2, 3))
    cache.retire(first, 0.0)
    (top,) = publish(cache, [5, 6, 7], counts=[3])
    assert (top.offset, second.offset) == (3 * PAGE, PAGE)
    cache.retire(third, 0.0)
    assert reserve(cache, [8, 9, 10], counts=[3]) is None, "two pages are free, but apart"


def test_a_refused_reserve_changes_nothing():
    cache = OwnedCache(0, Room(3 * PAGE))
    before = cache.counters()
    assert reserve(cache, range(12)) is None
    assert cache.counters() == before
    assert list(cache.slots) == []


def test_only_populated_pages_are_handed_out():
    cache = OwnedCache(0, Room(16 * PAGE, populated_bytes=0))
    assert reserve(cache, [1]) is None
    assert not cache.room.is_populated
    assert cache.room.grow(2 * PAGE) is True
    assert cache.room.grow(2 * PAGE) is False
    assert reserve(cache, [1, 2])[0].offset == 0
    assert reserve(cache, range(3, 9)) is None
    cache.room.grow(16 * PAGE)
    assert cache.room.is_populated
    assert reserve(cache, range(3, 9))[0].offset == PAGE, "the new pages join the free tail"


def test_find_compares_id_hash_depth_and_state():
    cache = OwnedCache(0, Room(16 * PAGE), generation_bits=0)
    (segment,) = reserve(cache, [1, 2])
    hashes = [bytes(block) for block in hashes_of(1, 2)]
    assert cache.find(SegmentRef(segment.id, 2, hashes[1])) is None, "not published"
    cache.publish([segment], b"")
    assert cache.find(SegmentRef(segment.id, 2, hashes[1])) is segment
    assert cache.find(SegmentRef(segment.id, 1, hashes[0])) is segment
    for wrong in [(1, hashes[1]), (2, hashes[0]), (0, hashes[0]), (3, hashes[1])]:
        assert cache.find(SegmentRef(segment.id, *wrong)) is None


def test_bytes_are_freed_at_the_end_of_the_last_lease():
    cache = OwnedCache(0, Room(16 * PAGE))
    (segment,) = publish(cache, [1, 2])
    cache.lease(segment, A, 5.0)
    cache.lease(segment, B, 9.0)
    assert cache.leased_bytes == PAGE
    assert cache.lease_holders == {1, 2}
    cache.retire(segment, 1.0)
    assert (cache.owned_bytes, cache.zombie_bytes) == (0, PAGE)
    assert cache.match(hashes_of(1, 2)) == ()
    cache.expire_leases(8.9)
    assert cache.leased_bytes == PAGE
    cache.expire_leases(9.0)
    assert (cache.zombie_bytes, cache.leased_bytes, cache.room.free_bytes) == (0, 0, 16 * PAGE)
    assert cache.lease_holders == set()


@pytest.mark.parametrize("first", [A, B])
def test_release_in_either_order_frees_once(first):
    cache = OwnedCache(0, Room(16 * PAGE))
    (segment,) = publish(cache, [1, 2])
    for key in (A, B):
        cache.lease(segment, key, 50.0)
    cache.retire(segment, 0.0)
    cache.release(first, 1.0)
    assert cache.zombie_bytes == PAGE
    cache.release(first, 1.0)
    assert cache.zombie_bytes == PAGE, "releasing one twice is not releasing both"
    cache.release(B if first == A else A, 1.0)
    assert cache.room.free_bytes == 16 * PAGE


def test_a_zombie_goes_with_the_release_of_a_valid_lease_beside_an_expired_one():
    cache = OwnedCache(0, Room(16 * PAGE))
    (segment,) = publish(cache, [1, 2])
    cache.lease(segment, A, 2.0)
    cache.lease(segment, B, 50.0)
    cache.retire(segment, 0.0)
    cache.release(B, 3.0)  # the lease of A has ended, though no tick said so
    assert cache.room.free_bytes == 16 * PAGE
    assert cache.leased_bytes == 0
    cache.release(A, 3.0)
    cache.expire_leases(4.0)
    assert cache.room.free_bytes == 16 * PAGE


def test_retiring_an_unleased_segment_frees_it_at_once():
    cache = OwnedCache(0, Room(16 * PAGE))
    (segment,) = publish(cache, [1, 2])
    cache.lease(segment, A, 5.0)
    cache.retire(segment, 5.0)
    assert cache.room.free_bytes == 16 * PAGE


def test_one_operation_leases_many_segments():
    cache = OwnedCache(0, Room(32 * PAGE))
    segments = publish(cache, range(6), counts=[2, 2, 2])
    for segment in segments:
        cache.lease(segment, A, 50.0)
    assert cache.leased_bytes == 3 * PAGE
    cache.release_before(1, 10, 0.0)
    assert cache.leased_bytes == 3 * PAGE, "op 10 is not before 10"
    cache.release_before(2, 99, 0.0)
    assert cache.leased_bytes == 3 * PAGE, "another client's"
    cache.release_before(1, 11, 0.0)
    assert cache.leased_bytes == 0


def test_reserved_space_comes_back():
    cache = OwnedCache(0, Room(16 * PAGE))
    segments = reserve(cache, range(6), counts=[2, 2, 2])
    cache.free_reserved(segments)
    assert cache.room.free_bytes == 16 * PAGE
    assert cache.metadata_bytes == 0
    with pytest.raises(AssertionError):
        cache.free_reserved(publish(cache, [1]))


def test_published_lists_one_namespace():
    cache = OwnedCache(0, Room(16 * PAGE))
    (mine,) = publish(cache, [1])
    record = Record(b"other".ljust(16), (64,), (), 0)
    other = cache.reserve(record, hashes_of(5, root=b"other".ljust(16)), [1])
    assert cache.published() == [mine]
    cache.publish(other, b"")
    assert cache.published() == [mine, *other]
    assert cache.published(NAMESPACE) == [mine]
    assert cache.published(b"none" * 4) == []


def test_decisions_do_not_depend_on_addresses_in_memory():
    """What one lease held is freed in one order, whatever the objects' hashes are (8)."""
    orders = set()
    kept = []
    for round_ in range(30):
        kept.append([object() for _ in range(round_ * 37)])
        cache = OwnedCache(0, Room(64 * PAGE), generation_bits=0)
        segments = publish(cache, range(8), counts=[1] * 8)
        for segment in segments:
            cache.lease(segment, A, 5.0)
        for segment in reversed(segments):
            cache.retire(segment, 0.0)
        if round_ % 2:
            cache.release(A, 1.0)
        else:
            cache.expire_leases(5.0)
        assert cache.room.free_bytes == 64 * PAGE
        again = reserve(cache, range(8), counts=[1] * 8)
        orders.add(tuple(segment.id >> 20 for segment in again))
    assert len(orders) == 1, orders
