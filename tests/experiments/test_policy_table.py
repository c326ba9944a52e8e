"""The table of policies, and the promise that `adaptive` makes."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from experiments import policy_table
from experiments.traces import load_trace

ROWS = [
    {"timestamp": 1000, "hash_ids": [0, 1, 2, 3, 4]},
    {"timestamp": 2000, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "hash_ids": [0, 5]},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "mooncake" / "conversation_trace.jsonl.gz"
    path.parent.mkdir()
    lengths = [{"input_length": 512 * len(row["hash_ids"]), "output_length": 1} for row in ROWS]
    lines = [json.dumps(row | length) for row, length in zip(ROWS, lengths, strict=True)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.setenv("PTSTORE_DATA", str(tmp_path))


@pytest.mark.usefixtures("folder")
def test_the_table_has_a_row_per_capacity(capsys):
    assert policy_table.main(["--trace", "mooncake", "--shares", "0.5", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "infinite capacity 40.00 %" in lines[1]  # 4 of 10 blocks
    assert lines[2].split() == [
        "capacity",
        "lru",
        "lfu",
        "gdsf",
        "s3fifo",
        "adaptive",
        "belady",
        "closed",
    ]
    *found, belady = map(float, lines[3].split()[2:8])
    assert max(found) <= belady <= 40
    assert lines[4].split()[:9] == ["100.0", "%", *["40.00"] * 6, "-"]
    assert policy_table.main(["--trace", "mooncake", "--unlinked", "--policies", "lru"]) == 0
    assert "/" in capsys.readouterr().out.splitlines()[-1]


def test_the_table_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.delenv("PTSTORE_DATA", raising=False)
    assert policy_table.main([]) == 2
    assert "PTSTORE_DATA" in capsys.readouterr().err


def test_what_the_best_policy_closes_is_a_share_of_the_gap():
    assert policy_table.closed_percent([20.0, 35.0], lru=20.0, belady=50.0) == 50
    assert policy_table.closed_percent([10.0], lru=20.0, belady=40.0) == -50
    assert policy_table.closed_percent([20.0], lru=20.0, belady=20.0) is None


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "segment_tokens", "every"), [("mooncake", 512, 2), ("claude_code", 4096, 4)]
)
def test_adaptive_keeps_up_with_lru_on_real_traces(name, segment_tokens, every):
    if not os.environ.get("PTSTORE_DATA"):
        pytest.skip("PTSTORE_DATA is not set: no traces")
    chains = policy_table.chains_of(load_trace(name), segment_tokens, every=every)
    ceilings = policy_table.ceilings_of(chains, segment_tokens)
    for share in policy_table.SHARES:
        lru, adaptive = (
            policy_table.measure(chains, policy=policy, share=share).usable_prefix_percent
            for policy in ("lru", "adaptive")
        )
        assert adaptive >= lru - 0.5
        capacity_tokens = policy_table.capacity_tokens(chains, share)
        belady = 100 * ceilings.belady(capacity_tokens // segment_tokens).block
        assert max(lru, adaptive) <= belady
