"""What experiments read out of vLLM's answers, and whether there is a vLLM at all.

Owns the names under which vLLM and the connector say it. Never builds an engine.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ptstore_mpi import SOURCES

__all__ = [
    "NOT_INSTALLED",
    "EngineError",
    "facts_of",
    "first_token_s",
    "is_installed",
    "settle_saves",
    "told_of",
]

NOT_INSTALLED = "vLLM is not installed: make setup-vllm"


class EngineError(RuntimeError):
    """vLLM is not there, or did not do what was asked of it."""


def is_installed() -> bool:
    """Tell whether there is a vLLM, without importing it; a folder of this name is none."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def first_token_s(output: Any) -> float:
    """Return the time from a request's arrival to its first token, as vLLM measured it.

    Raises
    ------
    EngineError
        It measured nothing.
    """
    if output.metrics is None:
        raise EngineError("vLLM measured nothing: it was built with disable_log_stats")
    return float(output.metrics.first_token_latency)


def told_of(output: Any) -> dict[str, Any]:
    """Return what the connector says of a request.

    Raises
    ------
    EngineError
        It says nothing.
    """
    told: dict[str, Any] | None = (output.kv_transfer_params or {}).get("ptstore")
    if told is None:
        raise EngineError(
            "the connector said nothing of a request, found "
            f"{output.kv_transfer_params!r:.200}: is it switched on, and this version?"
        )
    return told


def facts_of(output: Any) -> dict[str, Any]:
    """Return the connector's facts of a request by the names of columns; raises as `told_of`."""
    told = told_of(output)
    tokens = {f"{name}_tokens": int(told[f"{name}_tokens"]) for name in (*SOURCES, "recomputed")}
    times = {name: float(told.get(name, 0.0)) for name in ("match_s", "load_s")}
    return {**tokens, **times, "reason": str(told["reason"])}


def settle_saves(llm: Any) -> None:
    """Wait until everything that is to be saved is.

    Raises
    ------
    EngineError
        A save did not end in time.
    """
    from ptstore_mpi.integrations.vllm import settle

    if not settle(llm):
        raise EngineError("a save into the store did not end in time")
