"""`vanilla`: every prompt is recomputed. The reference for time and for outputs."""

from __future__ import annotations

from typing import Any

from experiments.baselines.base import FirstToken, System
from experiments.common.workload import Request


class VanillaSystem(System):
    """Recompute the whole prompt, keep nothing."""

    name = "vanilla"

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def first_token(self, request: Request) -> FirstToken:
        """Prefill all tokens."""
        done = self._engine.prefill(request.tokens)
        return FirstToken(
            token=done.token,
            logits=done.logits,
            match_s=0.0,
            load_s=0.0,
            prefill_s=done.seconds,
            tokens_by_source={},
            reason="vanilla",
        )

    def close(self) -> None:
        """Hold nothing, give back nothing."""
