"""One simulated job of `exp_fan_out`: documents stored, then loaded by everybody at once.

Owns the job, the clock it runs on, and what is read off it. Never averages, never writes a file.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.common.workload import Popularity
from experiments.fan_out.tables import EXPERIMENT
from experiments.trace_replay.places import untouched_memory
from ptstore_mpi import Config, KVLayout, Match, Namespace, TensorSpec
from ptstore_mpi.sim.links import LinkedSimulation
from ptstore_mpi.sim.processes import Sleep

BLOCK_TOKENS = 128
LOAD_TIMEOUT_S = 1e4


class JobError(RuntimeError):
    """The job cannot be run as it was asked for; the message is for whoever asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is run: counts, tokens, bytes and seconds as in the options of the driver."""

    nodes: int
    clients_per_node: int
    documents: int
    popularity_name: str
    mode: str
    loads: int
    context_tokens: int
    segment_tokens: int
    bytes_per_token: int
    memory_bytes: int
    link_bytes_per_s: float
    latency_s: float
    admission: str
    redirect_bytes: int
    seed: int


@dataclass(slots=True)
class Done:
    """The rows of one run."""

    run: dict[str, Any]
    nodes: list[dict[str, Any]]
    loads: list[dict[str, Any]] = field(default_factory=list)


class _Job:
    def __init__(self, setting: Setting, number: int) -> None:
        self.setting, self.number = setting, number
        nodes = range(setting.nodes)
        self.sim = LinkedSimulation(
            _config(setting),
            link_bytes_per_s=setting.link_bytes_per_s,
            latency_s=setting.latency_s,
            seed=setting.seed,
            server_nodes=list(nodes),
            client_nodes=[node for node in nodes for _ in range(setting.clients_per_node)],
            generation_bits=20,
            counts_only=True,
        )
        block_bytes = setting.bytes_per_token * BLOCK_TOKENS
        layout = KVLayout((TensorSpec("kv", block_bytes),), BLOCK_TOKENS)
        self.spaces = [
            self.sim.store(client).namespace(EXPERIMENT, layout) for client in self.sim.clients
        ]
        self.kv = untouched_memory(setting.context_tokens * setting.bytes_per_token)
        self.loads: list[dict[str, Any]] = []

    def document(self, number: int) -> Any:
        """Return the tokens of a document, one more than its whole blocks."""
        tokens = np.arange(self.setting.context_tokens + 1, dtype=np.uint32)
        return tokens + np.uint32(number << 16)

    def store_all(self) -> list[Match]:
        """Store every document on the node whose turn it is; return where each is found."""
        per_node = self.setting.clients_per_node
        matches = []
        for number in range(self.setting.documents):
            space = self.spaces[number % self.setting.nodes * per_node]
            tokens = self.document(number)
            stored = space.store(tokens, [self.kv])
            assert stored.reason == "stored", f"document {number}: {stored}"
            matches.append(space.match(tokens))
        return matches

    def script(
        self, client: int, space: Namespace, asked: list[int], matches: list[Match]
    ) -> Generator[Any, Any, None]:
        """Load one document after the other."""
        yield Sleep(0.0)
        for document in asked:
            loaded = yield from space.loading(matches[document], [self.kv])
            if loaded.reason != "loaded":
                raise JobError(
                    f"expected every load to end within {LOAD_TIMEOUT_S:g} s, that of document "
                    f"{document} on client {client} did not ({loaded.reason}): a faster link, or "
                    "fewer loads"
                )
            sources = {f"{n}_tokens": loaded.by_source[n] for n in ("owned", "replica", "remote")}
            self.loads.append(
                {"run": self.number, "client": client, "document": document}
                | {"load_s": loaded.seconds, "asked_tokens": self.setting.context_tokens}
                | sources
            )


def run_job(setting: Setting, number: int) -> Done:
    """Run one job and return its rows; ``wall_s`` is the caller's."""
    job = _Job(setting, number)
    matches = job.store_all()
    random = np.random.default_rng([setting.seed, setting.nodes])
    count = setting.loads * len(job.spaces)
    popularity = Popularity.parse(setting.popularity_name)
    asked = popularity.sample(random, documents=setting.documents, count=count)
    sim, start_s = job.sim, job.sim.now
    sim.sent_bytes.clear()
    for place, (client, space) in enumerate(zip(sim.clients, job.spaces, strict=True)):
        mine = asked[place * setting.loads :][: setting.loads].tolist()
        sim.spawn(client, job.script(client, space, mine, matches))
    sim.run(limit_count=1 << 62)
    return Done(_run_row(job, sim.now - start_s), _node_rows(job), job.loads)


def _run_row(job: _Job, virtual_s: float) -> dict[str, Any]:
    setting, sim = job.setting, job.sim
    fan_out = [handler.reads.fan_out.counters() for handler in sim.servers]
    counts = ("redirect_count", "stale_hint_count", "deferred_count")
    return {
        "run": job.number,
        "nodes_count": setting.nodes,
        "clients_count": len(job.spaces),
        "documents_count": setting.documents,
        "popularity": setting.popularity_name,
        "mode": setting.mode,
        "document_bytes": setting.context_tokens * setting.bytes_per_token,
        "sent_bytes": sim.sent_bytes.total(),
        "virtual_s": virtual_s,
        **{name: sum(counters[name] for counters in fan_out) for name in counts},
    }


def _node_rows(job: _Job) -> list[dict[str, Any]]:
    return [
        {
            "run": job.number,
            "node": node,
            "sent_bytes": job.sim.sent_bytes[node],
            "replica_bytes": handler.replicas.replicas.used_bytes,
        }
        for node, handler in enumerate(job.sim.servers)
    ]


def _config(setting: Setting) -> Config:
    segment_bytes = setting.segment_tokens * setting.bytes_per_token
    return Config(
        memory_bytes=setting.memory_bytes,
        segment_tokens=setting.segment_tokens,
        placement="local",
        replica_admission=setting.admission,
        redirect_bytes=setting.redirect_bytes if setting.mode == "fan_out" else 0,
        staging_bytes=4 * segment_bytes,
        get_bytes=segment_bytes,
        match_timeout_s=1e3,
        load_timeout_s=LOAD_TIMEOUT_S,
        lease_cap_s=1e4,
        store_timeout_s=1e3,
        retry_s=1e4,
    )
