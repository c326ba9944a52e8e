"""What becomes of a request whose load is declined: outputs, counters, and what is kept."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")

import ptstore_mpi
from ptstore_mpi import SOURCES, Config, LoadResult
from ptstore_mpi.integrations.fetch_or_recompute import PROBE_EVERY
from ptstore_mpi.integrations.transformers import FetchOrRecompute, PrefixReuse

CONFIG = Config(memory_bytes=16 << 20, segment_tokens=32, copy_threads=1)
SAMPLES = 8


def with_reuse(engine, work, fetch=None, *, near_servers=None):
    """Run `work(reuse, store)` in a job of one process."""

    def main(store):
        namespace = engine.namespace(store)
        if near_servers is not None:
            namespace.near_servers = near_servers
        return work(PrefixReuse(engine, namespace, fetch=fetch), store)

    return ptstore_mpi.run(main, CONFIG)


def measured(load_s, *, source="owned", tokens=96, is_on=True):
    """Return a cost model that has seen loads as slow as that, and quick prefills."""
    fetch = FetchOrRecompute(is_on=is_on)
    for _ in range(SAMPLES):
        fetch.note_prefill(tokens, 0.01)
        fetch.note_load({source: tokens}, load_s)
    return fetch


def test_a_declined_prefix_is_recomputed_to_the_same_outputs(engine, tokens):
    document, question = tokens(100), tokens(9, seed=2)

    def work(reuse, store):
        reuse.keep(reuse.first_token(document))
        before = store.stats()
        declined = reuse.first_token(document + question)
        after = store.stats()
        reuse.fetch.is_on = False
        return before, declined, after, reuse.first_token(document + question)

    before, declined, after, fetched = with_reuse(engine, work, measured(1e3))
    whole = engine.prefill(document + question)
    parts = (declined.reason, declined.loaded_tokens, declined.recomputed_tokens)
    assert parts == ("declined", 0, 109)
    assert (fetched.reason, fetched.loaded_tokens) == ("whole", 96)
    assert set(declined.by_source.values()) == {0}
    assert np.array_equal(declined.logits, whole.logits)
    assert declined.token == fetched.token == whole.token
    added = {name: n - before["tokens"][name] for name, n in after["tokens"].items()}
    assert added == {"asked": 109, **dict.fromkeys(SOURCES, 0), "recomputed": 109, "stored": 0}
    assert after["calls"]["load"] - before["calls"]["load"] == 1


def test_what_was_computed_beyond_a_declined_prefix_is_kept(engine, tokens):
    document, question = tokens(96), tokens(40, seed=2)

    def work(reuse, _):
        reuse.keep(reuse.first_token(document))
        kept = reuse.keep(reuse.first_token(document + question))
        reuse.fetch.is_on = False
        return kept, reuse.first_token(document + question)

    kept, fetched = with_reuse(engine, work, measured(1e3))
    assert (kept.reason, kept.tokens) == ("stored", 32)
    assert fetched.loaded_tokens == 128
    buffers = engine.allocate(136)
    engine.prefill((document + question)[:96], buffers)
    expected = engine.prefill(document + question, buffers, 96)
    assert np.abs(fetched.logits - expected.logits).max() <= 0.05
    assert fetched.token == expected.token


@pytest.mark.parametrize(
    ("fetch", "reason"),
    [
        (measured(1e-6), "whole"),
        (measured(1e3, is_on=False), "whole"),
        (measured(1e3, source="remote"), "whole"),
        (measured(1e3), "declined"),
    ],
)
def test_only_a_load_that_was_measured_as_slower_is_declined(engine, tokens, fetch, reason):
    def work(reuse, _):
        reuse.keep(reuse.first_token(tokens(100)))
        return reuse.first_token(tokens(100) + tokens(9, seed=2))

    assert with_reuse(engine, work, fetch).reason == reason


def test_segments_of_other_nodes_are_judged_as_such(engine, tokens):
    def work(reuse, _):
        reuse.keep(reuse.first_token(tokens(100)))
        return reuse.first_token(tokens(100) + tokens(9, seed=2))

    fetch = measured(1e3, source="remote")
    assert with_reuse(engine, work, fetch, near_servers=()).reason == "declined"


def test_the_sixteenth_is_fetched_and_measured_again(engine, tokens):
    prompt = tokens(97)

    def work(reuse, _):
        reuse.keep(reuse.first_token(prompt))
        return [reuse.first_token(prompt).loaded_tokens for _ in range(PROBE_EVERY)]

    fetch = measured(1e3)
    assert with_reuse(engine, work, fetch) == [0] * (PROBE_EVERY - 1) + [96]
    told = fetch.as_dict()
    assert told["load"]["owned"]["measured_count"] == SAMPLES - 1 + 1
    assert told["prefill"]["measured_count"] == SAMPLES - 1 + 1 + PROBE_EVERY
    assert told["verdicts"] == {"nothing": 1, "slower": PROBE_EVERY - 1, "probe": 1}


def test_by_default_it_is_on_and_measures(engine, tokens):
    prompt = tokens(97)

    def work(reuse, _):
        reuse.keep(reuse.first_token(prompt))
        return [reuse.first_token(prompt) for _ in range(3)], reuse.fetch.as_dict()

    answers, told = with_reuse(engine, work)
    assert [answer.loaded_tokens for answer in answers] == [96] * 3
    assert told["is_on"] is True
    assert told["verdicts"] == {"nothing": 1, "unmeasured": 3}
    assert (told["prefill"]["measured_count"], told["load"]["owned"]["measured_count"]) == (3, 2)


def test_a_load_that_ran_out_of_time_counts_as_slow(engine, tokens, monkeypatch):
    prompt = tokens(97)

    def work(reuse, _):
        reuse.keep(reuse.first_token(prompt))
        honest = reuse.namespace.load

        def load(match, out):
            honest(match, out)
            return LoadResult(0, dict.fromkeys(SOURCES, 0), {}, "late" if match.tokens else "", 10)

        monkeypatch.setattr(reuse.namespace, "load", load)
        return [reuse.first_token(prompt).reason for _ in range(6)]

    fetch = FetchOrRecompute()
    assert with_reuse(engine, work, fetch) == ["late"] * 4 + ["declined"] * 2
