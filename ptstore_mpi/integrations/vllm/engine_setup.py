"""Starting and ending an engine of vLLM within a client of a job.

Owns the environment that vLLM needs to run in this process, beside MPI and without a network, and
the arguments that every engine over a store has in common.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptstore_mpi.errors import ConfigError

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["build_llm", "join_ranks", "kv_transfer_config", "prepare_process", "release", "settle"]

MODULE = "ptstore_mpi.integrations.vllm.connector"

_CPU_CACHE_BYTES = 1 << 30
_alive: list[weakref.ref[Any]] = []  # the engine of this process
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns dozens of times for every engine
}


def prepare_process(threads: int = 1) -> None:
    """Set the environment in which vLLM runs in this process; call it before vllm is imported.

    What is set already stays, but for the one that keeps the engine in this process.

    Parameters
    ----------
    threads
        Threads that compute, on a CPU.

    Raises
    ------
    ConfigError
        ``threads`` is not at least 1.
    """
    if threads < 1:
        raise ConfigError(f"threads: expected at least 1, got {threads}")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in {**_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}.items():
        os.environ.setdefault(name, value)
    if "torch" in sys.modules:  # it has read the environment already
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def join_ranks(comm: Any, *, local_rank: int | None = None) -> None:
    """Make the ranks of a communicator one engine: tensor parallelism by ``external_launcher``.

    Sets what vLLM reads of its launcher; then give `build_llm`
    ``tensor_parallel_size=comm.Get_size()`` and
    ``distributed_executor_backend="external_launcher"`` on every rank, and every rank the same
    requests in the same order. Each is a client of the store and keeps its own shard there.
    Collective over ``comm``.

    Parameters
    ----------
    comm
        Ranks of the engine, such as a part of ``store.comm``.
    local_rank
        Number of this rank's device; None: its place among the ranks of its host, from 0.
    """
    hosts = comm.allgather(socket.gethostname())
    rank = comm.Get_rank()
    place = hosts[:rank].count(hosts[rank]) if local_rank is None else local_rank
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = comm.bcast((_address(hosts), probe.getsockname()[1]), root=0)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(place),
        "WORLD_SIZE": str(comm.Get_size()),
        "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
    }


def kv_transfer_config(settings: Mapping[str, Any] | None = None) -> Any:
    """Return vLLM's ``KVTransferConfig`` with `PTStoreConnector`.

    Parameters
    ----------
    settings
        As in `ConnectorSettings`.
    """
    from vllm.config import KVTransferConfig

    arguments: dict[str, Any] = {
        "kv_connector": "PTStoreConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(settings or {}),
    }
    if "kv_load_failure_policy" in getattr(KVTransferConfig, "__dataclass_fields__", {}):
        arguments["kv_load_failure_policy"] = "recompute"
    return KVTransferConfig(**arguments)


def build_llm(
    model: str | Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    kv_cache_bytes: int | None = None,
    prefix_caching: bool = True,
    connector: Mapping[str, Any] | None = None,
    **engine_args: Any,
) -> LLM:
    """Build a ``vllm.LLM`` in this process, which has room for one: `release` it before another.

    Collective: no; with tensor parallelism over the ranks of the engine.

    Parameters
    ----------
    model, dtype, max_model_len
        As vLLM takes them.
    kv_cache_bytes
        Memory for vLLM's own KV cache; None: on a CPU 1 GiB, where vLLM would take nearly all that
        there is, on a device vLLM's choice.
    prefix_caching
        Whether vLLM reuses prefixes of its own cache.
    connector
        Settings of `PTStoreConnector`, as in `ConnectorSettings`; None: no connector. With one, a
        store must be attached.
    engine_args
        Anything else that ``vllm.LLM`` takes.

    Raises
    ------
    ConfigError
        Another engine of this process is not released, or settings are no settings.
    """
    if any(built() is not None for built in _alive):
        raise ConfigError("build_llm: expected no engine in this process, release the first one")
    if connector is not None and not isinstance(connector, Mapping):
        raise ConfigError(f"connector: expected settings, such as {{}}, got {connector!r:.80}")
    if engine_args.get("distributed_executor_backend") == "external_launcher":
        _check_launcher()
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "enable_prefix_caching": prefix_caching,
        "disable_log_stats": False,  # or requests have no times
        "enforce_eager": _is_on_cpu(),
    }
    if max_model_len is not None:
        arguments["max_model_len"] = max_model_len
    if kv_cache_bytes is None and _is_on_cpu():
        kv_cache_bytes = _CPU_CACHE_BYTES
    if kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    if connector is not None:
        arguments["kv_transfer_config"] = kv_transfer_config(connector)
    try:
        llm = LLM(**{**arguments, **engine_args})
    except BaseException:
        _clean_up()  # of what was built, and would meet the next engine
        raise
    _alive[:] = [weakref.ref(llm)]
    return llm


def settle(llm: LLM, timeout_s: float = 60.0) -> bool:
    """Wait until everything that was to be saved is, and vLLM has its blocks back.

    vLLM stops stepping when the last request is answered; what is saved after that needs a step
    more to be noticed. Call it before ``reset_prefix_cache`` and before the end.

    Returns
    -------
    bool
        False: not within ``timeout_s``.

    Raises
    ------
    RuntimeError
        Requests have not ended: their answers would be lost.
    """
    scheduler = _engine_core(llm).scheduler
    if scheduler.has_unfinished_requests():
        raise RuntimeError("settle: expected all requests to have ended, some have not")
    end_s = time.monotonic() + timeout_s
    link = getattr(scheduler.connector, "_link", None)
    if link is not None and not link.thread.drain(timeout_s):
        return False
    # Before 0.32 an engine with nothing to do takes one step more, which hears of all of them.
    while scheduler.has_finished_requests() or (
        scheduler.connector is not None and scheduler.requests
    ):
        if time.monotonic() > end_s:
            return False
        llm.llm_engine.step()
    return True


def release(llm: LLM) -> None:
    """End an engine so that another can be built in this process; ``llm`` is of no use after it."""
    if llm.llm_engine is None:
        return
    core = _engine_core(llm)
    if not core.scheduler.has_unfinished_requests():
        settle(llm)
    core.shutdown()
    # Whoever lets go of it later would take the next engine down with it.
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    core.shutdown = _nothing
    llm.llm_engine = None
    _alive.clear()
    gc.collect()


def _address(hosts: list[str]) -> str:
    return "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]


def _nothing() -> None:
    """Do nothing."""


def _clean_up() -> None:
    """Take down what an engine that could not be built has left in vLLM's globals."""
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    kv_transfer_state.ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def _check_launcher() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"external_launcher: expected {', '.join(missing)} in the environment, found none; "
            "call join_ranks on every rank of the engine first"
        )


def _engine_core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
