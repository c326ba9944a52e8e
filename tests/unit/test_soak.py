"""The soak's own judgement, and that it sees what it looks for: in one process."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from ptstore_mpi import Namespace
from ptstore_mpi.testing import soak
from ptstore_mpi.testing.soak_prompts import MOST_TOKENS, TEXT_TOKENS, Conversations

MIB = 1 << 20
GOOD = {
    "capacity_bytes": 100, "free_bytes": 40, "owned_bytes": 30, "reserved_bytes": 10,
    "zombie_bytes": 10, "metadata_bytes": 10, "leased_bytes": 20,
}  # fmt: skip


def test_growth_is_that_of_the_second_half_over_the_first():
    flat = [10 * MIB] * 40
    assert soak.growth_bytes(flat) == 0
    assert soak.growth_bytes([0, *[10 * MIB] * 3, *flat]) == 0  # what fills at first is left out
    assert soak.growth_bytes([*flat[:20], 99 * MIB, *flat[20:]]) == 0  # a moment is no growth
    assert soak.growth_bytes([n * MIB for n in range(40)]) == 16 * MIB
    assert soak.growth_bytes(flat[:9]) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"replica_bytes": 0}, None),
        ({"owned_bytes": 31}, "of 100 bytes 40 are free beside"),
        ({"replica_bytes": 1}, "of 100 bytes 40 are free beside"),
        ({"free_bytes": -1}, "of 100 bytes -1 are free"),
        ({"zombie_bytes": -1}, "of 100 bytes"),
        ({"leased_bytes": 101}, "101 bytes are leased of 100"),
    ],
)
def test_a_budget_that_is_broken_is_seen(changes, said):
    found = soak.over_budget({**GOOD, **changes})
    assert found is None if said is None else found.startswith(said)


def facts(*, samples, left_over=(), leased_bytes=0, is_client=True):
    work = soak.Work(looks=5, servers=[{**GOOD, "leased_bytes": leased_bytes}])
    return {
        "work": work if is_client else None, "samples": samples, "left_over": list(left_over),
    }  # fmt: skip


def test_whatever_is_wrong_is_said():
    flat = [10 * MIB] * 20
    good = [facts(samples=flat, is_client=False), facts(samples=flat)]
    assert soak.summarise(good, minutes=1)["wrong"] == []
    bad = [
        facts(samples=[n * MIB for n in range(40)], is_client=False),
        facts(samples=flat, left_over=["/dev/shm/x is left"], leased_bytes=7),
        facts(samples=flat, left_over=["/dev/shm/x is left"]),
    ]
    found = soak.summarise(bad, minutes=1)
    assert found["server_growth_bytes"] == 16 * MIB
    assert [text.partition(" ")[0] for text in found["wrong"]] == ["rank", "/dev/shm/x", "7"]
    assert "WRONG; rank 0, a server, has grown by 16,777,216 bytes" in soak._line(found)


def test_prompts_grow_share_and_diverge():
    mine, others = (
        Conversations(50, seed=3, rng=np.random.default_rng(number)) for number in range(2)
    )
    longest = mine.prompt(7, 11, 0)
    assert len(longest) == MOST_TOKENS
    lengths = [len(mine.prompt(7, turn, 0)) for turn in range(12)]
    assert lengths == sorted(set(lengths))
    for turn, length in enumerate(lengths):
        assert np.array_equal(others.prompt(7, turn, 0), longest[:length])
    branch = mine.prompt(7, 5, 2)
    assert np.array_equal(branch[: lengths[4]], longest[: lengths[4]])
    assert len(branch) == lengths[5]
    assert not np.array_equal(branch, longest[: lengths[5]])
    # Conversations 7 and 15 share a system prompt, and no more.
    system_tokens = MOST_TOKENS - TEXT_TOKENS
    other = mine.prompt(15, 11, 0)
    assert np.array_equal(other[:system_tokens], longest[:system_tokens])
    assert not np.array_equal(other[system_tokens:], longest[system_tokens:])
    drawn = Counter(mine.next_prompt()[system_tokens] for _ in range(2000))
    assert drawn.most_common(1)[0][1] > 8 * np.median(list(drawn.values()))


def test_in_one_process(capsys):
    assert soak.main(["--minutes", "0.03", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["servers"], found["clients"], found["wrong"]) == (1, 1, [])
    assert found["tokens"]["owned"] > 0 == found["tokens"]["remote"]
    assert found["checked_bytes"] == found["tokens"]["owned"] * soak.LAYOUT.bytes_per_token


def test_one_wrong_byte_is_seen(monkeypatch):
    honest = Namespace.load

    def load(self, match, out, **options):
        result = honest(self, match, out, **options)
        if result.tokens > 64:
            out[-1].reshape(-1).view(np.uint8)[5] ^= 1
        return result

    monkeypatch.setattr(Namespace, "load", load)
    with pytest.raises(AssertionError, match="block 0 is not that of its prefix"):
        soak.main(["--minutes", "0.05"])


def test_tokens_that_do_not_add_up_are_seen(monkeypatch):
    honest = soak.Soak.request

    def request(self):
        honest(self)
        self.work.tokens["owned"] += 1

    monkeypatch.setattr(soak.Soak, "request", request)
    with pytest.raises(AssertionError, match="owned: the store counted"):
        soak.main(["--minutes", "0.01"])


@pytest.mark.parametrize("minutes", ["0", "-1", "soon", "nan"])
def test_impossible_minutes_are_refused(minutes, capsys):
    with pytest.raises(SystemExit) as caught:
        soak.main(["--minutes", minutes])
    assert caught.value.code == 2
    assert "expected minutes above 0" in capsys.readouterr().err
