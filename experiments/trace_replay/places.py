"""Where a trace is replayed: a simulated job in this process, or this rank's part of a real one.

Owns how clients of the store are had, and their memory. Both kinds of place offer the same: the
clients that are here by number, their count, arrival of a request, counters of the servers.
"""

from __future__ import annotations

import mmap
from functools import partial

import numpy as np

from experiments.trace_replay.options import Options
from experiments.trace_replay.replayer import NAMESPACE, Bytes, Replayer, layout_of
from experiments.traces import Trace, TraceRequest
from ptstore_mpi import BalanceDecision, Config, Store
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.sim.faults import FaultPlan
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.types import GENERATION_BITS

AT_ONCE = FaultPlan(delay_s=1e-6, peer_delay_s=1e-6)
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which `mmap` does not name


class SimPlace:
    """A simulated job: all clients are here, bytes are counted and not moved.

    Attributes
    ----------
    replayers
        Clients that are here, by number.
    client_count, node_count
        Of the job.
    comm
        None: there is nobody to wait for.
    """

    comm = None
    transport_choice = ("sim", "asked for: bytes are counted, not moved")

    def __init__(self, trace: Trace, options: Options, config: Config) -> None:
        nodes = range(options.nodes)
        self.node_count = options.nodes
        # A file tier takes its time, so there the clock goes on by itself.
        cluster = partial(Simulation, plan=AT_ONCE) if config.ssd_dir else Cluster
        self._cluster: Cluster = cluster(
            config,
            server_nodes=[node for node in nodes for _ in range(config.servers_per_node)],
            client_nodes=[node for node in nodes for _ in range(options.clients_per_node)],
            generation_bits=GENERATION_BITS,
            counts_only=True,
        )
        self._start_s = self._cluster.now
        self.server_count = len(self._cluster.servers)
        self.client_count = len(self._cluster.clients)
        kv = untouched_memory(kv_bytes(trace, options))
        self.replayers = {
            number: _replayer(self._cluster.store(client), number, trace, options, kv)
            for number, client in enumerate(self._cluster.clients)
        }

    def arrive(self, request: TraceRequest) -> None:
        """Let time pass until a request arrives: leases end, servers repeat what is unanswered."""
        self._cluster.advance_to(self._start_s + request.time_s)

    def server_counters(self) -> list[dict[str, int]]:
        """Return the counters of every server."""
        return [handler.counters() for handler in self._cluster.servers]

    def decisions(self) -> dict[int, list[BalanceDecision]]:
        """Return what each server decided about its share for replicas."""
        return next(iter(self.replayers.values())).store.balance()


class MpiPlace:
    """One client of a real job; attributes and methods are those of `SimPlace`."""

    def __init__(self, store: Store, trace: Trace, options: Options) -> None:
        self.comm = store.comm
        self.client_count = store.client_count
        self.node_count = store.topology.node_count
        self.server_count = len(store.topology.server_ranks)
        choice = store.transport_choice
        self.transport_choice = (choice.name, choice.reason)
        self._store = store
        kv = np.zeros(kv_bytes(trace, options), dtype=np.uint8)
        rank = store.client_rank
        self.replayers = {rank: _replayer(store, rank, trace, options, kv, moves_bytes=True)}

    def arrive(self, request: TraceRequest) -> None:
        """Nothing: a client takes its next request when it is done with the one before."""

    def server_counters(self) -> list[dict[str, int]]:
        """Return the counters of every server that answers."""
        return self._store.server_stats()

    def decisions(self) -> dict[int, list[BalanceDecision]]:
        """Return what each server that answers decided about its share for replicas."""
        return self._store.balance()


Place = SimPlace | MpiPlace


def kv_bytes(trace: Trace, options: Options) -> int:
    """Return the bytes of the longest prompt with its answer, in whole blocks."""
    tokens = max(request.prompt_tokens + len(request.output) for request in trace.requests)
    return -(-tokens // options.block_tokens) * options.block_tokens * options.bytes_per_token


def untouched_memory(nbytes: int) -> Bytes:
    """Return addresses for so many bytes, none of which anybody looks at: they take no memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=np.uint8)


def _replayer(
    store: Store,
    number: int,
    trace: Trace,
    options: Options,
    kv: Bytes,
    *,
    moves_bytes: bool = False,
) -> Replayer:
    layout = layout_of(options.bytes_per_token, options.block_tokens)
    namespace = store.namespace(NAMESPACE, layout, trace=trace.name)
    return Replayer(store, number, trace, namespace, kv, moves_bytes)
