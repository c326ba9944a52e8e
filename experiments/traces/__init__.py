"""Traces as one stream of requests, by name: read, or made.

=================  ==================================================  ======================
name               what                                                files of `PTSTORE_DATA`
=================  ==================================================  ======================
``generated``      conversations in turns, made from the seed          none
``mooncake``       an hour of a chat service; ids of 512 tokens        `mooncake.PATTERN`
``claude_code``    conversations of a coding assistant; of 64 tokens   `claude_code.PATTERN`
``lmcache_agent``  prompts of agents, as text                          `lmcache_agent.PATTERN`
others             questions over documents, as in `exp_qa_replay`     those of the data set
=================  ==================================================  ======================
"""

from __future__ import annotations

from pathlib import Path

from experiments.common.datasets import DATASETS, DatasetError, find_files, require_files
from experiments.traces import claude_code, lmcache_agent, made, mooncake
from experiments.traces.stream import Trace, TraceRequest

FILES = {
    "mooncake": mooncake.PATTERN,
    "claude_code": claude_code.PATTERN,
    "lmcache_agent": lmcache_agent.PATTERN,
}
"""Traces that are read: files below ``PTSTORE_DATA`` where no path is given."""

QUESTIONS = tuple(DATASETS)
TRACES = ("generated", *FILES, *QUESTIONS)
GENERATED_REQUESTS = 400
TEXT_BLOCK_TOKENS = 16
ID_BLOCK_TOKENS = 512
HINT = "or give --path FILE; --trace generated needs no files"

__all__ = ["FILES", "QUESTIONS", "TRACES", "Trace", "TraceRequest", "load_trace", "require_trace"]


def require_trace(name: str, path: str) -> None:
    """Raise DatasetError now if the files of a trace are not there; cheap, reads nothing."""
    if name in FILES:
        _files(name, path)
    elif name in QUESTIONS:
        require_files(name)


def load_trace(
    name: str,
    *,
    path: str = "",
    requests: int = 0,
    seed: int = 1,
    popularity: str = "power:6",
    documents: int = 12,
    context_tokens: int = 2000,
) -> Trace:
    """Return a trace, or its first requests.

    Parameters
    ----------
    name : str
        One of `TRACES`.
    path : str
        File of a trace that is read; empty: those of the data folder.
    requests : int
        How many at most; 0: all there are, 400 of a trace that is made.
    seed : int
        Of what is made, and of when conversations of `claude_code` began.
    popularity, documents, context_tokens
        Of questions over documents, as in `exp_qa_replay`.

    Raises
    ------
    DatasetError, WorkloadError
        A file is absent, a line malformed (it is named), or there is nothing in it.
    """
    unit_tokens, block_tokens = 1, TEXT_BLOCK_TOKENS
    if name == "generated":
        found = made.conversations(requests or GENERATED_REQUESTS, seed)
    elif name == "mooncake":
        found = mooncake.read(_files(name, path))
        unit_tokens, block_tokens = mooncake.UNIT_TOKENS, ID_BLOCK_TOKENS
    elif name == "claude_code":
        found, unit_tokens = claude_code.read(_files(name, path), seed)
        block_tokens = ID_BLOCK_TOKENS
    elif name == "lmcache_agent":
        found = lmcache_agent.read(_files(name, path))
    elif name in QUESTIONS:
        found = made.questions(
            name,
            requests=requests or GENERATED_REQUESTS,
            seed=seed,
            popularity=popularity,
            documents=documents,
            context_tokens=context_tokens,
        )
    else:
        raise DatasetError(f"--trace must be one of {', '.join(TRACES)}; given: {name!r:.80}")
    if not found:
        raise DatasetError(f"{name}: expected a request, found none")
    return Trace(name, unit_tokens, block_tokens, found).first(requests)


def _files(name: str, path: str) -> list[Path]:
    if not path:
        return find_files(FILES[name], HINT)
    if not Path(path).is_file():
        raise DatasetError(f"--path: expected a file, given {path!r:.200}")
    return [Path(path)]
