"""A job that works for as long as it is told to, and looks whether anything wears out.

    mpiexec -n 4 python -m mpi4py -m ptstore_mpi.testing.soak --minutes 10

Conversations that want twenty times the memory there is are matched, loaded, grown and stored; one
of two namespaces is cleared now and then. Every byte that comes back is compared. While it works no
budget may be exceeded; in the end nothing may be leased, tokens must add up, memory of all
processes must have stayed what it was, and shared memory must be clean. Settings come from
``PTSTORE_*``; where these say nothing of memory, it is small.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi.client import Store
from ptstore_mpi.config import Config
from ptstore_mpi.errors import CapacityError, ConfigError
from ptstore_mpi.layout import KVLayout
from ptstore_mpi.testing.bench import Bench
from ptstore_mpi.testing.soak_prompts import TEXT_TOKENS, Conversations
from ptstore_mpi.transport.leftovers import unlink_mpi_names
from ptstore_mpi.types import PAGE_BYTES, SOURCES

__all__ = ["growth_bytes", "main", "over_budget"]

LAYOUT = KVLayout.for_attention(layers=2, kv_heads=2, head_dim=8, dtype="float32")
SETTINGS = {"PTSTORE_MEMORY_BYTES": "4MiB", "PTSTORE_SEGMENT_TOKENS": "64"}
"""What is set where neither the environment nor a file says anything."""

OVERSUBSCRIPTION = 20  # what the conversations want / the memory of all nodes
CLEARED_SHARE = 0.3  # of the requests
CLEAR_EVERY_S = 7.0
LOOK_EVERY_S = 1.0
SAY_EVERY_S = 10.0
WARM_UP_SHARE = 0.2  # of the samples of memory: caches fill, pages come on first use
LEAST_SAMPLES = 10
SLACK_BYTES = 4 << 20
SLACK_SHARE = 0.03
LEFT_OVER_S = 5.0  # a name in shared memory that is older is nobody's who is just starting
_PARTS = ("owned_bytes", "reserved_bytes", "zombie_bytes", "metadata_bytes", "replica_bytes")


class MemorySamples:
    """Private bytes of this process, once a second, from a thread: a server only serves."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="soak-memory", daemon=True)
        self._thread.start()

    def close(self) -> list[int]:
        """Sample no more, and return what was found."""
        self._stop.set()
        self._thread.join()
        return self.found

    def _sample(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            words = Path("/proc/self/statm").read_text().split()
            # Pages of the arenas come in as they are used: they are shared, and have a budget.
            self.found.append((int(words[1]) - int(words[2])) * PAGE_BYTES)


@dataclass(slots=True)
class Work:
    """What one client did; plain values, which travel to rank 0."""

    requests: int = 0
    checked_bytes: int = 0
    clears: int = 0
    looks: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    servers: list[dict[str, int]] = field(default_factory=list)


def growth_bytes(samples: Sequence[int]) -> int | None:
    """Return by how much the median of the second half is above that of the first.

    What comes first is left out: a process fills its caches. None of too few samples.
    """
    settled = samples[int(len(samples) * WARM_UP_SHARE) :]
    if len(samples) < LEAST_SAMPLES:
        return None
    half = len(settled) // 2
    return int(median(settled[half:]) - median(settled[:half]))


def over_budget(counters: Mapping[str, int]) -> str | None:
    """Say how the counters of one server break its budget; None where they do not."""
    capacity, free = counters["capacity_bytes"], counters["free_bytes"]
    parts = {name: counters[name] for name in _PARTS if name in counters}
    wrong = [name for name, nbytes in parts.items() if nbytes < 0]
    if free < 0 or wrong or sum(parts.values()) + free > capacity:
        return f"of {capacity} bytes {free} are free beside {parts}"
    if not 0 <= counters["leased_bytes"] <= capacity:
        return f"{counters['leased_bytes']} bytes are leased of {capacity}"
    return None


class Soak:
    """One client's part."""

    def __init__(self, store: Store, options: argparse.Namespace) -> None:
        self.store = store
        self.bench = Bench(store)
        self.kept = self.bench.space(layout=LAYOUT, shared=True, salt="kept")
        self.cleared = self.bench.space(layout=LAYOUT, shared=True, salt="cleared")
        self.work = Work()
        self.rng = np.random.default_rng([options.seed, store.client_rank])
        wanted = OVERSUBSCRIPTION * store.topology.node_count * store.config.memory_bytes
        count = -(-wanted // (TEXT_TOKENS * LAYOUT.bytes_per_token))
        self.conversations = Conversations(int(count), seed=options.seed, rng=self.rng)
        self.length_s = 60 * options.minutes

    def run(self) -> Work:
        """Work until the time is over, then see that everything is settled. Collective."""
        self.bench.everyone()
        started = time.monotonic()
        next_look_s: float = LOOK_EVERY_S
        next_words_s: float = SAY_EVERY_S
        next_clear_s = CLEAR_EVERY_S * (1 + self.store.client_rank)
        while (passed := time.monotonic() - started) < self.length_s:
            self.request()
            if passed >= next_look_s:
                next_look_s = passed + LOOK_EVERY_S
                self.look()
            if passed >= next_clear_s:
                next_clear_s = passed + CLEAR_EVERY_S * self.store.client_count
                self.cleared.namespace.clear()
                self.work.clears += 1
            if passed >= next_words_s and self.store.client_rank == 0:
                next_words_s = passed + SAY_EVERY_S
                self.say(passed)
        self.bench.check_settled()
        self.check_tokens()
        self.work.servers = self.store.server_stats()
        self.bench.everyone()
        return self.work

    def request(self) -> None:
        """Match, load and check one prompt, and store the rest of it."""
        space = self.cleared if self.rng.random() < CLEARED_SHARE else self.kept
        prompt = self.conversations.next_prompt()
        match, got = space.get(prompt)
        self.work.requests += 1
        self.work.checked_bytes += int(got.tokens * LAYOUT.bytes_per_token)
        self.work.tokens.update(got.by_source)
        self.work.tokens["asked"] += len(prompt)
        self.work.tokens["recomputed"] += len(prompt) - got.tokens
        short = got.tokens < match.tokens
        self.work.reasons[f"load {got.reason}" if short else f"match {match.reason}"] += 1
        try:
            stored = space.put(prompt, verified_tokens=got.tokens)
            self.work.reasons[f"store {stored.reason}"] += 1
        except CapacityError:
            self.work.reasons["store too_large"] += 1

    def look(self) -> None:
        """Ask the servers, and check that each is within its budget."""
        for server, counters in enumerate(self.store.server_stats()):
            wrong = over_budget(counters)
            assert wrong is None, f"server {server} is over its budget: {wrong}"
            self.work.looks += 1

    def check_tokens(self) -> None:
        """Check that tokens add up, request by request and as the store counted them."""
        self.bench.check_conservation()
        counted, own = self.store.stats()["tokens"], self.work.tokens
        for name in ("asked", *SOURCES, "recomputed"):
            assert counted[name] == own[name], (
                f"{name}: the store counted {counted}, its user {own}"
            )

    def say(self, passed_s: float) -> None:
        """Print how far it is."""
        tokens = self.work.tokens
        reused = 1 - tokens["recomputed"] / max(tokens["asked"], 1)
        print(
            f"soak: {passed_s:.0f} of {self.length_s:.0f} s, {self.work.requests:,} requests of "
            f"client 0, {reused:.0%} of their tokens reused, "
            f"{self.bench.server_total('evicted_count'):,} segments evicted",
            file=sys.stderr,
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak. Collective over all ranks.

    Returns
    -------
    0, or on every rank 1 where something was wrong in the end. What is wrong before ends the job,
    with what it was. 2 where the command line or a setting is wrong.
    """
    world = MPI.COMM_WORLD
    unlink_mpi_names()  # MPI has just started: a wrong setting ends it before there is a job
    try:
        options = _parser().parse_args(argv)
        config = Config.load(environment=_environment())
    except ConfigError as error:
        if world.Get_rank() == 0:
            print(error, file=sys.stderr, flush=True)
        _meet(world)
        return 2
    names = _arena_names(config)
    memory = MemorySamples()
    work = ptstore_mpi.run(lambda store: Soak(store, options).run(), config)
    facts = {
        "work": work,
        "samples": memory.close(),
        "left_over": _left_over(config, names),
    }
    _meet(world)
    gathered = world.gather(facts)
    code = 0
    if gathered is not None:
        found = summarise(gathered, minutes=options.minutes)
        print(json.dumps(found) if options.json else _line(found), flush=True)
        code = 1 if found["wrong"] else 0
    _meet(world)
    final: int = world.bcast(code)
    return final


def summarise(gathered: Sequence[Mapping[str, Any]], *, minutes: float) -> dict[str, Any]:
    """Return what all ranks found as one object, with what was ``wrong``."""
    works: list[Work] = [facts["work"] for facts in gathered if facts["work"] is not None]
    tokens = sum((work.tokens for work in works), Counter())
    reasons = sum((work.reasons for work in works), Counter())
    alone = len(gathered) == 1
    growth: dict[str, list[int]] = {"server": [], "client": []}
    wrong = []
    for rank, facts in enumerate(gathered):
        role = "client" if facts["work"] is not None else "server"
        grown = growth_bytes(facts["samples"])
        if grown is None:
            continue
        growth[role].append(grown)
        allowed = max(SLACK_BYTES, SLACK_SHARE * median(facts["samples"]))
        if grown > allowed:
            wrong.append(
                f"rank {rank}, a {role}, has grown by {grown:,} bytes from the first half to the "
                f"second, {allowed:,.0f} are allowed"
            )
    wrong += dict.fromkeys(text for facts in gathered for text in facts["left_over"])
    servers = works[0].servers
    leased = sum(counters["leased_bytes"] for counters in servers)
    if leased:
        wrong.append(f"{leased:,} bytes are still leased")
    if not sum(work.looks for work in works) and minutes * 60 > 2 * LOOK_EVERY_S:
        wrong.append("no server ever answered when it was asked for its counters")
    return {
        "seconds": 60 * minutes,
        "servers": 1 if alone else len(gathered) - len(works),
        "clients": len(works),
        "requests": sum(work.requests for work in works),
        "checked_bytes": sum(work.checked_bytes for work in works),
        "tokens": {name: tokens[name] for name in ("asked", *SOURCES, "recomputed")},
        "reasons": dict(sorted(reasons.items())),
        "clears": sum(work.clears for work in works),
        "looks": sum(work.looks for work in works),
        "evicted_count": sum(counters.get("evicted_count", 0) for counters in servers),
        "leased_bytes": leased,
        "server_growth_bytes": max(growth["server"], default=None),
        "client_growth_bytes": max(growth["client"], default=None),
        "wrong": wrong,
    }


def _line(found: Mapping[str, Any]) -> str:
    tokens = found["tokens"]
    shares = ", ".join(
        f"{name} {tokens[name] / max(tokens['asked'], 1):.0%}"
        for name in (*SOURCES, "recomputed")
        if tokens[name]
    )
    grown = ", ".join(
        f"{role}s {found[f'{role}_growth_bytes'] / 1024:+,.0f} KiB"
        for role in ("server", "client")
        if found[f"{role}_growth_bytes"] is not None
    )
    return (
        f"soak: {found['seconds']:.0f} s, {found['servers']} servers, {found['clients']} clients, "
        f"{found['requests']:,} requests, {found['checked_bytes']:,} bytes compared, {shares}, "
        f"{found['evicted_count']:,} segments evicted, {found['clears']} clears, "
        f"{found['looks']} looks at budgets, growth: {grown or 'not judged'}: "
        + ("; ".join(["WRONG", *found["wrong"]]) if found["wrong"] else "all is well")
    )


def _environment() -> dict[str, str]:
    """Return the variables, and small settings of memory where nothing else sets it."""
    return dict(os.environ) if os.environ.get("PTSTORE_CONFIG") else {**SETTINGS, **os.environ}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ptstore_mpi.testing.soak",
        description="Work for some minutes and look whether anything wears out.",
        epilog="On n ranks: mpiexec -n 4 python -m mpi4py -m ptstore_mpi.testing.soak. Settings "
        "come from PTSTORE_*; without them each node has 4 MiB.",
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=10.0, help="how long it works (default: 10)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of tokens and choices (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the line")
    return parser


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100_000:
        raise argparse.ArgumentTypeError(f"expected minutes above 0, given {text!r:.80}")
    return value


def _meet(comm: MPI.Intracomm) -> None:
    """Wait for all ranks, with naps: one may be the only one that still works."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def _arena_names(config: Config) -> set[str]:
    return {path.name for path in Path(config.shared_memory_dir).glob("ptstore-arena-*")}


def _left_over(config: Config, before: set[str]) -> list[str]:
    """Say what the closed job has left in shared memory or mapped. Others' names come and go."""
    gc.collect()  # what maps an arena may be part of a ring of objects
    host = socket.gethostname()
    until = time.monotonic() + LEFT_OVER_S
    while (names := _arena_names(config) - before) and time.monotonic() < until:
        time.sleep(0.1)
    mapped = [
        line[line.index("/") :]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "ptstore-arena-" in line
        or ("/dev/shm/mpich_shm_" in line and not line.endswith(" (deleted)"))
    ]
    return [
        *(f"{host}: {config.shared_memory_dir}/{name} is left" for name in sorted(names)),
        *(f"{host}: {name} is still mapped" for name in dict.fromkeys(mapped)),
    ]


if __name__ == "__main__":
    sys.exit(main())
