"""vLLM's own statistics of the connector, and ours: the same tokens."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

from vllm_engines import BLOCK, books_kept

from ptstore_mpi import SOURCES


@pytest.fixture
def told(engine, monkeypatch):
    """Add up what the scheduler tells vLLM's loggers at each step."""
    told = Counter()
    make_stats = engine.scheduler.make_stats

    def noted(*args, **options):
        stats = make_stats(*args, **options)
        if stats is not None:
            hits = stats.connector_prefix_cache_stats
            told.update(external_queries=hits.queries, external_hits=hits.hits)
            told.update(stats.kv_connector_stats or {})
        return stats

    monkeypatch.setattr(engine.scheduler, "make_stats", noted)
    return told


def test_the_books_of_all_three_agree(engine, plain, tokens, told):
    engine.step()
    told.clear()
    prefix = tokens(5 * BLOCK)
    prompts = [prefix + tokens(length) for length in (3, 40)]
    right = plain.answer_alone(*prompts)
    with books_kept(engine) as counted:
        assert engine.answer_alone(prompts[0]) == right[:1]
        engine.forget()
        assert engine.answer_alone(*prompts) == right
        engine.settle()
        engine.answer_alone(tokens(3))  # statistics travel with a step's output
    for name in (*SOURCES, "asked", "recomputed"):
        assert told[f"{name}_tokens"] == counted[name], name
    loaded = sum(counted[name] for name in SOURCES if name != "engine")
    assert told["external_hits"] == loaded > 0
    assert told["external_queries"] == counted["asked"] - counted["engine"]
