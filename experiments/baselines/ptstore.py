"""`ptstore`, and what is left of it where parts are taken away: prefixes in a store.

`evostore` pools the nodes without replicas, `prefix_node` does not pool beyond the node. Both are
the same code with other settings, over a store, servers and memory of their own.
"""

from __future__ import annotations

from typing import Any

from experiments.baselines.base import FirstToken, System
from experiments.common.workload import Request


class PTStoreSystem(System):
    """Reuse through one namespace of the store; the store owns the memory."""

    name = "ptstore"

    def __init__(self, engine: Any, store: Any, fetch: str = "cost") -> None:
        # Imported here: the other systems, the report and the plots need no engine.
        from ptstore_mpi.integrations.transformers import FetchOrRecompute, PrefixReuse

        self._reuse = PrefixReuse(
            engine,
            engine.namespace(store),
            fetch=FetchOrRecompute(is_on=fetch == "cost"),
        )
        self._answer: Any = None

    def first_token(self, request: Request) -> FirstToken:
        """Match, load, and prefill the rest."""
        answer = self._reuse.first_token(request.tokens)
        self._answer = answer
        return FirstToken(
            token=answer.token,
            logits=answer.logits,
            match_s=answer.match_s,
            load_s=answer.load_s,
            prefill_s=answer.prefill_s,
            tokens_by_source=dict(answer.by_source),
            reason=answer.reason,
        )

    def keep(self) -> tuple[int, str]:
        """Store the increment."""
        from ptstore_mpi import CapacityError

        answer, self._answer = self._answer, None
        try:
            result = self._reuse.keep(answer)
        except CapacityError:
            return 0, "too_large"  # more than a whole arena: recomputed each time, as recorded
        return result.bytes, result.reason

    def close(self) -> None:
        """Forget the last answer; the store is closed by its owner."""
        self._answer = None


class EvoStoreSystem(PTStoreSystem):
    """The pooled store without replicas: what another node owns is fetched from it each time."""

    name = "evostore"


class PrefixNodeSystem(PTStoreSystem):
    """A store on each node by itself: the clients of a node share, nodes do not."""

    name = "prefix_node"
