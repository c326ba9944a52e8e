"""A whole store in one process over a real file tier whose files are damaged under it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import ptstore_mpi
from ptstore_mpi.layout import KVLayout
from ptstore_mpi.testing.bench import Bench

LAYOUT = KVLayout.for_attention(layers=4, kv_heads=4, head_dim=32, dtype="float32", block_tokens=4)
TOKENS = 96


def run(main, directory, **changes):
    settings = {
        "memory_bytes": 2 << 20,
        "segment_tokens": 24,
        "staging_bytes": 1 << 20,
        "ssd_dir": str(directory),
        "ssd_bytes": 32 << 20,
        "slab_bytes": 4 << 20,
        **changes,
    }
    return ptstore_mpi.run(main, ptstore_mpi.Config(**settings))


def filled(bench):
    """Store so much that the first half is only in files; return it."""
    space = bench.space(layout=LAYOUT)
    prompts = [bench.tokens(TOKENS) for _ in range(20)]
    for prompt in prompts:
        assert space.put(prompt).reason == "stored"
    return space, prompts[:8]


def flip(path):
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size, 4096):
            file.seek(start + 100)
            byte = file.read(1)
            file.seek(start + 100)
            file.write(bytes([byte[0] ^ 1]))


def truncate(path):
    os.truncate(path, 4096)


@pytest.mark.parametrize(
    ("damage", "reason"), [(flip, "corrupt"), (truncate, "truncated")], ids=["flip", "truncate"]
)
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_damage_is_a_miss_with_a_counted_reason(tmp_path, damage, reason, direct):
    def main(store):
        bench = Bench(store)
        space, prompts = filled(bench)
        (folder,) = tmp_path.iterdir()
        for path in folder.glob("slab-*"):
            damage(path)
        for prompt in prompts:
            match, result = space.get(np.append(prompt, 1))  # checks every byte it was given
            assert match.tokens == TOKENS
            assert result.tokens < TOKENS
            assert result.reason == "gone"
            again, _ = space.get(np.append(prompt, 1))
            assert again.tokens <= result.tokens, "what is lost is found again"
        counters = store.server_stats()[0]
        assert counters[f"ssd_read_{reason}_count"] >= len(prompts)
        assert counters["lost_count"] >= len(prompts)
        removed_count = counters["lost_count"] + counters["pruned_count"]
        assert removed_count == len(prompts) * TOKENS // 24, "each with all that hung on it"
        bench.check_settled()

    run(main, tmp_path, tier_direct=direct)
    assert not list(tmp_path.iterdir())


def test_without_a_folder_there_is_no_tier(tmp_path):
    def main(store):
        assert not any(name.startswith("ssd_") for name in store.server_stats()[0])

    run(main, tmp_path, ssd_dir="", ssd_bytes=0)


def test_a_folder_that_does_not_exist_is_told(tmp_path, monkeypatch):
    missing = Path(tmp_path / "missing")
    with pytest.raises(ptstore_mpi.ConfigError, match="missing"):
        run(lambda store: None, missing)


def test_a_full_ssd_moves_down_to_the_pfs(tmp_path):
    folders = {"ssd_dir": tmp_path / "ssd", "pfs_dir": tmp_path / "pfs"}
    for folder in folders.values():
        folder.mkdir()

    def main(store):
        space = (bench := Bench(store)).space(layout=LAYOUT)
        prompts = [bench.tokens(TOKENS) for _ in range(40)]
        for prompt in prompts:
            assert space.put(prompt).reason == "stored"
        for prompt in prompts:
            space.expect(np.append(prompt, 1), TOKENS)
        counters = store.server_stats()[0]
        assert counters["evicted_count"] == counters["lost_count"] == 0
        assert counters["pfs_moved_count"] >= 40
        for name in ("ssd", "pfs"):
            assert counters[f"{name}_file_bytes"] <= counters[f"{name}_capacity_bytes"]
        assert counters["pfs_read_done_count"] > 0
        space.namespace.clear()
        bench.check_settled()

    settings = {name: str(folder) for name, folder in folders.items()}
    run(main, tmp_path, **settings, ssd_bytes=8 << 20, pfs_bytes=32 << 20, slab_bytes=2 << 20)
    assert not any(any(folder.iterdir()) for folder in folders.values())


def test_two_full_tiers_drop_the_coldest(tmp_path):
    folders = {"ssd_dir": tmp_path / "ssd", "pfs_dir": tmp_path / "pfs"}
    for folder in folders.values():
        folder.mkdir()

    def main(store):
        space = (bench := Bench(store)).space(layout=LAYOUT)
        prompts = [bench.tokens(TOKENS) for _ in range(60)]
        for prompt in prompts:
            assert space.put(prompt).reason == "stored"
        depths = [space.namespace.match(np.append(prompt, 1)).tokens for prompt in prompts]
        assert depths[0] == 0
        assert depths[-1] == TOKENS
        assert sum(depth == TOKENS for depth in depths) > 25
        assert store.server_stats()[0]["evicted_count"] > 0

    settings = {name: str(folder) for name, folder in folders.items()}
    run(main, tmp_path, **settings, ssd_bytes=4 << 20, pfs_bytes=8 << 20, slab_bytes=2 << 20)


def test_a_pfs_alone_is_the_tier(tmp_path):
    def main(store):
        space, prompts = filled(Bench(store))
        for prompt in prompts:
            result = space.expect(np.append(prompt, 1), TOKENS)
            assert result.by_source["disk"] == TOKENS
        assert store.server_stats()[0]["pfs_useful_bytes"] > 0

    run(main, tmp_path, ssd_dir="", ssd_bytes=0, pfs_dir=str(tmp_path), pfs_bytes=32 << 20)
