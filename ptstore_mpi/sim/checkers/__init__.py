"""What must hold in every simulated job: one checker per invariant.

The numbers are those of the invariants in ARCHITECTURE.md. A checker sees the run as an `Observer`
and raises `InvariantError`, which begins with its number. They know the inside of the cache on
purpose: they compare what it keeps with what they saw happen. Invariant 8, same seed and same
decisions, is a property of two runs: `ptstore_mpi.sim.run.Outcome.decisions`. Number 0 asks that
the store be of any use at all.
"""

from __future__ import annotations

from ptstore_mpi.sim.checkers.accounts import Conservation, InTime, Limits
from ptstore_mpi.sim.checkers.base import Checker
from ptstore_mpi.sim.checkers.contents import OnlyComplete, RightBytes
from ptstore_mpi.sim.checkers.copies import Copies, RightReplicas
from ptstore_mpi.sim.checkers.held import Held
from ptstore_mpi.sim.checkers.known import Found, NoHole
from ptstore_mpi.sim.checkers.sources import Sources
from ptstore_mpi.sim.checkers.use import Trims, Useful

__all__ = ["CHECKERS", "Checker"]

CHECKERS: tuple[type[Checker], ...] = (
    Useful,
    Trims,
    RightBytes,
    OnlyComplete,
    RightReplicas,
    Found,
    Held,
    NoHole,
    Conservation,
    Sources,
    Limits,
    Copies,
    InTime,
)
"""Every checker, by rising number."""
