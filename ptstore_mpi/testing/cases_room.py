"""Conformance cases about room: full arenas, clear, drop, and increments that can never fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ptstore_mpi.errors import CapacityError, LayoutMismatchError
from ptstore_mpi.testing.bench import LAYOUT, Bench, Tokens
from ptstore_mpi.types import segment_slot

__all__ = ["CASES", "evicted"]


def full(bench: Bench) -> None:
    """A full arena refuses what does not fit, counts it, and serves what it has."""
    space = bench.space()
    kept: list[Tokens] = []
    refused = 0
    while refused < 3:
        prompt = bench.tokens(96)
        stored = space.put(prompt)
        assert stored.reason in ("stored", "full"), stored
        if stored.reason == "full":
            refused += 1
            space.expect(prompt, 0, "cold")
        else:
            kept.append(prompt)
    assert bench.store.stats()["reasons"]["store"]["full"] == refused
    assert kept, "nothing fitted at all"
    bench.everyone()
    assert bench.server_total("write_full_count") >= refused
    for prompt in kept[:: max(len(kept) // 10, 1)]:
        space.expect(np.append(prompt, 1), 96)
    bench.everyone()
    assert space.namespace.clear() is not None
    bench.check_settled()
    assert bench.server_total("owned_bytes") == 0
    bench.everyone()
    assert space.put(kept[0]).reason == "stored"
    space.expect(np.append(kept[0], 1), 96)


def evicted(bench: Bench) -> None:
    """A full arena makes room: the newest is always there, and what was dropped is counted."""
    space = bench.space()
    for turn in bench.my_turn():  # nobody else takes what was just put away
        assert turn is None
        for _ in range(40):  # texts of their own: parents of what is elsewhere would stay
            prompt = bench.tokens(96)
            stored = space.put(prompt)
            assert stored.reason == "stored", stored
            space.expect(np.append(prompt, 1), 96)
    bench.everyone()
    assert bench.server_total("evicted_count") > 0
    assert bench.server_total("write_full_count") == 0
    for counters in bench.store.server_stats():
        assert counters["owned_bytes"] + counters["metadata_bytes"] <= counters["capacity_bytes"]


def free_bytes(bench: Bench) -> list[int]:
    """Return the free bytes of every server."""
    return [counters["free_bytes"] for counters in bench.store.server_stats()]


def has_free_bytes(bench: Bench, wanted: list[int]) -> bool:
    """Tell whether every server has as many free bytes as wanted."""
    return free_bytes(bench) == wanted


def cleared(bench: Bench) -> None:
    """Clear forgets a namespace everywhere, gives all its bytes back, and slots are used again."""
    for turn in bench.my_turn():
        assert turn is None
        space, other = bench.space(), bench.space(salt="other")
        kept = bench.tokens(48)
        other.put(kept)
        before = free_bytes(bench)
        slots: list[int] = []
        for _ in range(6):
            prompt = bench.tokens(200)
            for length in (50, 120, 200):
                assert space.put(prompt[:length]).reason == "stored"
            match, _ = space.get(np.append(prompt, 1))
            assert match.tokens == 200, match
            slots += [segment_slot(ref.segment) for ref in match.segments]
            removed = space.namespace.clear()
            assert removed is not None, match
            assert 1 <= removed <= len(match.segments), (removed, match)
            space.expect(np.append(prompt, 1), 0, "cold")
            bench.eventually("every byte is back", partial(has_free_bytes, bench, before))
        assert len(set(slots)) < len(slots) // 2, f"slots are not used again: {slots}"
        other.expect(np.append(kept, 1), 48)
        other.namespace.clear()


def dropped(bench: Bench) -> None:
    """Only a leaf can be dropped; what is dropped is a miss and can be stored again."""
    space = bench.space()
    prompt = bench.tokens(96)
    space.put(prompt[:60])
    parent = space.namespace.match(np.append(prompt[:60], 1))
    space.put(prompt)
    assert space.namespace.drop_tail(parent) is False, "a segment with a child was dropped"
    depths = []
    while (match := space.namespace.match(np.append(prompt, 1))).tokens:
        depths.append(match.tokens)
        assert space.namespace.drop_tail(match) is True, match
        assert space.namespace.drop_tail(match) is False, "it was dropped twice"
    assert depths[0] == 96, depths
    assert 60 in depths, depths
    assert space.namespace.drop_tail(match) is False, "an empty match was dropped"
    assert space.put(prompt).tokens == 96
    space.expect(np.append(prompt, 1), 96)


def stale_match(bench: Bench) -> None:
    """A match that was held while its segments went away loads a prefix, never other bytes."""
    space = bench.space()
    prompt = bench.tokens(96)
    space.put(prompt)
    match = space.namespace.match(np.append(prompt, 1))
    tail = space.namespace.match(np.append(prompt, 1))
    assert space.namespace.drop_tail(tail)
    for _ in range(4):
        space.put(bench.tokens(96))
    out = space.oracle.blank(24)
    result = space.namespace.load(match, out)
    assert (result.tokens, result.reason) == (72, "gone"), result
    space.oracle.check(prompt, out, until_tokens=72)
    space.namespace.clear()
    space.put(bench.tokens(96))
    result = space.namespace.load(match, space.oracle.blank(24))
    assert (result.tokens, result.reason) == (0, "gone"), result


def too_large(bench: Bench) -> None:
    """An increment larger than an arena is an error before a byte moves."""
    space = bench.space()
    capacity = bench.store.server_stats()[0]["capacity_bytes"]
    prompt = bench.tokens(capacity // LAYOUT.block_bytes * 4 + 8)
    before = bench.store.stats()["bytes"]
    message = ""
    try:
        space.put(prompt)
    except CapacityError as error:
        message = str(error)
    assert str(capacity) in message, "expected a CapacityError that names the arena's size"
    after = bench.store.stats()["bytes"]
    assert after.get("stored_sent_bytes") == before.get("stored_sent_bytes")
    assert after.get("stored_local_bytes") == before.get("stored_local_bytes")
    space.expect(prompt[:99], 0, "cold")
    assert space.put(prompt[:99]).tokens == 96


def wrong_buffers(bench: Bench) -> None:
    """Buffers that do not fit the layout are refused by name, and nothing is changed."""
    space = bench.space()
    prompt = bench.tokens(49)
    right = space.oracle.arrays(prompt)
    frozen = [array.copy() for array in right]
    for array in frozen:
        array.flags.writeable = False
    assert space.put(prompt[:21]).tokens == 20
    bad_stores: dict[str, list[Any]] = {
        "one missing": right[:-1],
        "one too many": [*right, right[0]],
        "too little room": [*right[:-1], right[-1][:-1]],
        "not contiguous": [*right[:-1], right[-1][:, ::2]],
        "no array": [*right[:-1], "bytes"],
    }
    for name, arrays in bad_stores.items():
        try:
            space.namespace.store(prompt, arrays)
        except LayoutMismatchError:
            continue
        raise AssertionError(f"stored from buffers with {name}")
    match = space.namespace.match(prompt)
    blank = space.oracle.blank(5)
    for outs in (frozen, blank[:-1], [array[:4] for array in blank]):
        try:
            space.namespace.load(match, outs)
        except LayoutMismatchError:
            continue
        raise AssertionError("loaded into buffers that do not fit")
    assert all((array == 0xA5).all() for array in blank), "a refused load has written"
    assert space.namespace.store(prompt, frozen).tokens == 28, "read-only arrays can be stored"
    space.expect(prompt, 48)


def replicated(bench: Bench) -> None:
    """What was fetched once is kept on this node: the next load has it without the wire."""
    space = bench.space()
    prompts = [bench.tokens(97) for _ in range(4)]
    for prompt in prompts:
        space.put(prompt)
    for prompt in prompts:
        first = space.expect(prompt, 96).by_source
        again = space.expect(prompt, 96).by_source
        assert again["owned"] == first["owned"], (first, again)
        assert again["replica"] == 96 - first["owned"], (first, again)
        shorter = space.expect(prompt[:42], 40, "whole").by_source
        assert shorter["remote"] == 0, shorter
    assert space.namespace.clear() is not None
    space.expect(prompts[0], 0, "cold")


CASES: list[tuple[Callable[[Bench], None], dict[str, Any]]] = [
    (
        full,
        {
            "memory_bytes": 512 << 10,
            "placement": "random",
            "unconfirmed_count": 2,
            "eviction": "none",
        },
    ),
    (cleared, {"placement": "random"}),
    (dropped, {"placement": "random"}),
    (stale_match, {"placement": "local"}),
    (replicated, {"placement": "random", "replica_admission": "always"}),
    (too_large, {"memory_bytes": 256 << 10}),
    (wrong_buffers, {}),
]
