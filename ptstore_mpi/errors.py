"""The exceptions of PTStore-MPI: one tree, and a class only where a caller reacts differently.

    PTStoreError
    |-- ConfigError (ValueError)          a setting is unknown, impossible or contradicts another
    |-- LayoutMismatchError (ValueError)  a buffer does not have the shape the layout asks for
    |-- CapacityError (MemoryError)       an increment can never fit the arena it is meant for
    |-- ClosedError (RuntimeError)        the store was used after it was closed
    `-- TransportError (RuntimeError)     the job cannot go on: a peer is gone or a phase overran

A miss is never an error: it is a ``Match`` or ``LoadResult`` of fewer tokens with a reason.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "LayoutMismatchError",
    "PTStoreError",
    "TransportError",
]


class PTStoreError(Exception):
    """Base class of every error raised by this package."""


class ConfigError(PTStoreError, ValueError):
    """A configuration value is unknown, impossible or contradicts another one."""


class LayoutMismatchError(PTStoreError, ValueError):
    """A KV buffer does not match the layout of its namespace."""


class CapacityError(PTStoreError, MemoryError):
    """An increment is larger than the arena of its owner; nothing was written."""


class ClosedError(PTStoreError, RuntimeError):
    """The store was used after its job had closed."""


class TransportError(PTStoreError, RuntimeError):
    """The transport cannot continue: a collective phase overran or a peer disappeared."""
