"""PTStore-MPI: a distributed prefix KV-tensor store for LLM inference over MPI windows."""

from __future__ import annotations

from ptstore_mpi.client import Namespace, Store
from ptstore_mpi.config import Config, parse_bytes
from ptstore_mpi.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    LayoutMismatchError,
    PTStoreError,
    TransportError,
)
from ptstore_mpi.launch import Job, launch, run
from ptstore_mpi.layout import KVLayout, TensorSpec
from ptstore_mpi.tensor_view import TensorView
from ptstore_mpi.types import SOURCES, LoadResult, Match, StoreResult

__all__ = [
    "SOURCES",
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
    "TransportError",
    "launch",
    "parse_bytes",
    "run",
]
