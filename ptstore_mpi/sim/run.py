"""One simulated job from one seed: places, settings, faults, workload, checkers, and the verdict.

Everything follows from (workload, seed). A failure carries the command that replays it and the
last lines of its trace.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from ptstore_mpi.protocol import maintain
from ptstore_mpi.protocol.handler import ServerHandler
from ptstore_mpi.sim.checkers import CHECKERS
from ptstore_mpi.sim.faults import FaultPlan, plan_of, with_tier_faults
from ptstore_mpi.sim.observer import InvariantError
from ptstore_mpi.sim.prompts import LAYOUTS
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.trace import line_of
from ptstore_mpi.sim.workloads import WORKLOADS, Player, Workload
from ptstore_mpi.testing.actor import small_config
from ptstore_mpi.types import PAGE_BYTES, whole_pages

__all__ = ["Outcome", "Report", "SeedFailed", "run_seed", "run_seeds"]

_SHOWN_LINES = 40
_SETTLE_S = 8.0
_LONG_SLOTS = 6
_DESCRIBED_BYTES = 1024 + 512 + 2 * 80 + 64
_MOVES = 8
_MOVING_S = 3.0
_PLACES = (
    ((0,), (0, 0)),
    ((0, 1), (0, 1)),
    ((0, 1), (0, 1, 0)),
    ((0, 1, 1), (0, 1, 0)),
    ((0, 1), (1, 1, 0)),
    ((0, 1, 2), (0, 1, 1, 2)),
    ((0, 1, 1), (0, 1, 1)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to.

    Attributes
    ----------
    fired
        How often each fault and each situation came about.
    event_count, now_s
        Events carried out, and the virtual time at the end, s.
    decisions
        Digest of everything that was decided: equal for equal seeds (invariant 8).
    """

    fired: Counter[str]
    event_count: int
    now_s: float
    decisions: str


@dataclass(slots=True)
class Report:
    """What many runs came to."""

    seed_count: int = 0
    run_count: int = 0
    event_count: int = 0
    failures: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Add another report to this one."""
        self.seed_count += other.seed_count
        self.run_count += other.run_count
        self.event_count += other.event_count
        self.failures += other.failures
        self.fired.update(other.fired)


class SeedFailed(AssertionError):  # noqa: N818
    """An invariant did not hold in a run."""


def run_seeds(
    workloads: Sequence[str], seeds: Iterable[int], plan: FaultPlan | None = None
) -> Report:
    """Run every workload from every seed; failures are in the report."""
    report = Report()
    for seed in seeds:
        report.seed_count += 1
        for workload in workloads:
            report.run_count += 1
            try:
                outcome = run_seed(workload, seed, plan=plan)
            except SeedFailed as error:
                report.failures.append(str(error))
            else:
                report.event_count += outcome.event_count
                report.fired.update(outcome.fired)
    return report


def run_seed(
    workload: str,
    seed: int,
    *,
    plan: FaultPlan | None = None,
    counts_only: bool = False,
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Run one job and check it.

    Parameters
    ----------
    workload
        Name of one of `ptstore_mpi.sim.workloads.WORKLOADS`.
    seed
        Decides everything.
    plan
        Faults; default: drawn from the seed.
    counts_only
        Move no bytes and check none.
    on_line
        Called with every line of the trace, as it happens.

    Raises
    ------
    SeedFailed
        An invariant did not hold; the text has the command to replay it and the end of its trace.
    """
    sim, players = _set_up(WORKLOADS[workload], seed, plan, counts_only=counts_only)
    if on_line is not None:
        sim.on_note = lambda *entry: on_line(line_of(*entry))
    try:
        sim.run()
        _settle(sim, players)
    except BrokenPipeError:
        raise
    except Exception as error:
        faults = "" if plan is None else f" --plan '{msgspec.json.encode(plan).decode()}'"
        lines = [line_of(*entry) for entry in list(sim.trace)[-_SHOWN_LINES:]]
        kind = "" if isinstance(error, InvariantError) else f"{type(error).__name__}: "
        raise SeedFailed(
            f"{kind}{error}\nworkload {workload}, seed {seed}; the end of its trace:\n"
            + "\n".join(lines)
            + f"\nreplay: python -m ptstore_mpi.sim --workload {workload} --first-seed {seed} "
            f"--seeds 1{faults} --trace"
        ) from error
    return Outcome(sim.dice.fired, sim.event_count, sim.now, _decisions(sim, players))


