"""The compared systems behind one interface: a comparison differs in one argument."""

from __future__ import annotations

from typing import Any

from experiments.baselines.base import Sample, System
from experiments.baselines.prefix import PrefixCacheSystem
from experiments.baselines.ptstore import PTStoreSystem
from experiments.baselines.vanilla import VanillaSystem

SYSTEMS = ("vanilla", "prefix", "ptstore")

__all__ = ["SYSTEMS", "Sample", "System", "build_system"]


def build_system(name: str, *, engine: Any, store: Any, cache_bytes: int) -> System:
    """Build a system by name.

    Parameters
    ----------
    name : str
        One of `SYSTEMS`.
    engine : TransformersEngine
        The one engine of this client, shared by all systems.
    store : ptstore_mpi.Store
        Used by ``ptstore`` only.
    cache_bytes : int
        What this client's own cache may hold; used by ``prefix`` only.
    """
    if name == "vanilla":
        return VanillaSystem(engine)
    if name == "prefix":
        return PrefixCacheSystem(engine, capacity_bytes=cache_bytes)
    if name == "ptstore":
        return PTStoreSystem(engine, store)
    raise ValueError(f"--systems must be among {', '.join(SYSTEMS)}; given: {name!r}")
