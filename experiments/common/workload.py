"""Which prompt is asked when, and by which client: a function of one seed.

Owns popularity, the cutting of documents to a number of tokens, and the routing of requests to
clients. Never reads files, never knows a system or a model: the tokenizer is an argument.

Every random choice draws from its own stream of the seed, so changing the routing does not change
the requests. Nothing depends on the rank or on ``PYTHONHASHSEED``.

Source: PTStore (arXiv 2607.22648) samples documents and questions from a power law with exponent
6. ``numpy.random.Generator.power(6)`` over ranked documents reproduces its hit rates: own GPU
about 1 to 2 %, pooled about 96 %.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from experiments.common.datasets import Document

Tokenize = Callable[[str], Sequence[int]]
Tokens = npt.NDArray[np.uint32]

ROUTINGS = ("random", "round_robin", "affinity", "sorted")
POPULARITIES = ("power", "zipf", "uniform", "distinct")
RANKING, POPULARITY, QUESTION, ROUTING = 1, 2, 3, 4  # streams of the seed
JOIN = "\n\n"
QUESTION_FORMAT = "\n\nQuestion: {question}\nAnswer:"
LARGEST_PARAMETER = 100  # of power and zipf: one document takes all long before
DISTINCT_HEAD_TOKENS = 16  # contexts of the no-reuse case differ within the first block


class WorkloadError(ValueError):
    """The workload asked for cannot be built; says what was expected and given."""


@dataclass(frozen=True, slots=True)
class Popularity:
    """How often documents are asked for, by rank (0 = most popular)."""

    name: str
    parameter: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Popularity:
        """Read ``power:6``, ``zipf:1.1``, ``uniform`` or ``distinct``."""
        name, _, value = text.partition(":")
        takes_parameter = name in ("power", "zipf")
        try:
            parameter = float(value) if value else 0.0
        except ValueError:
            parameter = float("nan")
        valid = 0 < parameter <= LARGEST_PARAMETER if takes_parameter else not value
        if name not in POPULARITIES or not valid:
            raise WorkloadError(
                f"--popularity must be power:A, zipf:S (numbers above 0, at most "
                f"{LARGEST_PARAMETER}), uniform or distinct; given: {text!r:.80}"
            )
        return cls(name, parameter)

    def sample(
        self, random: np.random.Generator, *, documents: int, count: int
    ) -> npt.NDArray[np.int64]:
        """Draw `count` document ranks below `documents`.

        ``power(a)``: ``x = Generator.power(a)`` lies in [0, 1) and crowds near 1; the rank is
        ``floor(x * documents)`` counted from the top. ``zipf(s)``: p(rank) ~ 1 / (rank + 1)^s.
        """
        if self.name == "power":
            position = np.floor(random.power(self.parameter, count) * documents)
            return documents - 1 - np.minimum(position, documents - 1).astype(np.int64)
        if self.name == "zipf":
            weights = 1.0 / np.arange(1, documents + 1, dtype=np.float64) ** self.parameter
            return random.choice(documents, size=count, p=weights / weights.sum())
        if self.name == "uniform":
            return random.integers(documents, size=count)
        if count > documents:
            raise WorkloadError(f"distinct needs {count} documents, given {documents}")
        return np.arange(count, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What defines a workload, beside the documents and the tokenizer."""

    context_tokens: int
    documents: int
    requests: int
    popularity: Popularity
    routing: str
    clients: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse impossible values by name."""
        for name in ("context_tokens", "documents", "requests", "clients"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name} must be at least 1, given {getattr(self, name)}")
        if self.routing not in ROUTINGS:
            raise WorkloadError(
                f"--routing must be one of {', '.join(ROUTINGS)}; given: {self.routing!r}"
            )
        if self.seed < 0:
            raise WorkloadError(f"seed must be 0 or more, given {self.seed}")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt: `document` is a popularity rank, `tokens` are uint32, `client` answers it."""

    index: int
    document: int
    question: int
    tokens: Tokens
    client: int


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """All requests of a run in the order in which they are dealt out."""

    requests: tuple[Request, ...]
    titles: tuple[str, ...]  # by document rank

    def of_client(self, client: int) -> list[Request]:
        """Return the requests of one client, in order."""
        return [request for request in self.requests if request.client == client]

    def digest(self) -> str:
        """Return a hash of every prompt and its client: equal on all ranks, or the run is void."""
        state = hashlib.sha256()
        for request in self.requests:
            state.update(f"{request.index} {request.document} {request.client} ".encode())
            state.update(request.tokens.astype("<u4").tobytes())
        return state.hexdigest()