def _set_up(
    workload: Workload, seed: int, plan: FaultPlan | None, *, counts_only: bool
) -> tuple[Simulation, list[Player]]:
    rng = random.Random(f"{workload.name} {seed}")
    drawn = plan_of(rng, workload.faults)
    servers, clients = rng.choice(_PLACES)
    settings: dict[str, Any] = {
        "slots": rng.randint(*workload.slots),
        "placement": rng.choice(["local", "random", "least_loaded"]),
        "eviction": rng.choice(["none", "lru", "lfu", "gdsf", "s3fifo", "adaptive"]),
        "replica_admission": rng.choice(["never", "second_hit", "always", "always"]),
        "replica_min_share": rng.choice([0.0, 0.0, 0.3]),
        "replica_max_share": rng.choice([0.3, 0.5, 1.0]),
        "redirect_bytes": rng.choice([0, 1, 1, 8192]),
        "verify": rng.choice(["off", "remote", "remote", "always", "always"]),
        "verify_publish": rng.random() < 0.3,
        "unconfirmed_count": rng.randint(1, 4),
        "match_timeout_s": 0.5,
        "load_timeout_s": rng.choice([0.5, 1.0]),
        "store_timeout_s": rng.choice([0.5, 1.5]),
        "retry_s": rng.choice([0.05, 0.2]),
        "lease_cap_s": rng.choice([0.3, 2.0]),
        "staging_bytes": 1 << 14,
        "get_bytes": rng.choice([96, 1024, 4096, 16384]),
        "gets_in_flight_count": rng.choice([1, 2, 64]),
    }
    share_rng = random.Random(f"{workload.name} {seed} share")
    settings |= _share(share_rng)
    tiers = random.Random(f"{workload.name} {seed} tiers")
    if tiers.random() < workload.tiered_share:
        settings |= _tier_settings(tiers, workload.slots[0])
        drawn = with_tier_faults(drawn, tiers, workload.faults)
    config = small_config(**{**settings, **workload.settings})
    is_young = rng.random() < 0.2  # its arenas are still being populated when it starts
    sim = Simulation(
        config,
        layout=rng.choice(LAYOUTS),
        plan=plan or drawn,
        seed=f"{workload.name} {seed} schedule",
        server_nodes=servers,
        client_nodes=clients,
        generation_bits=rng.choice(workload.generation_bits),
        peer_resend_s=0.1,
        counts_only=counts_only,
        populated_bytes=0 if is_young else None,
    )
    for checker in CHECKERS:
        if not (counts_only and checker.reads_bytes):
            sim.watch(checker(sim, workload.salts))
    for server, part in itertools.product(sim.memories, (1, 2, 3) if is_young else ()):
        size = whole_pages(config.arena_bytes * part // 3)
        sim.at(sim.now + 0.1 * rng.random() * part, partial(sim.grow, server, size))
    if config.replica_share == "adaptive":
        _plan_moves(sim, share_rng)
    players: list[Player] = []
    for place, client in enumerate(sim.clients):
        player = Player(sim, client, salt=workload.salts[place % len(workload.salts)])
        player.process = sim.spawn(client, workload.script(player))
        players.append(player)
    return sim, players


def _tier_settings(rng: random.Random, least_slots: int) -> dict[str, Any]:
    """Draw a small file tier, and a memory that holds hardly more than one increment."""
    slots = rng.randint(2, 4) if least_slots < _LONG_SLOTS else _LONG_SLOTS
    slab_slots, slab_count = rng.choice((2, 3)), rng.randint(1, 5)
    slab_bytes = slab_slots * 2 * PAGE_BYTES  # a page of header, a page of payload
    described = slots + slab_slots * slab_count // 2
    return {
        "memory_bytes": whole_pages(slots * PAGE_BYTES + described * _DESCRIBED_BYTES),
        "ssd_dir": "simulated",
        "ssd_bytes": slab_count * slab_bytes,
        "slab_bytes": slab_bytes,
        "ssd_admission": rng.choice(["all", "all", "reused"]),
    }


def _share(rng: random.Random) -> dict[str, Any]:
    """Draw how the share for replicas is set: with times that make it rise, fall, or measured."""
    if rng.random() < 0.5:
        return {}
    return {
        "replica_share": "adaptive",
        "replica_min_share": 0.0,
        "replica_max_share": rng.choice([0.3, 0.5, 1.0]),
        "assumed_local_s": 0.01,
        "assumed_remote_s": rng.choice([0.1, 10.0]),
        "assumed_recompute_s": rng.choice([0.0, 0.1, 11.0]),
    }


def _plan_moves(sim: Simulation, rng: random.Random) -> None:
    """Let every share move now and then, whatever the few bytes of so short a job would say."""

    def move(handler: ServerHandler, share: float) -> None:
        replicas = handler.replicas.replicas
        replicas.least_bytes = int(share * replicas.most_bytes)
        sim.dice.fired["share_moved"] += replicas.used_bytes > 0

    for handler in sim.servers:
        for _ in range(_MOVES):
            sim.at(sim.now + _MOVING_S * rng.random(), partial(move, handler, rng.random()))


def _settle(sim: Simulation, players: Iterable[Player]) -> None:
    """End the storm, let every client leave and everything under way arrive, and look once more."""
    sim.dice.plan = FaultPlan()
    for player in players:
        if player.process is not None and player.process.state == "ended":
            sim.spawn(player.client, _leave(sim, player))
    sim.run()
    sim.advance(_SETTLE_S)
    sim.dice.fired["peer_resend"] += sum(h.counters()["peer_resend_count"] for h in sim.servers)
    for hear in sim.hearers["ended"]:
        hear()


def _leave(sim: Simulation, player: Player) -> Any:
    context = sim.contexts[player.client]
    yield from maintain.drain(context, sim.transports[player.client].now() + _SETTLE_S)
    yield from maintain.bye(context)


def _decisions(sim: Simulation, players: Iterable[Player]) -> str:
    """Return a digest of what servers and clients decided."""
    facts = [
        [handler.counters() for handler in sim.servers],
        [player.store.stats()["tokens"] for player in players],
        [player.store.stats()["reasons"] for player in players],
        sim.event_count,
        sim.now,
        sorted(sim.dice.fired.items()),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
