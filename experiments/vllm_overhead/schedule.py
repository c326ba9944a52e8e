"""Who answers what, when: a function of the options and of nothing else.

Two clients measure. In the first phase the first of them has the engine without a connector, in the
second the other one, each time with new engines. Within a batch the systems answer one after the
other; which is first alternates from batch to batch.

::

    phase            0                   1
    batch            0    1    2    3    4    5    6    7
    first client     p .  . p  p .  . p  c .  . c  c .  . c      p plain, c connector
    second client    . c  c .  . c  c .  . p  p .  . p  p .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.vllm_overhead.options import Options
from experiments.vllm_overhead.tables import SYSTEMS
from experiments.vllm_ttft.prompts import Prompt, Prompts, agree_on_prompts

if TYPE_CHECKING:
    from experiments.common.jobs import Member

__all__ = [
    "PHASES",
    "Batch",
    "Schedule",
    "agree_on_schedule",
    "build_schedule",
    "find_pair",
    "prompt_count",
    "system_of",
]

PHASES = (0, 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are submitted at once, and the systems in the order of their turns."""

    number: int
    prompts: tuple[Prompt, ...]
    order: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """All batches by phase, and for each phase the prompts that warm its engines up.

    Attributes
    ----------
    longest_tokens
        Positions that the longest prompt takes, with its answer.
    digest
        Hash of all prompts.
    """

    warm_ups: tuple[tuple[Prompt, ...], ...]
    batches: tuple[tuple[Batch, ...], ...]
    longest_tokens: int
    digest: str


def find_pair(nodes: Sequence[int]) -> tuple[int, int] | None:
    """Return the first two clients of the first node that has two; None: none has.

    Parameters
    ----------
    nodes
        Node of every client.
    """
    for node in sorted(set(nodes)):
        here = [rank for rank, found in enumerate(nodes) if found == node]
        if len(here) > 1:
            return here[0], here[1]
    return None


def system_of(place: int, phase: int) -> str:
    """Return the system that the first (0) or second (1) of the two clients has in a phase."""
    return SYSTEMS[(place + phase) % len(SYSTEMS)]


def agree_on_schedule(member: Member, options: Options, folder: Path) -> Schedule:
    """Build the schedule. Collective over the clients.

    Raises
    ------
    UsageError
        On every client alike: the data set or the model cannot give what was asked for.
    """
    asked = options.for_prompts(prompt_count(options))
    return build_schedule(agree_on_prompts(member, asked, folder), options)


def prompt_count(options: Options) -> int:
    """Return the prompts that are wanted, beside the one to warm up that always is there."""
    return options.requests + len(PHASES) * options.batch - 1


def build_schedule(prompts: Prompts, options: Options) -> Schedule:
    """Deal prompts to batches; what warms up is no prompt of any batch, nor of the other phase."""
    size = options.batch
    measured, spare = prompts.measured[: options.requests], prompts.measured[options.requests :]
    spare += (prompts.warm_up,)
    orders = (SYSTEMS, SYSTEMS[::-1])
    batches = [
        Batch(number, measured[number * size : (number + 1) * size], orders[number % 2])
        for number in range(len(measured) // size)
    ]
    half = len(batches) // 2
    return Schedule(
        warm_ups=tuple(spare[phase * size : (phase + 1) * size] for phase in PHASES),
        batches=(tuple(batches[:half]), tuple(batches[half:])),
        longest_tokens=prompts.longest_tokens,
        digest=prompts.digest(),
    )
