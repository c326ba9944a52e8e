"""Conformance cases about file tiers: more than memory holds is found, and comes back right."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from ptstore_mpi.layout import KVLayout
from ptstore_mpi.testing.bench import Bench

__all__ = ["CASES"]

_PROMPT_TOKENS = 96
_LAYOUT = KVLayout.for_attention(layers=4, kv_heads=4, head_dim=32, dtype="float32", block_tokens=4)
"""16 KiB per block: what describes ten times the memory takes little of it."""


def tiered(bench: Bench) -> None:
    """A store ten times as large as memory: nothing is dropped, and what left comes from disk."""
    space = bench.space(layout=_LAYOUT)
    capacity = sum(counters["capacity_bytes"] for counters in bench.store.server_stats())
    count = 10 * capacity // int(_PROMPT_TOKENS * space.layout.bytes_per_token)
    for turn in bench.my_turn():  # each with all of memory, and a part of the files
        assert turn is None
        prompts = [bench.tokens(_PROMPT_TOKENS) for _ in range(count // bench.store.client_count)]
        for prompt in prompts:
            stored = space.put(prompt)
            assert stored.reason == "stored", stored
        disk_tokens = 0
        for prompt in prompts:
            result = space.expect(np.append(prompt, 1), _PROMPT_TOKENS)
            disk_tokens += result.by_source["disk"]
        # A tenth was in memory at most, and a little more because it is read back in this order.
        assert disk_tokens >= len(prompts) * _PROMPT_TOKENS // 2, disk_tokens
    bench.everyone()
    assert bench.server_total("evicted_count") == bench.server_total("lost_count") == 0
    assert bench.server_total("ssd_useful_bytes") > 0
    assert bench.server_total("ssd_promoted_count") > 0
    for counters in bench.store.server_stats():
        assert counters["ssd_file_bytes"] <= counters["ssd_capacity_bytes"]


CASES: list[tuple[Callable[[Bench], None], dict[str, Any]]] = [
    (
        tiered,
        {
            "memory_bytes": 2 << 20,
            "placement": "random",
            "ssd_dir": tempfile.gettempdir(),
            "ssd_bytes": 64 << 20,
            "slab_bytes": 4 << 20,
        },
    ),
]
