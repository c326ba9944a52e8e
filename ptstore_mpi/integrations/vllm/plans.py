"""What the scheduler's side of the connector tells the worker's side, and what comes of it.

Values; nothing else. One decision per request travels in the `StepPlan` of the step that it
belongs to: the worker never decides again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi import LoadResult, Match, Namespace
from ptstore_mpi.integrations.vllm.store_thread import Task

__all__ = [
    "Load",
    "LoadPlan",
    "Prefill",
    "SavePlan",
    "SaveRecord",
    "SaveReport",
    "SaveTotals",
    "StepPlan",
]

BlockIds = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """Load a match into a request's blocks.

    Attributes
    ----------
    request_id
        vLLM's name of the request.
    namespace, match
        What to load.
    block_ids
        vLLM's block for each block of the match.
    skip_tokens
        Leading tokens that vLLM has already.
    host
        The tensors in host memory, where they were loaded before vLLM heard of them; else None.
    """

    request_id: str
    namespace: Namespace
    match: Match
    block_ids: BlockIds
    skip_tokens: int
    host: list[Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Store whole blocks of a request.

    ``verified_tokens`` is as in `Namespace.store`: a known prefix beyond it did not load.
    """

    request_id: str
    namespace: Namespace
    tokens: Tokens
    block_ids: BlockIds
    verified_tokens: int | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """A step that does nothing but compute ``tokens`` of one prompt behind ``cached_tokens``."""

    tokens: int
    cached_tokens: int


@dataclass(slots=True, eq=False)
class StepPlan:
    """What one step of the engine is to load and save.

    Attributes
    ----------
    loads, saves
        To be started before, or after, the forward pass.
    preempted
        Requests whose blocks are given to others in this step.
    is_idle
        Whether nothing is computed: somebody may wait.
    prefill
        Set where the time of the step says what a prefill costs.
    """

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    is_idle: bool = False
    prefill: Prefill | None = None


@dataclass(slots=True, eq=False)
class Load:
    """A load under way.

    Attributes
    ----------
    plan, task
        What and how far.
    ready_tensors
        Leading tensors of the layout that are there and trusted.
    until_s
        How long a step waits for it, on the monotonic clock.
    layers
        Layers that were waited for.
    was_missed
        Whether a layer was computed without it: whatever it brings is of no use any more.
    is_awaited
        Whether vLLM waits to hear of its end.
    is_orphan
        Whether its request has ended meanwhile.
    """

    plan: LoadPlan
    task: Task[LoadResult] | None = None
    ready_tensors: int = 0
    until_s: float = 0.0
    layers: set[str] = field(default_factory=set)
    was_missed: bool = False
    is_awaited: bool = True
    is_orphan: bool = False


@dataclass(slots=True)
class SaveTotals:
    """What a save has made visible so far, the time that it took, s, and whether that was told."""

    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    is_told: bool = False


@dataclass(slots=True, eq=False)
class SaveRecord:
    """What is to be saved of one request: its blocks are not vLLM's again before that."""

    planned_count: int = 0
    tasks: list[Task[Any]] = field(default_factory=list)
    totals: list[SaveTotals] = field(default_factory=list)
    token_count: int = 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing reads the blocks any more, nor will."""
        return len(self.tasks) == self.planned_count and all(task.is_done for task in self.tasks)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What came of a save: tokens and bytes newly visible, why no more, and the time it took, s."""

    request_id: str
    tokens: int
    bytes: int
    reason: str
    seconds: float
