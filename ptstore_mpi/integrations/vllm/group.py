"""Ranks that are one engine: what each of them decides by itself must come out alike.

With tensor parallelism every rank runs the scheduler for itself, and one that claims a hit where
another does not leaves the group computing different steps: a deadlock, or wrong KV. So whatever
depends on time or on the store (a match, the end of a load, of a save) is agreed upon: the smallest
of what the ranks have. The calls come in the same order on every rank, since all else is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Alone", "Group", "TorchGroup"]


class Group(Protocol):
    """The ranks of one engine."""

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Return the smallest value of all ranks, place by place.

        Collective over the group; every rank gives as many values.
        """
        ...


class Alone:
    """An engine of one rank."""

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)


class TorchGroup:
    """Ranks of a ``torch.distributed`` group of CPUs (gloo): that of vLLM's tensor parallelism."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Return the smallest value of all ranks, place by place. Collective."""
        import torch
        import torch.distributed as dist

        if not values:
            return []
        agreed = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in agreed.tolist()]
