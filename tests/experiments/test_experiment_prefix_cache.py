"""The baseline's own cache: right bytes, least recent out first, never over its budget."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.baselines.base import ConservationError, FirstToken, Place, System
from experiments.baselines.prefix import PrefixCache, chain_hashes
from experiments.common.workload import Request

torch = pytest.importorskip("torch", reason="the cache holds torch tensors")

BLOCK, SEGMENT, LAYERS, HEADS, DIM = 4, 8, 2, 2, 3
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 4


def kv_of(tokens):
    """KV that a wrong token anywhere before would change, different for each tensor."""
    past = np.cumsum(np.asarray(tokens, dtype=np.float32) * np.arange(1, len(tokens) + 1))
    tensors = [
        torch.from_numpy(np.tile((past + place)[None, :, None], (HEADS, 1, DIM)).astype(np.float32))
        for place in range(2 * LAYERS)
    ]
    return SimpleNamespace(keys=tensors[:LAYERS], values=tensors[LAYERS:])


def empty_kv(count):
    return SimpleNamespace(
        keys=[torch.full((HEADS, count, DIM), -1.0) for _ in range(LAYERS)],
        values=[torch.full((HEADS, count, DIM), -1.0) for _ in range(LAYERS)],
    )


def make_cache(capacity_tokens):
    return PrefixCache(
        capacity_bytes=capacity_tokens * TOKEN_BYTES, block_tokens=BLOCK, segment_tokens=SEGMENT
    )


def hashes_of(tokens):
    return chain_hashes(np.asarray(tokens, dtype=np.uint32), BLOCK)


def put(cache, tokens):
    return cache.insert(hashes_of(tokens), kv_of(tokens))


def known_tokens(cache, tokens):
    return BLOCK * sum(blocks for _, _, blocks in cache.match(hashes_of(tokens)))


def check_contents(cache, tokens):
    path = cache.match(hashes_of(tokens))
    count = BLOCK * sum(blocks for _, _, blocks in path)
    out, expected = empty_kv(len(tokens)), kv_of(tokens)
    cache.copy_out(path, out)
    for got, want in zip(out.keys + out.values, expected.keys + expected.values, strict=True):
        assert torch.equal(got[:, :count], want[:, :count])
        assert (got[:, count:] == -1).all()
    return count


def test_a_prompt_is_found_again_block_by_block():
    cache = make_cache(100)
    first = list(range(20))
    assert put(cache, first) == (20 * TOKEN_BYTES, "stored")
    assert put(cache, first) == (0, "known")
    assert check_contents(cache, first) == 20
    # Shares three blocks and part of the fourth.
    second = [*first[:14], 99, 98, 97, 96, 95, 94]
    assert check_contents(cache, second) == 12
    assert put(cache, second) == (8 * TOKEN_BYTES, "stored")
    assert check_contents(cache, second) == 20
    assert cache.used_bytes == 28 * TOKEN_BYTES
    assert check_contents(cache, [1, *first[1:]]) == 0


def test_the_least_recent_prompt_goes_first_and_its_end_before_its_front():
    cache = make_cache(32)
    a, b, c = (list(range(base, base + 16)) for base in (0, 100, 200))
    put(cache, a)
    put(cache, b)
    assert known_tokens(cache, a) == 16  # now b is the least recent
    assert put(cache, c[:8]) == (8 * TOKEN_BYTES, "stored")
    assert [known_tokens(cache, tokens) for tokens in (b, a, c)] == [8, 16, 8]


def test_a_prompt_larger_than_the_budget_keeps_its_front():
    cache = make_cache(20)
    tokens = list(range(40))
    assert put(cache, tokens) == (16 * TOKEN_BYTES, "partial")
    assert check_contents(cache, tokens) == 16


def test_a_budget_below_one_segment_keeps_nothing():
    cache = make_cache(6)
    assert put(cache, list(range(40))) == (0, "full")
    assert (len(cache), cache.used_bytes) == (0, 0)


def test_clear_forgets_all():
    cache = make_cache(40)
    put(cache, list(range(16)))
    cache.clear()
    assert (known_tokens(cache, list(range(16))), cache.used_bytes, len(cache)) == (0, 0, 0)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10).map(
    lambda bits: [value for bit in bits for value in [bit + 1] * BLOCK]
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 60), st.lists(st.tuples(st.booleans(), PROMPTS), max_size=25))
def test_the_budget_holds_and_bytes_are_right_whatever_is_asked(capacity_tokens, steps):
    cache = make_cache(capacity_tokens)
    for keep, tokens in steps:
        check_contents(cache, tokens)
        if keep:
            stored_bytes, reason = put(cache, tokens)
            assert reason in ("stored", "known", "partial", "full")
            known = check_contents(cache, tokens)
            assert known == len(tokens) or reason in ("partial", "full")
            assert stored_bytes <= known * TOKEN_BYTES
        held = sum(segment.kv.numel() * 4 for segment in cache._segments.values())
        assert held == cache.used_bytes <= capacity_tokens * TOKEN_BYTES
        # No unreachable suffix: behind an unknown block no block is known.
        for _, asked in steps:
            present = [block_hash in cache._index for block_hash in hashes_of(asked)]
            assert present == sorted(present, reverse=True)
        assert len(cache._index) == sum(len(s.hashes) for s in cache._segments.values())


def test_chained_hashes_separate_blocks_by_their_past():
    same_block = [7] * BLOCK
    first = hashes_of([1] * BLOCK + same_block)
    second = hashes_of([2] * BLOCK + same_block)
    assert first[1] != second[1]
    assert hashes_of([1] * BLOCK + same_block + [5]) == first
    assert hashes_of([1] * (BLOCK - 1)) == []


class CountingSystem(System):
    """Returns the tokens by source that a test gives it."""

    name = "counting"

    def __init__(self, tokens_by_source):
        self._tokens = tokens_by_source

    def first_token(self, request):
        return FirstToken(
            token=1, logits=np.zeros(3, np.float32), match_s=0.0, load_s=0.0, prefill_s=0.0,
            tokens_by_source=self._tokens, reason="",
        )  # fmt: skip

    def close(self):
        """Hold nothing."""


def answer(tokens_by_source):
    request = Request(4, 0, 0, np.arange(10, dtype=np.uint32), client=0)
    return CountingSystem(tokens_by_source).answer(request, Place(0, 0, 0, 0.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"owned": 11},
        {"owned": 10},
        {"owned": 6, "remote": 3, "recomputed": 2},
        {"owned": -1, "remote": 3},
    ],
)
def test_tokens_that_do_not_add_up_end_the_run(wrong):
    with pytest.raises(ConservationError, match=r"counting, request 4: .*10 asked for"):
        answer(wrong)


def test_what_no_source_gave_was_recomputed():
    sample = answer({"owned": 6, "remote": 3})
    assert (sample.asked_tokens, sample.owned_tokens, sample.remote_tokens) == (10, 6, 3)
    assert sample.recomputed_tokens == 1
    assert sample.ttft_s > 0
