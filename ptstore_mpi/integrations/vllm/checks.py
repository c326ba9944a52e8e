"""Engines that the connector refuses, before anything is stored or loaded.

Owns the refusals: whatever keeps KV that is no plain function of the prefix, or whose parts the
connector cannot reach, is told so at its start.
"""

from __future__ import annotations

import os
from typing import Any

from ptstore_mpi.errors import ConfigError

__all__ = [
    "UnsupportedEngineError",
    "check_engine",
    "check_groups",
    "check_layered",
    "check_window",
]

_FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")


class UnsupportedEngineError(ConfigError):
    """The KV of this engine cannot be kept and reused by prefix."""


def check_engine(vllm_config: Any) -> None:
    """Refuse engines by their configuration.

    Raises
    ------
    UnsupportedEngineError
        Naming what was found and what to change.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise _unsupported(f"pipeline parallelism of {parallel.pipeline_parallel_size}", "1")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise _unsupported(f"{name} of {size}", "1")
    backend = str(parallel.distributed_executor_backend or "uni")
    if parallel.tensor_parallel_size > 1 and backend != "external_launcher":
        raise _unsupported(
            f"tensor parallelism in processes of vLLM's own ({backend})",
            "distributed_executor_backend='external_launcher', each rank a client of the store",
        )
    transfer = vllm_config.kv_transfer_config
    policy = getattr(transfer, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        raise _unsupported(
            f"kv_load_failure_policy={policy!r}, which fails requests",
            "'recompute': what does not load is computed",
        )
    role = getattr(transfer, "kv_role", "kv_both")
    if role != "kv_both":
        raise _unsupported(f"kv_role={role!r}", "'kv_both'; settings say what is saved")
    if vllm_config.speculative_config is not None:
        raise _unsupported("speculative decoding", "none")
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0":
        raise _unsupported(
            "an engine in a process of its own, which no store can reach",
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 (`prepare_process` sets it)",
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise _unsupported(
            "scales of the KV cache from the first batch", "calculate_kv_scales=False"
        )
    if vllm_config.model_config.attention_chunk_size is not None:
        raise _unsupported("chunked local attention", "full attention")


def check_window(vllm_config: Any) -> None:
    """Refuse sliding windows where vLLM does not hand over what its cache is like (0.11).

    Raises
    ------
    UnsupportedEngineError
        Naming the window.
    """
    window = vllm_config.model_config.get_sliding_window()
    if window is not None:
        raise _unsupported(f"a sliding window of {window} tokens", "full attention")


def check_groups(cache_config: Any) -> None:
    """Refuse caches that are not of full attention in every layer.

    Raises
    ------
    UnsupportedEngineError
        Naming what was found.
    """
    groups = cache_config.kv_cache_groups
    kinds = sorted({kind for group in groups for kind in _kinds(group.kv_cache_spec)})
    if len(groups) != 1 or any(kind not in _FULL_ATTENTION for kind in kinds):
        raise _unsupported(
            f"{len(groups)} group(s) of {', '.join(kinds)}",
            "one group of full attention (for some models disable_hybrid_kv_cache_manager=True "
            "makes one of several)",
        )


def check_layered(vllm_config: Any, *, is_possible: bool) -> None:
    """Refuse layered loads where a failed one could not be put right.

    What was computed upon a load that fell short has to be known before anybody builds upon it, so
    a step must not be scheduled before the one before it has ended. Before 0.32, vLLM passes over
    the waits in captured graphs, and over failed loads of requests that were preempted.

    Parameters
    ----------
    vllm_config
        vLLM's configuration.
    is_possible
        Whether this version of vLLM can.

    Raises
    ------
    UnsupportedEngineError
        Naming what to change.
    """
    if not is_possible:
        raise _unsupported("layered loads with this version of vLLM", "load='async', or vLLM 0.32")
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        raise _unsupported(
            "layered loads and asynchronous scheduling", "async_scheduling=False, or load='async'"
        )


def _kinds(spec: Any) -> list[str]:
    parts = getattr(spec, "kv_cache_specs", None)  # several of one type
    return [type(part).__name__ for part in (parts.values() if parts else [spec])]


def _unsupported(found: str, expected: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"PTStoreConnector cannot work with this engine: found {found}, expected {expected}"
    )
