"""What is worth a replica."""

from __future__ import annotations

import random

from ptstore_mpi.cache import admission
from ptstore_mpi.cache.admission import make_admission


def test_second_hit_admits_what_was_asked_for_before():
    chosen = make_admission("second_hit")
    dice = random.Random(1)
    contents = [dice.getrandbits(64) for _ in range(4000)]
    first = sum(map(chosen.admits, contents))
    assert first < 0.01 * len(contents), "those the sketch takes for others"
    assert all(map(chosen.admits, contents))


def test_second_hit_forgets_what_was_asked_for_long_ago(monkeypatch):
    monkeypatch.setattr(admission, "_AGE_COUNT", 100)
    chosen = make_admission("second_hit")
    chosen.admits(7)
    for content in range(1000, 1100):
        chosen.admits(content)
    assert chosen.admits(7) is False


def test_always_and_never():
    assert make_admission("always").admits(1) is True
    assert make_admission("never").admits(1) is False
