"""What computes in a run: a module for each engine, chosen by ``--engine``.

Owns the choice. Never imports an engine itself: servers have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.engines.base import Engine

ENGINES = ("transformers", "vllm")

__all__ = ["ENGINES", "find_engine"]


def find_engine(name: str) -> type[Engine]:
    """Return the engine of a name in `ENGINES`; nothing of it is loaded yet."""
    if name == "vllm":
        from experiments.engines.vllm_engine import VllmEngine

        return VllmEngine
    from experiments.engines.transformers_engine import OnTransformers

    return OnTransformers
