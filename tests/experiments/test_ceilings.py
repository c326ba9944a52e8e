"""The ceilings against every cache there could be, on traces small enough to try them all."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.common.ceilings import AskedBlocks, Ceilings

BLOCK_TOKENS = 10
PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.integers(0, 1)),
    min_size=1,
    max_size=6,
)


def trace_of(prompts):
    """Return requests of (tokens, how many of the last blocks are left but not asked for)."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for tokens, unasked in prompts:
        prefixes = [tuple(tokens[: end + 1]) for end in range(len(tokens))]
        keys = np.array([ids.setdefault(prefix, len(ids)) for prefix in prefixes], np.int64)
        asked = len(tokens) - unasked
        requests.append(AskedBlocks(keys, asked, asked * BLOCK_TOKENS + 1))
    return requests, {key: ids.get(prefix[:-1]) for prefix, key in ids.items()}


def best(requests, parents, capacity, *, closed):
    """Return the most blocks found by any cache; closed: it keeps no block without its parent."""

    @cache
    def most(number, kept):
        if number == len(requests):
            return 0
        request = requests[number]
        asked = request.keys[: request.asked_blocks].tolist()
        found = len(list(itertools.takewhile(kept.__contains__, asked)))
        found = found if closed else sum(key in kept for key in asked)
        room = sorted(kept | set(request.keys.tolist()))
        choices = (
            frozenset(chosen)
            for size in range(min(capacity, len(room)) + 1)
            for chosen in itertools.combinations(room, size)
        )
        allowed = (
            chosen
            for chosen in choices
            if not closed
            or all(parents[key] in chosen for key in chosen if parents[key] is not None)
        )
        return found + max(most(number + 1, chosen) for chosen in allowed)

    return most(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.integers(0, 4))
def test_belady_is_the_best_there_could_be(prompts, capacity):
    requests, parents = trace_of(prompts)
    found = sum(Ceilings(requests, BLOCK_TOKENS).belady_found(capacity))
    assert found == best(requests, parents, capacity, closed=False)
    assert found >= best(requests, parents, capacity, closed=True)


@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.integers(0, 4))
def test_what_belady_finds_are_prefixes(prompts, capacity):
    """Where all that is left is asked for, the best prefix-closed cache finds as much."""
    requests, parents = trace_of([(tokens, 0) for tokens, _ in prompts])
    found = sum(Ceilings(requests, BLOCK_TOKENS).belady_found(capacity))
    assert found == best(requests, parents, capacity, closed=True)


@given(PROMPTS)
def test_room_for_everything_finds_what_an_infinite_cache_does(prompts):
    requests, _ = trace_of(prompts)
    ceilings = Ceilings(requests, BLOCK_TOKENS)
    seen: set[int] = set()
    expected = 0
    for request in requests:
        expected += sum(key in seen for key in request.keys[: request.asked_blocks].tolist())
        seen |= set(request.keys.tolist())
    assert ceilings.infinite().found_blocks == expected
    assert ceilings.belady(len(seen)) == ceilings.infinite()
    assert ceilings.belady(0).found_blocks == 0
    assert ceilings.distinct_blocks == len(seen)


def test_ratios_by_hand():
    requests, _ = trace_of([([0, 0, 0], 0), ([1], 0), ([0, 0, 1], 0), ([0, 0, 0], 0)])
    ceilings = Ceilings(requests, BLOCK_TOKENS)
    assert ceilings.belady_found(9) == [0, 0, 2, 3]
    assert ceilings.belady_found(2) == [0, 0, 2, 2]
    found = ceilings.belady(2)
    assert (found.block, found.usable_prefix) == (pytest.approx(4 / 10), pytest.approx(40 / 104))
