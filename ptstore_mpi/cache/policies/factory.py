"""Policies by name."""

from __future__ import annotations

from ptstore_mpi.cache.policies.adaptive import AdaptivePolicy
from ptstore_mpi.cache.policies.rankings import RANKING_NAMES, make_ranking
from ptstore_mpi.cache.policies.tree import EvictionPolicy

__all__ = ["POLICY_NAMES", "make_policy"]

POLICY_NAMES = (*RANKING_NAMES, "adaptive")
"""Every policy there is."""


def make_policy(name: str, capacity_bytes: int) -> EvictionPolicy:
    """Return a fresh policy for a pool of so many bytes; an unknown name is a KeyError."""
    if name == "adaptive":
        return AdaptivePolicy(capacity_bytes)
    return EvictionPolicy(make_ranking(name, capacity_bytes))
