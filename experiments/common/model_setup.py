"""What all clients must have alike before they begin: the model's folder, and the workload.

Owns how they come to agree. Collective over the clients; never starts an engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common import meeting
from experiments.common.datasets import DatasetError, load_documents
from experiments.common.options import Options, UsageError
from experiments.common.workload import (
    Popularity,
    Workload,
    WorkloadError,
    WorkloadOptions,
    build_workload,
)

if TYPE_CHECKING:
    from experiments.common.jobs import Member

__all__ = ["agree_on_workload", "find_model"]


def find_model(member: Member, model: str) -> Path:
    """Return the model's folder; client 0 prepares the embedded one before the others look."""
    if model:
        return Path(model)
    from ptstore_mpi.integrations import smollm2

    if member.rank == 0:
        smollm2.prepare()
    meeting.meet(member.comm)
    return Path(smollm2.prepare())


def agree_on_workload(member: Member, options: Options, folder: Path) -> Workload:
    """Build the workload, and see that all clients built the same. Collective.

    Raises
    ------
    UsageError
        On every client, if any of them could not build it.
    """
    workload, problem = None, ""
    try:
        workload = _build_workload(member, options, folder)
    except (DatasetError, WorkloadError) as error:
        problem = str(error)
    problems = [found for found in meeting.gather_to_all(member.comm, problem) if found]
    if workload is None or problems:
        raise UsageError(problems[0])
    digests = meeting.gather_to_all(member.comm, workload.digest())
    if len(set(digests)) != 1:
        raise UsageError(
            f"expected the same prompts on every client, got digests {sorted(set(digests))}: "
            "do all nodes see the same data, model and version of Python?"
        )
    return workload


def _build_workload(member: Member, options: Options, folder: Path) -> Workload:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    workload = build_workload(
        load_documents(options.dataset, seed=options.seed),
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        WorkloadOptions(
            context_tokens=options.context_tokens,
            documents=options.documents,
            requests=options.requests,
            popularity=Popularity.parse(options.popularity),
            routing=options.routing,
            clients=member.count,
            seed=options.seed,
        ),
    )
    longest = max(len(request.tokens) for request in workload.requests)
    positions = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if positions is not None and longest > positions:
        raise WorkloadError(
            f"--context-tokens {options.context_tokens}: the longest prompt has {longest} tokens, "
            f"this model takes {positions}"
        )
    return workload