def build_workload(
    documents: Sequence[Document], tokenize: Tokenize, options: WorkloadOptions
) -> Workload:
    """Build the requests of a run.

    Parameters
    ----------
    documents : sequence of Document
        In an order that is the same on every rank; the seed ranks them.
    tokenize : callable
        Text to token ids, without special tokens.
    options : WorkloadOptions

    Returns
    -------
    Workload
        Prompts are exactly `options.context_tokens` tokens of document, then the question.

    Raises
    ------
    WorkloadError
        More documents asked for than there are.
    """
    distinct = options.popularity.name == "distinct"
    if not distinct and options.documents > len(documents):
        raise WorkloadError(
            f"--documents {options.documents} expected at most the {len(documents)} documents "
            "of this data set"
        )
    order = np.random.default_rng([options.seed, RANKING]).permutation(len(documents))
    ranked = [documents[i] for i in order]
    if distinct:
        contexts, sources = _distinct_contexts(ranked, tokenize, options)
    else:
        contexts = _contexts(ranked, tokenize, options)
        sources = list(range(options.documents))
    random = np.random.default_rng([options.seed, POPULARITY])
    asked = options.popularity.sample(random, documents=len(contexts), count=options.requests)
    requests = _ask(asked, contexts, [ranked[i] for i in sources], tokenize, options.seed)
    titles = tuple(ranked[i].title for i in sources)
    return Workload(tuple(route(requests, options)), titles)


def _contexts(
    ranked: Sequence[Document], tokenize: Tokenize, options: WorkloadOptions
) -> list[Tokens]:
    """Cut each document to the context, or join the documents ranked after it until it fills."""
    tokens: dict[int, Tokens] = {}
    contexts = []
    for rank in range(options.documents):
        parts: list[Tokens] = []
        position = rank
        while sum(len(part) for part in parts) < options.context_tokens:
            place = position % len(ranked)
            if place not in tokens:
                tokens[place] = _tokens(tokenize, ranked[place].text + JOIN)
            parts.append(tokens[place])
            position += 1
        contexts.append(np.concatenate(parts)[: options.context_tokens])
    return contexts


def _distinct_contexts(
    ranked: Sequence[Document], tokenize: Tokenize, options: WorkloadOptions
) -> tuple[list[Tokens], list[int]]:
    """Cut one context for each request from the joined corpus, none with another's beginning.

    Starts are spread evenly. A chained block hash never matches across two starts whose first
    blocks differ, even where the texts overlap.
    """
    pieces = [_tokens(tokenize, document.text + JOIN) for document in ranked]
    owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    corpus = np.concatenate(pieces)
    wrapped = np.resize(corpus, len(corpus) + options.context_tokens)
    contexts, sources, heads = [], [], set()
    for start in np.linspace(0, len(corpus), options.requests, endpoint=False).astype(np.int64):
        for shift in range(len(corpus)):
            place = (int(start) + shift) % len(corpus)
            head = wrapped[place : place + min(DISTINCT_HEAD_TOKENS, options.context_tokens)]
            if head.tobytes() not in heads:
                break
        else:
            raise WorkloadError(f"the data set has too little text for {options.requests} prompts")
        heads.add(head.tobytes())
        contexts.append(wrapped[place : place + options.context_tokens].copy())
        sources.append(int(owner[place]))
    return contexts, sources


def _ask(
    asked: npt.NDArray[np.int64],
    contexts: Sequence[Tokens],
    documents: Sequence[Document],
    tokenize: Tokenize,
    seed: int,
) -> list[Request]:
    random = np.random.default_rng([seed, QUESTION])
    requests = []
    for index, rank in enumerate(asked.tolist()):
        questions = documents[rank].questions
        question = int(random.integers(len(questions)))
        suffix = _tokens(tokenize, QUESTION_FORMAT.format(question=questions[question]))
        tokens = np.concatenate([contexts[rank], suffix])
        requests.append(Request(index, rank, question, tokens, client=0))
    return requests


def route(requests: Sequence[Request], options: WorkloadOptions) -> list[Request]:
    """Deal requests to clients, equal shares up to one except with ``affinity``.

    ``random``: a shuffled deal. ``round_robin``: in turn. ``affinity``: a document always to the
    same client. ``sorted``: the whole trace ordered by prefix, in contiguous shares (possible
    only where all work is known beforehand).
    """
    count, clients = len(requests), options.clients
    if options.routing == "sorted":
        requests = sorted(requests, key=lambda request: request.tokens.astype(">u4").tobytes())
        chosen = np.arange(count) * clients // max(count, 1)
    elif options.routing == "affinity":
        chosen = np.array([request.document % clients for request in requests], dtype=np.int64)
    elif options.routing == "round_robin":
        chosen = np.arange(count) % clients
    else:
        random = np.random.default_rng([options.seed, ROUTING])
        chosen = random.permutation(np.arange(count) % clients)
    return [
        Request(r.index, r.document, r.question, r.tokens, client)
        for r, client in zip(requests, chosen.tolist(), strict=True)
    ]


def _tokens(tokenize: Tokenize, text: str) -> Tokens:
    tokens = np.asarray(tokenize(text), dtype=np.uint32)
    if tokens.size == 0:
        raise WorkloadError(f"the tokenizer returned no tokens for {text[:40]!r}")
    return tokens
