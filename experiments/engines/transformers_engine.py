"""The engine `transformers`: one model in this process, which all systems share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.baselines import build_system
from experiments.baselines.base import System
from experiments.common.workload import Workload
from experiments.engines.base import Engine

if TYPE_CHECKING:
    from experiments.common.options import Options

WARM_UP_TOKENS = 64


class OnTransformers(Engine):
    """Systems around one `TransformersEngine`."""

    alternates = True
    compared = "tokens and logits"

    def __init__(self, engine: Any, fetch: str) -> None:
        self._engine = engine
        self._fetch = fetch
        self.model_id = engine.model_id
        self.block_tokens = engine.layout.block_tokens
        self.bytes_per_token = engine.layout.bytes_per_token

    @classmethod
    def start(cls, folder: Path, options: Options, workload: Workload) -> OnTransformers:
        """Load the model and compute a few tokens."""
        from ptstore_mpi.integrations.transformers import TransformersEngine

        engine = TransformersEngine.from_pretrained(
            folder, dtype=options.dtype, threads=options.threads
        )
        engine.prefill(workload.requests[0].tokens[:WARM_UP_TOKENS])
        return cls(engine, options.fetch)

    def build_system(self, name: str, *, stores: Mapping[str, Any], cache_bytes: int) -> System:
        """Build a system over the one engine."""
        return build_system(
            name,
            engine=self._engine,
            stores=stores,
            cache_bytes=cache_bytes,
            fetch=self._fetch,
        )
