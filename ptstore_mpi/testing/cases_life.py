"""Conformance cases about many clients at once, counters, and the end of a store's life."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptstore_mpi.errors import ClosedError
from ptstore_mpi.testing.bench import LAYOUT, Bench

__all__ = ["CASES", "closed", "mixed"]


def concurrent_equal(bench: Bench) -> None:
    """Equal increments stored at once meet in one place: one is kept, the others are dedup."""
    space = bench.space(shared=True)
    for round_ in range(6):
        prompt = bench.tokens(100, seed=round_)
        bench.everyone()
        stored = space.put(prompt)
        assert stored.reason in ("stored", "dedup", "known"), stored
        assert bench.total(stored.tokens) == 100, (round_, stored)
        space.expect(np.append(prompt, 1), 100)


def concurrent_local(bench: Bench) -> None:
    """Under local placement equal increments may be kept twice; every load is right."""
    space = bench.space(shared=True)
    for round_ in range(4):
        prompt = bench.tokens(100, seed=round_)
        bench.everyone()
        stored = space.put(prompt)
        assert stored.reason in ("stored", "dedup", "known"), stored
        assert 100 <= bench.total(stored.tokens) <= 100 * bench.store.client_count
        space.expect(np.append(prompt, 1), 100)


def concurrent_overlap(bench: Bench) -> None:
    """Prompts of all lengths over one text, stored at once: every one is known afterwards."""
    space = bench.space(shared=True)
    text = bench.tokens(300, seed=99)
    for _ in range(12):
        length = int(bench.rng.integers(5, 300))
        space.put(text[:length])
        match, result = space.get(np.append(text[:length], 1))
        assert match.tokens == result.tokens == length // 4 * 4, (length, match, result)


def mixed(bench: Bench) -> None:
    """Popular documents with questions of each client's own, as an engine would ask them."""
    space = bench.space(shared=True)
    documents = [bench.tokens(60 + 37 * number, seed=number) for number in range(5)]
    asked = 0
    for _ in range(25):
        document = documents[int(bench.rng.integers(len(documents)))]
        prompt = np.concatenate([document, bench.tokens(int(bench.rng.integers(1, 40)))])
        match, result = space.get(prompt)
        assert result.tokens == match.tokens, (match, result)
        stored = space.put(prompt, verified_tokens=result.tokens)
        assert stored.reason in ("stored", "known", "dedup"), stored
        known = space.namespace.match(np.append(prompt, 1))
        assert known.tokens == len(prompt) // 4 * 4, (known, stored)
        asked += len(prompt)
    stats = bench.store.stats()
    assert stats["tokens"]["asked"] == asked, stats
    assert stats["calls"] == {"match": 50, "load": 25, "store": 25}, stats
    for name, reasons in stats["reasons"].items():
        assert sum(reasons.values()) == stats["calls"][name], stats


def counters(bench: Bench) -> None:
    """Tokens by source and bytes by path say where the bytes came from."""
    space = bench.space()
    prompt = bench.tokens(97)
    assert bench.store.stats()["tokens"]["asked"] == 0
    space.put(prompt)
    match, result = space.get(prompt, skip_tokens=24)
    near = sum(
        ref.block_count
        for ref in match.segments
        if ref.segment >> 48 in bench.store.topology.servers_of(bench.store.node)
    )
    expected = {"engine": 24, "owned": 4 * near - 24 if near else 0}
    expected["remote"] = 96 - sum(expected.values())
    for source, tokens in expected.items():
        assert result.by_source[source] == tokens, (expected, result)
    stats = bench.store.stats()
    assert stats["tokens"] == {
        "asked": 97,
        "engine": 24,
        "owned": expected["owned"],
        "replica": 0,
        "remote": expected["remote"],
        "disk": 0,
        "recomputed": 1,
        "stored": 96,
    }, stats
    moved = stats["bytes"]
    sent = moved.get("stored_sent_bytes", 0) + moved.get("stored_local_bytes", 0)
    assert sent == 96 * LAYOUT.bytes_per_token, stats
    assert moved["rma_bytes"] == expected["remote"] * LAYOUT.bytes_per_token, stats
    assert all(seconds >= 0 for seconds in stats["seconds"].values()), stats


def closed(bench: Bench) -> None:
    """A closed store says so; closing it again changes nothing."""
    space = bench.space()
    prompt = bench.tokens(50)
    space.put(prompt)
    match = space.namespace.match(prompt)
    bench.everyone()
    bench.store.close()
    bench.store.close()
    calls: list[Callable[[], Any]] = [
        lambda: space.namespace.match(prompt),
        lambda: space.namespace.load(match, space.oracle.blank(12)),
        lambda: space.put(prompt),
        lambda: space.namespace.clear(),
        lambda: space.namespace.drop_tail(match),
        lambda: bench.store.namespace("model", LAYOUT),
        lambda: bench.store.server_stats(),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except ClosedError:
            continue
        raise AssertionError(f"call {number} worked on a closed store")
    assert bench.store.stats()["tokens"]["stored"] == 48, "the counters can still be read"


CASES: list[tuple[Callable[[Bench], None], dict[str, Any]]] = [
    (concurrent_equal, {"placement": "random"}),
    (concurrent_local, {"placement": "local"}),
    (concurrent_overlap, {"placement": "least_loaded"}),
    (counters, {"placement": "local"}),
    (closed, {}),
]
