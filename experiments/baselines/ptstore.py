"""`ptstore`: prefixes are looked up, loaded and stored in the pooled store."""

from __future__ import annotations

from typing import Any

from experiments.baselines.base import FirstToken, System
from experiments.common.workload import Request


class PTStoreSystem(System):
    """Reuse through one namespace of the store; the store owns the memory."""

    name = "ptstore"

    def __init__(self, engine: Any, store: Any) -> None:
        # Imported here: the other systems, the report and the plots need no engine.
        from ptstore_mpi.integrations.transformers import PrefixReuse

        self._reuse = PrefixReuse(engine, engine.namespace(store))
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
