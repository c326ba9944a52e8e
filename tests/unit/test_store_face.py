"""The public face where the conformance suite does not reach: launch, counters, mix-ups."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

import ptstore_mpi as pt
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import SMALL, small_config
from ptstore_mpi.testing.oracle import Oracle

TINY = pt.Config(memory_bytes=1 << 20, segment_tokens=16)


def arena_handles():
    """Return the open descriptors and mappings of arenas in this process."""
    gc.collect()
    links = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(each.readlink()))
        except FileNotFoundError:
            continue
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [text for text in (*links, *mapped) if "ptstore-arena" in text]


def test_run_returns_what_main_returned():
    assert pt.run(lambda store: (store.client_rank, store.client_count), TINY) == (0, 1)


def test_an_exception_of_main_is_raised_in_one_process():
    def main(store):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pt.run(main, TINY)


def test_run_gives_the_arena_back():
    before = arena_handles()
    pt.run(lambda store: None, TINY)
    assert arena_handles() == before


def test_run_gives_the_arena_back_after_an_exception():
    """Else a notebook that fails a few times holds as many arenas."""

    def main(store):
        raise KeyError("mine")

    before = arena_handles()
    for _ in range(3):
        with pytest.raises(KeyError):
            pt.run(main, TINY)
    assert arena_handles() == before


def test_no_file_stays_in_the_folder_of_the_arenas(tmp_path):
    config = pt.Config(memory_bytes=1 << 20, shared_memory_dir=str(tmp_path))
    assert pt.run(lambda store: list(tmp_path.iterdir()), config) == []


def test_launch_is_the_longer_form_of_run():
    job = pt.launch(TINY)
    assert not job.is_server
    assert job.client.config == TINY
    assert job.client.transport_name == "local"
    job.close()
    with pytest.raises(pt.ClosedError):
        job.client.namespace("model", SMALL)
    job.close()


def test_settings_come_from_the_environment_where_none_are_given(monkeypatch):
    monkeypatch.setenv("PTSTORE_MEMORY_BYTES", "2MiB")
    assert pt.run(lambda store: store.config.memory_bytes) == 2 << 20


def test_every_counter_is_there_from_the_beginning():
    """Whoever records statistics must not ask first whether a counter exists."""

    def main(store):
        return store.stats(), store.server_stats()[0]

    stats, server = pt.run(main, TINY)
    wanted = {"rma_bytes", "discarded_bytes", "local_bytes", "stored_sent_bytes"}
    assert wanted <= set(stats["bytes"]), stats["bytes"]
    assert {f"write_{s}_count" for s in ("published", "full", "dedup", "expired")} <= set(server)


def test_segment_tokens_must_fit_the_layout():
    def main(store):
        with pytest.raises(pt.ConfigError, match=r"multiple.*\(5\).*16"):
            store.namespace("m", pt.KVLayout(SMALL.tensors, 5))

    pt.run(main, TINY)


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "tenant"},
        {"layout": pt.KVLayout((pt.TensorSpec("key", 24), pt.TensorSpec("value", 64)), 4)},
    ],
)
def test_a_match_of_another_namespace_loads_nothing(other):
    """Any doubt is a miss or an error, never bytes of somebody else."""
    cluster = Cluster(small_config(), server_nodes=(0,), client_nodes=(0,))
    store = cluster.store(cluster.clients[0])
    mine = store.namespace("m", SMALL)
    prompt = np.arange(32)
    mine.store(prompt, Oracle(SMALL).arrays(prompt))
    match = mine.match(np.append(prompt, 1))
    layout = other.pop("layout", SMALL)
    theirs = store.namespace("m", layout, **other)
    out = Oracle(layout).blank(8)
    try:
        result = theirs.load(match, out)
    except ValueError:
        return
    assert result.tokens == 0, result


def test_staging_grows_to_the_largest_segment_of_any_namespace():
    cluster = Cluster(
        small_config(slots=200, staging_bytes=4096, get_bytes=1000), client_nodes=(0, 1)
    )
    wide = pt.KVLayout((pt.TensorSpec("key", 5000),), 4)
    prompt = np.arange(64)
    for layout in (SMALL, wide, SMALL):
        stores = [cluster.store(client) for client in cluster.clients]
        one, two = (store.namespace("m", layout) for store in stores)
        one.store(prompt, Oracle(layout).arrays(prompt))
        out = Oracle(layout).blank(16)
        match = two.match(np.append(prompt, 1))
        assert two.load(match, out).tokens == 64
        Oracle(layout).check(prompt, out, until_tokens=64)


@pytest.mark.parametrize("staging_bytes", [1, 4095, 4097, 10_001])
def test_any_size_of_staging_works(staging_bytes):
    config = pt.Config(
        memory_bytes=1 << 20,
        segment_tokens=8,
        staging_bytes=staging_bytes,
        get_bytes=1,
        verify="always",
    )

    def main(store):
        namespace = store.namespace("m", SMALL)
        prompt = np.arange(32)
        namespace.store(prompt, Oracle(SMALL).arrays(prompt))
        out = Oracle(SMALL).blank(8)
        result = namespace.load(namespace.match(np.append(prompt, 1)), out)
        Oracle(SMALL).check(prompt, out, until_tokens=result.tokens)
        return result.tokens

    assert pt.run(main, config) == 32


def stored(**settings):
    """Return a namespace of two nodes, and a prompt whose segments of two blocks both own."""
    cluster = Cluster(small_config(slots=20, placement="local", **settings))
    one, two = (cluster.store(client).namespace("m", SMALL) for client in cluster.clients)
    prompt = np.arange(61)
    one.store(prompt[:28], Oracle(SMALL).arrays(prompt[:28]))
    two.store(prompt, Oracle(SMALL).arrays(prompt))
    return cluster, one, prompt


@pytest.mark.parametrize("tokens", range(0, 61, 4))
def test_a_cut_match_is_the_match_of_a_shorter_prompt(tokens):
    _, namespace, prompt = stored()
    match = namespace.match(prompt)
    cut = namespace.cut(match, prompt, tokens)
    shorter = namespace.match(prompt[: tokens + 1])
    assert (cut.tokens, cut.segments) == (tokens, shorter.segments)
    assert cut.prompt_tokens == 61
    assert cut.reason == ("cut" if tokens < 60 else "whole")
    out = Oracle(SMALL).blank(tokens // 4)
    assert namespace.load(cut, out).tokens == tokens
    Oracle(SMALL).check(prompt, out, until_tokens=tokens)


def test_cutting_nothing_away_changes_nothing():
    _, namespace, prompt = stored()
    match = namespace.match(prompt)
    assert namespace.cut(match, prompt, match.tokens) is match
    miss = namespace.match(prompt + 1)
    assert namespace.cut(miss, prompt + 1, 0) is miss


def test_a_cut_asks_no_server():
    cluster, namespace, prompt = stored()
    match = namespace.match(prompt)
    cluster.on_request = lambda server, message: pytest.fail(f"{server} was asked {message}")
    namespace.cut(match, prompt, 20)


@pytest.mark.parametrize(
    ("change", "tokens", "message"),
    [
        (lambda prompt: prompt[:-1], 20, "tokens: expected the 61 of the match, got 60"),
        (lambda prompt: np.append(prompt, 1), 20, "tokens: expected the 61 of the match, got 62"),
        (lambda prompt: prompt + 1, 20, "tokens: expected those of the match"),
        (lambda prompt: prompt, 64, r"token_count: .*match\.tokens \(60\), got 64"),
        (lambda prompt: prompt, 22, "token_count: .*multiple of block_tokens"),
        (lambda prompt: prompt, -4, "token_count: .*multiple of block_tokens"),
    ],
)
def test_cuts_that_are_refused(change, tokens, message):
    _, namespace, prompt = stored()
    with pytest.raises(ValueError, match=message):
        namespace.cut(namespace.match(prompt), change(prompt), tokens)


@pytest.mark.parametrize(("known", "skip"), [(60, 60), (28, 32), (28, 60), (0, 4), (0, 60)])
def test_all_that_the_caller_has_counts_as_engine(known, skip):
    """Also beyond what the store knows: nobody computes it again."""
    cluster, _, prompt = stored()
    store = cluster.store(cluster.clients[0])
    namespace = store.namespace("m", SMALL)
    other = np.append(prompt[:known], np.full(61 - known, 9))
    match = namespace.match(other)
    assert match.tokens == known
    result = namespace.load(match, Oracle(SMALL).blank(15), skip_tokens=skip)
    assert (result.tokens, result.by_source["engine"], result.reason) == (skip, skip, "nothing")
    tokens = store.stats()["tokens"]
    assert (tokens["asked"], tokens["engine"], tokens["recomputed"]) == (61, skip, 61 - skip)


@pytest.mark.parametrize("known", [0, 60])
def test_nobody_has_more_than_the_prompt(known):
    _, namespace, prompt = stored()
    match = namespace.match(prompt if known else prompt + 1)
    with pytest.raises(ValueError, match=r"skip_tokens: .*prompt_tokens \(61\), got 64"):
        namespace.load(match, Oracle(SMALL).blank(15), skip_tokens=64)
