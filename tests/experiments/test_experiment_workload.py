"""Sampler, prompts and routing: exact where they can be, within bounds where they are random."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest

from experiments.common.datasets import Document
from experiments.common.workload import (
    Popularity,
    WorkloadError,
    WorkloadOptions,
    build_workload,
)

DIGEST_PROGRAM = """
from experiments.common.datasets import load_documents
from experiments.common.workload import *
options = WorkloadOptions(context_tokens=500, documents=12, requests=40, clients=3, seed=5,
                          popularity=Popularity.parse("{popularity}"), routing="random")
documents = load_documents("embedded", seed=5)
print(build_workload(documents, lambda text: list(text.encode()), options).digest())
"""


def tokenize(text):
    return list(text.encode())


def make_documents(count=20, characters=900):
    return [
        Document(f"d{i}", f"Title {i}", f"{i:03d}|" * (characters // 4), (f"Q{i}?", f"R{i}?"))
        for i in range(count)
    ]


def make_options(**changes):
    settings = {
        "context_tokens": 256,
        "documents": 10,
        "requests": 60,
        "popularity": Popularity("power", 6.0),
        "routing": "random",
        "clients": 3,
        "seed": 1,
    }
    return WorkloadOptions(**settings | changes)


def test_power_follows_its_distribution_function():
    # P(x < t) = t^a for numpy's power(a), so rank r (from the top) has ((D-r)^a - (D-r-1)^a) / D^a.
    count, ranks = 200_000, 8
    drawn = Popularity.parse("power:6").sample(
        np.random.default_rng(3), documents=ranks, count=count
    )
    shares = np.bincount(drawn, minlength=ranks) / count
    edges = (np.arange(ranks, -1, -1) / ranks) ** 6
    np.testing.assert_allclose(shares, edges[:-1] - edges[1:], atol=0.004)


def test_zipf_follows_its_law():
    count, ranks = 200_000, 5
    drawn = Popularity.parse("zipf:1.5").sample(
        np.random.default_rng(3), documents=ranks, count=count
    )
    weights = 1 / np.arange(1, ranks + 1) ** 1.5
    shares = np.bincount(drawn, minlength=ranks) / count
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.004)


def test_uniform_draws_every_rank_alike():
    drawn = Popularity.parse("uniform").sample(np.random.default_rng(3), documents=4, count=100_000)
    np.testing.assert_allclose(np.bincount(drawn) / 100_000, 0.25, atol=0.006)


@pytest.mark.parametrize("text", ["power", "power:0", "power:x", "zipf:-1", "uniform:2", "gauss"])
def test_an_impossible_popularity_is_refused(text):
    with pytest.raises(WorkloadError, match="--popularity must be power:A"):
        Popularity.parse(text)


@pytest.mark.parametrize("context_tokens", [100, 900, 2_500])
def test_prompts_are_the_context_exactly_then_the_question(context_tokens):
    documents = make_documents()
    workload = build_workload(documents, tokenize, make_options(context_tokens=context_tokens))
    by_title = {document.title: document for document in documents}
    for request in workload.requests:
        document = by_title[workload.titles[request.document]]
        question = document.questions[request.question]
        text = bytes(request.tokens.astype(np.uint8)).decode()
        head = document.text[:context_tokens]
        assert text.startswith(head)
        assert text[context_tokens:] == f"\n\nQuestion: {question}\nAnswer:"
        assert request.tokens.dtype == np.uint32


def test_one_document_is_one_context_everywhere():
    workload = build_workload(make_documents(), tokenize, make_options())
    contexts = defaultdict(set)
    for request in workload.requests:
        contexts[request.document].add(request.tokens[:256].tobytes())
    assert all(len(found) == 1 for found in contexts.values())
    assert len(set.union(*contexts.values())) == len(contexts)


def test_distinct_prompts_differ_in_their_first_block():
    # More prompts than documents: contexts then start within documents.
    workload = build_workload(
        [Document("a", "A", "".join(map(str, range(3000))), ("Q?",)), *make_documents(2)],
        tokenize,
        make_options(popularity=Popularity("distinct"), requests=50, context_tokens=400),
    )
    heads = {request.tokens[:16].tobytes() for request in workload.requests}
    assert len(heads) == len(workload.requests) == 50
    assert len({request.document for request in workload.requests}) == 50


def test_distinct_needs_enough_text():
    with pytest.raises(WorkloadError, match="too little text for 60 prompts"):
        build_workload(
            [Document("a", "A", "abc" * 100, ("Q?",))],
            tokenize,
            make_options(popularity=Popularity("distinct")),
        )


@pytest.mark.parametrize("routing", ["random", "round_robin", "sorted"])
def test_equal_shares_up_to_one(routing):
    workload = build_workload(make_documents(), tokenize, make_options(routing=routing))
    shares = Counter(request.client for request in workload.requests)
    assert shares == {0: 20, 1: 20, 2: 20}


def test_routing_changes_neither_requests_nor_their_number():
    def content(routing):
        requests = build_workload(
            make_documents(), tokenize, make_options(routing=routing)
        ).requests
        return sorted((r.index, r.document, r.question, r.tokens.tobytes()) for r in requests)

    first, *others = (content(r) for r in ("random", "round_robin", "affinity", "sorted"))
    assert [index for index, *_ in first] == list(range(60))
    assert all(other == first for other in others)


def test_round_robin_deals_in_turn():
    workload = build_workload(make_documents(), tokenize, make_options(routing="round_robin"))
    assert [request.client for request in workload.requests] == [i % 3 for i in range(60)]


def test_affinity_keeps_a_document_on_one_client_and_uses_all_clients():
    workload = build_workload(make_documents(), tokenize, make_options(routing="affinity"))
    clients = defaultdict(set)
    for request in workload.requests:
        clients[request.document].add(request.client)
    assert all(len(found) == 1 for found in clients.values())
    assert set.union(*clients.values()) == {0, 1, 2}


def test_sorted_orders_by_prefix_in_contiguous_shares():
    workload = build_workload(make_documents(), tokenize, make_options(routing="sorted"))
    prompts = [request.tokens.tolist() for request in workload.requests]
    assert prompts == sorted(prompts)
    clients = [request.client for request in workload.requests]
    assert clients == sorted(clients)


def test_popular_documents_recur_across_clients_with_the_defaults():
    options = make_options(requests=24, clients=2)
    workload = build_workload(make_documents(), tokenize, options)
    clients = defaultdict(set)
    for request in workload.requests:
        clients[request.document].add(request.client)
    assert sum(len(found) == 2 for found in clients.values()) >= 3


def test_the_clients_shares_make_up_the_workload():
    workload = build_workload(make_documents(), tokenize, make_options())
    shares = [request for client in range(3) for request in workload.of_client(client)]
    assert sorted(r.index for r in shares) == list(range(60))


def test_another_seed_is_another_workload():
    digests = {
        build_workload(make_documents(), tokenize, make_options(seed=seed)).digest()
        for seed in (0, 1, 2, 1)
    }
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"documents": 21}, "--documents 21 expected at most the 20 documents"),
        ({"routing": "psychic"}, "--routing must be one of random, round_robin"),
        ({"requests": 0}, "requests must be at least 1, given 0"),
        ({"seed": -1}, "seed must be 0 or more, given -1"),
    ],
)
def test_impossible_options_are_refused_by_name(change, complaint):
    with pytest.raises(WorkloadError, match=complaint):
        build_workload(make_documents(), tokenize, make_options(**change))


@pytest.mark.parametrize("popularity", ["power:6", "distinct"])
def test_the_workload_is_the_same_under_any_hash_seed(repository, popularity):
    digests = set()
    for hash_seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST_PROGRAM.format(popularity=popularity)],
            cwd=repository,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1
    assert len(digests.pop()) == 64
