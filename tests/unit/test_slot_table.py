"""Segment ids: slots are used again under other generations, or without end with none."""

from __future__ import annotations

import numpy as np
import pytest

from ptstore_mpi.cache.segment import Record, Segment, SlotTable
from ptstore_mpi.types import pack_segment_id, segment_owner, segment_slot


def enter(table):
    record = Record(b"n" * 16, (1,), (), 0)
    segment = Segment(
        table.take(),
        record,
        index=0,
        offset=0,
        nbytes=4096,
        metadata_bytes=0,
        hashes=np.zeros((1, 16), np.uint8),
        serial=1,
    )
    table.put(segment)
    return segment


def test_an_id_holds_owner_slot_and_generation():
    for owner, slot, generation in [(0, 0, 0), (65535, (1 << 28) - 1, (1 << 20) - 1), (3, 5, 9)]:
        segment = pack_segment_id(owner, slot, generation)
        assert segment < 1 << 64
        assert segment_owner(segment) == owner
        assert segment_slot(segment) == slot
        assert segment & ((1 << 20) - 1) == generation


def test_a_slot_comes_back_under_the_next_generation():
    table = SlotTable(2)
    first, second = enter(table), enter(table)
    assert [segment_slot(s.id) for s in (first, second)] == [0, 1]
    assert segment_owner(first.id) == 2
    table.release(first)
    assert table.get(first.id) is None
    again = enter(table)
    assert segment_slot(again.id) == 0
    assert again.id == first.id + 1
    assert table.get(first.id) is None, "an old name finds nothing"
    assert table.get(again.id) is again
    assert list(table) == [again, second]


def test_a_slot_whose_generations_are_used_up_is_retired():
    table = SlotTable(0, generation_bits=2)
    ids = []
    for _ in range(5):
        segment = enter(table)
        ids.append(segment.id)
        table.release(segment)
    assert ids == [0, 1, 2, 3, pack_segment_id(0, 1, 0)]
    assert table.retired_count == 1
    assert all(table.get(each) is None for each in ids)


def test_without_generation_bits_the_same_id_comes_back_for_ever():
    table = SlotTable(0, generation_bits=0)
    for _ in range(100):
        segment = enter(table)
        assert segment.id == 0
        table.release(segment)
    assert table.retired_count == 0


def test_unknown_ids_find_nothing():
    table = SlotTable(1)
    segment = enter(table)
    for wrong in (segment.id + 1, pack_segment_id(1, 9, 0), pack_segment_id(0, 0, 0)):
        assert table.get(wrong) is None
    table.take()
    assert table.get(pack_segment_id(1, 1, 0)) is None, "taken, but not entered"


def test_releasing_twice_is_our_own_bug():
    table = SlotTable(0)
    segment = enter(table)
    table.release(segment)
    with pytest.raises(AssertionError, match="its slot does not hold"):
        table.release(segment)
