"""The prompts of `exp_vllm_ttft`: a context of exact length and a question, none asked twice.

Owns the cut of one workload of distinct contexts to the lengths asked for. Never knows a system.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common import meeting
from experiments.common.datasets import DatasetError, Document, load_documents
from experiments.common.model_presets import GroupedAttention
from experiments.common.options import UsageError
from experiments.common.workload import (
    Popularity,
    Tokenize,
    WorkloadError,
    WorkloadOptions,
    build_workload,
)
from experiments.vllm_ttft.options import Options

if TYPE_CHECKING:
    from experiments.common.jobs import Member

__all__ = ["WARM_UP", "Prompt", "Prompts", "agree_on_prompts", "build_prompts"]

WARM_UP = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `repeat` is `WARM_UP` of the one that is not recorded."""

    request: int
    repeat: int
    context_tokens: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts of a run, the warm-up apart, and the tokens that the longest takes in all."""

    warm_up: Prompt
    measured: tuple[Prompt, ...]
    longest_tokens: int

    def digest(self) -> str:
        """Return a hash of every measured prompt."""
        state = hashlib.sha256()
        for prompt in self.measured:
            state.update(f"{prompt.request} {prompt.repeat} {prompt.tokens} ".encode())
        return state.hexdigest()


def agree_on_prompts(member: Member, options: Options, folder: Path) -> Prompts:
    """Build the prompts on client 0 and give them to all. Collective over the clients.

    Raises
    ------
    UsageError
        On every client alike: the data set or the model cannot give what was asked for.
    """
    found: Prompts | str | None = None
    if member.rank == 0:
        try:
            found = _read_and_build(options, folder)
        except (DatasetError, WorkloadError) as error:
            found = str(error)
    found = meeting.gather_to_all(member.comm, found)[0]
    if not isinstance(found, Prompts):
        raise UsageError(str(found))
    return found


def _read_and_build(options: Options, folder: Path) -> Prompts:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = build_prompts(
        load_documents(options.dataset, seed=options.seed),
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        options,
    )
    config = json.loads((folder / "config.json").read_text())
    positions = config.get("max_position_embeddings")
    if positions is not None and prompts.longest_tokens > positions:
        raise WorkloadError(
            f"--context-tokens {options.context_tokens[-1]}: with its question and "
            f"{options.output_tokens} tokens of answer the longest prompt takes "
            f"{prompts.longest_tokens} positions, this model has {positions}"
        )
    _check_memory(prompts.longest_tokens, options, config)
    return prompts


def _check_memory(longest_tokens: int, options: Options, config: dict[str, Any]) -> None:
    try:
        attention = GroupedAttention.from_config(config, options.dtype)
    except ValueError:
        return  # of another kind: the engine and the store find out
    wanted = longest_tokens * attention.bytes_per_token
    for name in ("memory_bytes_per_node", "engine_cache_bytes"):
        if getattr(options, name) < wanted:
            raise WorkloadError(
                f"--{name.replace('_', '-')}: expected at least the {wanted} bytes of the longest "
                f"prompt's KV, given {getattr(options, name)}"
            )


def build_prompts(documents: Sequence[Document], tokenize: Tokenize, options: Options) -> Prompts:
    """Build ``options.repeats`` prompts of each length, repeat by repeat, and one to warm up.

    All are cut from contexts of the greatest length that differ within their first tokens, so no
    prompt has another's first block, whatever the lengths.
    """
    greatest = options.context_tokens[-1]
    slots = [
        (repeat, length) for repeat in range(options.repeats) for length in options.context_tokens
    ]
    slots.append((WARM_UP, options.context_tokens[0]))
    workload = build_workload(
        documents,
        tokenize,
        WorkloadOptions(
            context_tokens=greatest,
            documents=1,
            requests=len(slots),
            popularity=Popularity("distinct"),
            routing="round_robin",
            clients=1,
            seed=options.seed,
        ),
    )
    *measured, warm_up = [
        Prompt(
            request=request.index,
            repeat=repeat,
            context_tokens=length,
            tokens=(*request.tokens[:length].tolist(), *request.tokens[greatest:].tolist()),
        )
        for request, (repeat, length) in zip(workload.requests, slots, strict=True)
    ]
    longest = max(len(prompt.tokens) for prompt in (warm_up, *measured))
    return Prompts(warm_up, tuple(measured), longest + options.output_tokens)
