"""PTStore-MPI: a distributed prefix KV-tensor store for LLM inference over MPI windows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ptstore_mpi.client import Store
from ptstore_mpi.config import Config, parse_bytes
from ptstore_mpi.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    LayoutMismatchError,
    PTStoreError,
    TransportError,
)
from ptstore_mpi.layout import KVLayout, TensorSpec
from ptstore_mpi.namespace import Namespace
from ptstore_mpi.tensor_view import TensorView
from ptstore_mpi.transport.leftovers import unlink_mpi_names
from ptstore_mpi.types import (
    SOURCES,
    BalanceDecision,
    LoadResult,
    Match,
    StoreResult,
    TransportChoice,
)

if TYPE_CHECKING:
    from ptstore_mpi.job import Job, launch, run

__version__ = "0.1.0"

__all__ = [
    "SOURCES",
    "BalanceDecision",
    "CapacityError",
    "ClosedError",
    "Config",
    "ConfigError",
    "Job",
    "KVLayout",
    "LayoutMismatchError",
    "LoadResult",
    "Match",
    "Namespace",
    "PTStoreError",
    "Store",
    "StoreResult",
    "TensorSpec",
    "TensorView",
    "TransportChoice",
    "TransportError",
    "launch",
    "parse_bytes",
    "run",
]

_STARTS_MPI = ("Job", "launch", "run")

unlink_mpi_names()  # a program may have started MPI, and may be aborted before it opens a job


def __getattr__(name: str) -> Any:
    """Import what initialises MPI on first use: some login nodes forbid to start it."""
    if name in _STARTS_MPI:
        return getattr(import_module("ptstore_mpi.job"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
