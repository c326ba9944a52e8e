"""The region allocator against a bitmap of pages."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ptstore_mpi import _native

PAGE = 4096


class AllocatorMachine(RuleBasedStateMachine):
    """Random allocations, releases of any part and growth."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bool] = []

    @initialize(pages=st.integers(1, 40))
    def start(self, pages: int) -> None:
        self.allocator = _native.RegionAllocator(pages * PAGE)
        self.taken = [False] * pages

    def free_runs(self) -> list[tuple[int, int]]:
        runs, page = [], 0
        for taken, group in groupby(self.taken):
            count = len(list(group))
            if not taken:
                runs.append((count, page))
            page += count
        return runs

    @rule(nbytes=st.integers(1, 10 * PAGE))
    def allocate(self, nbytes: int) -> None:
        pages = -(-nbytes // PAGE)
        fitting = [run for run in self.free_runs() if run[0] >= pages]
        if not fitting:
            assert self.allocator.allocate(nbytes) is None
            return
        _, page = min(fitting)
        assert self.allocator.allocate(nbytes) == page * PAGE
        self.taken[page : page + pages] = [True] * pages

    @rule(page=st.integers(0, 60), pages=st.integers(1, 8))
    def release(self, page: int, pages: int) -> None:
        part = self.taken[page : page + pages]
        if len(part) == pages and all(part):
            self.allocator.release(page * PAGE, pages * PAGE)
            self.taken[page : page + pages] = [False] * pages
        else:
            with pytest.raises(ValueError, match=r"already free|exceeds the capacity"):
                self.allocator.release(page * PAGE, pages * PAGE)

    @rule(pages=st.integers(1, 4))
    def grow(self, pages: int) -> None:
        self.taken += [False] * pages
        self.allocator.grow(len(self.taken) * PAGE)

    @invariant()
    def same_space(self) -> None:
        if not self.taken:
            return
        assert self.allocator.capacity_bytes == len(self.taken) * PAGE
        assert self.allocator.free_bytes == self.taken.count(False) * PAGE
        largest = max((pages for pages, _ in self.free_runs()), default=0)
        assert self.allocator.largest_free_bytes == largest * PAGE


TestAllocatorMachine = AllocatorMachine.TestCase


def test_best_fit_takes_the_smallest_hole_and_the_lowest_of_equals() -> None:
    allocator = _native.RegionAllocator(20 * PAGE)
    assert allocator.allocate(20 * PAGE) == 0
    for page, pages in ((1, 5), (8, 2), (12, 2), (16, 3)):
        allocator.release(page * PAGE, pages * PAGE)
    assert allocator.allocate(PAGE + 1) == 8 * PAGE
    assert allocator.allocate(2 * PAGE) == 12 * PAGE
    assert allocator.allocate(2 * PAGE) == 16 * PAGE


def test_a_region_is_released_segment_by_segment() -> None:
    allocator = _native.RegionAllocator(8 * PAGE)
    offset = allocator.allocate(6 * PAGE)
    assert offset == 0
    allocator.release(2 * PAGE, 2 * PAGE)
    with pytest.raises(ValueError, match="already free"):
        allocator.release(0, 6 * PAGE)
    allocator.release(0, 2 * PAGE)
    allocator.release(4 * PAGE, 2 * PAGE)
    assert allocator.largest_free_bytes == allocator.free_bytes == 8 * PAGE


def test_another_alignment() -> None:
    allocator = _native.RegionAllocator(1024, alignment_bytes=64)
    assert allocator.allocate(1) == 0
    assert allocator.allocate(65) == 64
    assert allocator.free_bytes == 1024 - 64 - 128
    assert allocator.alignment_bytes == 64


@pytest.mark.parametrize(
    ("offset", "nbytes", "message"),
    [
        (8, PAGE, "aligned to 4096"),
        (0, 100, "aligned to 4096"),
        (0, 0, "not be empty"),
        (0, 9 * PAGE, "exceeds the capacity"),
        (2**63, PAGE, "exceeds the capacity"),
        (4 * PAGE, PAGE, "already free"),
    ],
)
def test_a_wrong_release_changes_nothing(offset: int, nbytes: int, message: str) -> None:
    allocator = _native.RegionAllocator(8 * PAGE)
    allocator.allocate(4 * PAGE)
    with pytest.raises(ValueError, match=message):
        allocator.release(offset, nbytes)
    assert allocator.free_bytes == 4 * PAGE


def test_other_wrong_values() -> None:
    allocator = _native.RegionAllocator(8 * PAGE)
    with pytest.raises(ValueError, match="at least 1"):
        allocator.allocate(0)
    with pytest.raises(ValueError, match="grow beyond"):
        allocator.grow(8 * PAGE)
    with pytest.raises(ValueError, match="multiple of 4096"):
        _native.RegionAllocator(1000)
    with pytest.raises(ValueError, match="power of two"):
        _native.RegionAllocator(3000, alignment_bytes=3000)
    assert allocator.allocate(2**64 - 1) is None
