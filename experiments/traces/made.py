"""Traces that are made, not read: conversations for a fresh machine, questions over documents.

Functions of one seed; nothing depends on the rank or on ``PYTHONHASHSEED``.
"""

from __future__ import annotations

import numpy as np

from experiments.common.datasets import load_documents
from experiments.common.workload import Popularity, WorkloadOptions, build_workload
from experiments.traces.stream import Tokens, TraceRequest, in_order, text_tokens

CONVERSATIONS = 22  # stream of the seed
SYSTEM_PROMPTS = 6
SYSTEM_TOKENS = (200, 800)
MESSAGE_TOKENS = (20, 300)
MEAN_TURNS = 5.0
MEAN_ARRIVAL_S = 4.0
MEAN_THINKING_S = 20.0
QUESTION_EVERY_S = 1.0


def conversations(requests: int, seed: int) -> list[TraceRequest]:
    """Return that many requests of conversations in turns, several going on at a time.

    A conversation begins with one of six system prompts (by ``zipf(1)``); each prompt is the one
    before it, the answer to that, and a new message.
    """
    random = np.random.default_rng([seed, CONVERSATIONS])
    systems = [_tokens(random, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    made: list[TraceRequest] = []
    session, start_s = 0, 0.0
    while len(made) < requests:
        start_s += random.exponential(MEAN_ARRIVAL_S)
        time_s = start_s
        (rank,) = Popularity("zipf", 1.0).sample(random, documents=SYSTEM_PROMPTS, count=1)
        prompt = systems[rank]
        for _ in range(int(random.geometric(1 / MEAN_TURNS))):
            prompt = np.concatenate([prompt, _tokens(random, MESSAGE_TOKENS)])
            answer = _tokens(random, MESSAGE_TOKENS)
            made.append(TraceRequest(time_s, session, prompt, len(prompt), len(answer), answer))
            prompt = np.concatenate([prompt, answer])
            time_s += random.exponential(MEAN_THINKING_S)
        session += 1
    return in_order(made)[:requests]


def questions(
    dataset: str,
    *,
    requests: int,
    seed: int,
    popularity: str,
    documents: int,
    context_tokens: int,
) -> list[TraceRequest]:
    """Return questions over documents as `exp_qa_replay` asks them; a document is a session.

    Raises
    ------
    DatasetError, WorkloadError
        The data set is absent or malformed, or has fewer documents.
    """
    workload = build_workload(
        load_documents(dataset, seed=seed),
        lambda text: text_tokens(text).tolist(),
        WorkloadOptions(
            context_tokens=context_tokens,
            documents=documents,
            requests=requests,
            popularity=Popularity.parse(popularity),
            routing="round_robin",  # the replay has routings of its own
            clients=1,
            seed=seed,
        ),
    )
    return [
        TraceRequest(
            request.index * QUESTION_EVERY_S, request.document, request.tokens,
            len(request.tokens), 1,
        )
        for request in workload.requests
    ]  # fmt: skip


def _tokens(random: np.random.Generator, counts: tuple[int, int]) -> Tokens:
    return random.integers(2**32, size=int(random.integers(*counts)), dtype=np.uint32)
