"""The prefix index against a dictionary of sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ptstore_mpi import _native

POOL = np.random.default_rng(1).integers(0, 256, (12, 16), dtype=np.uint8)
CHOICES = st.lists(st.integers(0, len(POOL) - 1), max_size=6)
SEGMENTS = st.sampled_from([0, 1, 2, 2**63, 2**64 - 1])


def some_hashes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


class IndexMachine(RuleBasedStateMachine):
    """Random inserts, removals and look-ups of few hashes, so that entries meet."""

    def __init__(self) -> None:
        super().__init__()
        self.index = _native.PrefixIndex()
        self.model: dict[int, set[tuple[int, int]]] = {}

    @rule(chosen=CHOICES, segment=SEGMENTS, first=st.integers(0, 3))
    def insert(self, chosen: list[int], segment: int, first: int) -> None:
        self.index.insert(POOL[chosen], segment, first)
        for i, number in enumerate(chosen):
            self.model.setdefault(number, set()).add((segment, first + i))

    @rule(chosen=CHOICES, segment=SEGMENTS)
    def remove(self, chosen: list[int], segment: int) -> None:
        expected = 0
        for number in set(chosen):
            kept = {entry for entry in self.model.get(number, ()) if entry[0] != segment}
            expected += len(self.model.get(number, ())) - len(kept)
            self.model[number] = kept
        assert self.index.remove(POOL[chosen], segment) == expected

    @rule(chosen=CHOICES)
    def deepest(self, chosen: list[int]) -> None:
        expected = None
        for i, number in enumerate(chosen):
            if self.model.get(number):
                expected = (i + 1, *min(self.model[number]))
        assert self.index.deepest(POOL[chosen]) == expected

    @invariant()
    def counts(self) -> None:
        present = {number for number, entries in self.model.items() if entries}
        assert len(self.index) == len(present)
        assert self.index.entry_count == sum(map(len, self.model.values()))
        for number, row in enumerate(POOL):
            assert (row.tobytes() in self.index) == (number in present)


TestIndexMachine = IndexMachine.TestCase


def test_positions_count_from_the_first() -> None:
    index = _native.PrefixIndex()
    hashes = some_hashes(5)
    index.insert(hashes, 77, 10)
    assert index.deepest(hashes) == (5, 77, 14)
    assert index.deepest(hashes[:3]) == (3, 77, 12)


def test_presence_is_not_assumed_to_be_monotone() -> None:
    index = _native.PrefixIndex()
    hashes = some_hashes(9)
    index.insert(hashes[6:7], 5)
    assert index.deepest(hashes) == (7, 5, 0)
    assert index.deepest(hashes[:6]) is None


def test_ties_go_to_the_lowest_segment() -> None:
    index = _native.PrefixIndex()
    hashes = some_hashes(1)
    for segment in (9, 2**64 - 1, 4, 7):
        index.insert(hashes, segment)
    assert index.deepest(hashes) == (1, 4, 0)
    assert (len(index), index.entry_count) == (1, 4)
    assert index.remove(hashes, 4) == 1
    assert index.deepest(hashes) == (1, 7, 0)


def test_nbytes_grows_with_the_table_and_covers_it() -> None:
    index = _native.PrefixIndex()
    index.insert(some_hashes(100_000), 1)
    assert 100_000 * 32 <= index.nbytes <= 100_000 * 128


def test_survives_growing_and_emptying() -> None:
    index = _native.PrefixIndex()
    hashes = some_hashes(50_000)
    index.insert(hashes, 1)
    index.insert(hashes[::2].copy(), 2, 7)
    assert index.remove(hashes, 1) == 50_000
    assert len(index) == index.entry_count == 25_000
    assert index.deepest(hashes) == (49_999, 2, 7 + 24_999)
    assert index.remove(hashes, 2) == 25_000
    assert len(index) == 0
    assert index.deepest(hashes) is None


@pytest.mark.parametrize(
    "hashes",
    [
        np.zeros((2, 16), np.int8),
        np.zeros((2, 15), np.uint8),
        np.zeros(16, np.uint8),
        np.zeros((4, 16), np.uint8)[::2],
        np.zeros((2, 32), np.uint8)[:, :16],
        [bytes(16)],
    ],
)
def test_other_hashes_are_refused_and_not_converted(hashes: object) -> None:
    index = _native.PrefixIndex()
    for call in (index.deepest, lambda h: index.insert(h, 1), lambda h: index.remove(h, 1)):
        with pytest.raises(TypeError):
            call(hashes)  # type: ignore[arg-type]


def test_wrong_values_are_named() -> None:
    index = _native.PrefixIndex()
    with pytest.raises(ValueError, match="hash must be 16 bytes, got 2"):
        b"ab" in index  # noqa: B015
    with pytest.raises(ValueError, match="32 bits"):
        index.insert(some_hashes(2), 1, 2**32 - 1)
    with pytest.raises(TypeError):
        index.insert(some_hashes(2), -1)
    assert len(index) == 0
