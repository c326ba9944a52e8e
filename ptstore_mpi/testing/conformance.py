"""The conformance suite: what every transport must do, end to end, bytes included.

A case is a function of a `Bench`; it runs on every client of a job, each client with namespaces
of its own unless the case is about meeting in one. A further transport joins by entering a
runner under its name in `RUNNERS`: a callable ``run(main, config)`` that calls ``main(store)``
on every client of a fresh job. Cases use public names only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

import ptstore_mpi
from ptstore_mpi.client import Store
from ptstore_mpi.config import Config
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.testing import cases_life, cases_prefix, cases_room, cases_tiers
from ptstore_mpi.testing.bench import Bench

__all__ = ["CASES", "RUNNERS", "Case", "run_case", "run_simulated"]

Runner = Callable[[Callable[[Store], Any], Config], Any]

_SETTINGS: dict[str, Any] = {
    "memory_bytes": 4 << 20,
    "segment_tokens": 24,
    "staging_bytes": 1 << 20,
    "get_bytes": 16 << 10,
    "copy_threads": 1,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One case and the settings it needs.

    Attributes
    ----------
    name
        What it is about.
    check
        The case itself.
    settings
        Fields of `Config` that differ from the suite's own.
    """

    name: str
    check: Callable[[Bench], None]
    settings: dict[str, Any] = field(default_factory=dict)


def _cases() -> list[Case]:
    found = [
        Case(function.__name__, function, dict(settings))
        for module in (cases_prefix, cases_room, cases_life, cases_tiers)
        for function, settings in module.CASES
    ]
    modes = [
        ("local", "off"),
        ("local", "always"),
        ("random", "off"),
        ("random", "remote"),
        ("random", "always"),
        ("least_loaded", "remote"),
    ]
    found += [
        Case(
            f"mixed[{placement}-{verify}]",
            cases_life.mixed,
            {"placement": placement, "verify": verify},
        )
        for placement, verify in modes
    ]
    found += [
        Case(
            f"evicted[{policy}]",
            cases_room.evicted,
            {"memory_bytes": 512 << 10, "placement": "random", "eviction": policy},
        )
        for policy in ("lru", "s3fifo", "adaptive")
    ]
    found.append(
        Case(
            "mixed[verify_publish]", cases_life.mixed, {"verify": "always", "verify_publish": True}
        )
    )
    return found


CASES: dict[str, Case] = {case.name: case for case in _cases()}
"""Every case by name."""


def run_case(case: Case, transport: str, **settings: Any) -> None:
    """Run one case over one transport, and check that everything is settled at its end."""

    def main(store: Store) -> None:
        assert store.transport_name == transport, store.transport_name
        bench = Bench(store)
        case.check(bench)
        if case.check is not cases_life.closed:
            bench.check_settled()
            bench.check_conservation()

    config = Config(**{**_SETTINGS, **case.settings, **settings})
    RUNNERS[transport](main, config)


def run_simulated(main: Callable[[Store], Any], config: Config) -> Any:
    """Run ``main`` on one client of a `Simulation` of three servers on two nodes."""
    cluster = Simulation(config, server_nodes=(0, 1, 1), client_nodes=(0,))
    store = cluster.store(cluster.clients[0])
    result = main(store)
    store.close()
    return result


def run_job(main: Callable[[Store], Any], config: Config) -> Any:
    """Run ``main`` on every client of a job. Looked up here: only a run may start MPI."""
    return ptstore_mpi.run(main, config)


def run_p2p(main: Callable[[Store], Any], config: Config) -> Any:
    """Run ``main`` on every client of a job whose loads fetch by messages."""
    return run_job(main, msgspec.structs.replace(config, transport="p2p"))


RUNNERS: dict[str, Runner] = {
    "local": run_job,
    "sim": run_simulated,
    "mpi": run_job,
    "p2p": run_p2p,
}
"""How to start a job over each transport: `local` with one rank, `mpi` and `p2p` under mpiexec."""
