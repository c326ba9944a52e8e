"""The compared systems behind one interface: a comparison differs in one argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.baselines.base import Sample, System
from experiments.baselines.prefix import PrefixCacheSystem
from experiments.baselines.ptstore import EvoStoreSystem, PrefixNodeSystem, PTStoreSystem
from experiments.baselines.vanilla import VanillaSystem

SYSTEMS = ("vanilla", "prefix", "prefix_node", "evostore", "ptstore")
DEFAULT_SYSTEMS = ("vanilla", "prefix", "ptstore")

# Those that have servers: what differs from the settings of the run, and whether they stop at the
# border of a node.
STORE_SETTINGS: dict[str, dict[str, Any]] = {
    "prefix_node": {"placement": "local"},
    "evostore": {"replica_admission": "never"},
    "ptstore": {},
}
WITHIN_NODE = ("prefix_node",)

__all__ = [
    "DEFAULT_SYSTEMS",
    "STORE_SETTINGS",
    "SYSTEMS",
    "WITHIN_NODE",
    "Sample",
    "System",
    "build_system",
]

_ON_A_STORE = {system.name: system for system in (PrefixNodeSystem, EvoStoreSystem, PTStoreSystem)}


def build_system(
    name: str, *, engine: Any, stores: Mapping[str, Any], cache_bytes: int, fetch: str = "cost"
) -> System:
    """Build a system by name.

    Parameters
    ----------
    name : str
        One of `SYSTEMS`.
    engine : TransformersEngine
        The one engine of this client, shared by all systems.
    stores : mapping
        A `ptstore_mpi.Store` for each of `STORE_SETTINGS`, by its name.
    cache_bytes : int
        What this client's own cache may hold; used by ``prefix`` only.
    fetch : str
        "cost" or "always": whether those on a store decline loads that would not pay.
    """
    if name == "vanilla":
        return VanillaSystem(engine)
    if name == "prefix":
        return PrefixCacheSystem(engine, capacity_bytes=cache_bytes)
    if name in _ON_A_STORE:
        return _ON_A_STORE[name](engine, stores[name], fetch)
    raise ValueError(f"--systems must be among {', '.join(SYSTEMS)}; given: {name!r}")
