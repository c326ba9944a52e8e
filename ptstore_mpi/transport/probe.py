"""Which transport: asked for, known to hang, or found out by reading from another node at start.

The probe reads a pattern from one server of another node per client, through the very window and
memory that the job would use, under a deadline. It costs one Get per client whatever the number of
nodes. All ranks reach the same choice. Only a *call* that hangs has no deadline: the watchdog ends
the job then, and says what to set.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from ptstore_mpi.arena import Arena, Memory, anonymous_memory
from ptstore_mpi.config import Config
from ptstore_mpi.idle import Idle
from ptstore_mpi.topology import Topology
from ptstore_mpi.transport.mpi_versions import known_hang, one_line
from ptstore_mpi.transport.watchdog import abort_after
from ptstore_mpi.transport.window import Window
from ptstore_mpi.types import ServerIndex, TransportChoice, whole_pages

__all__ = ["Chosen", "choose_transport", "pattern_of", "server_to_probe"]

_PATTERN_BYTES = 256 << 10  # far beyond what any MPI sends eagerly
_ADVICE = 'transport = "p2p" does without MPI_Get; probe_timeout_s sets this limit'
_GRACE_S = 1.0  # at least: a call that is merely slow returns and is late, not stuck
_OTHERS_FACTOR = 3  # ranks that wait for a stuck one let it speak first


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice, and the window where there is one: `mpi`, or a probe that failed."""

    choice: TransportChoice
    window: Window | None


def choose_transport(
    config: Config, *, comm: MPI.Intracomm, topology: Topology, own: Arena | None
) -> Chosen:
    """Choose what carries bytes between nodes. Collective over the ranks of ``comm``.

    Parameters
    ----------
    config
        Settings of the job.
    comm
        The job's communicator.
    topology
        Roles of its ranks.
    own
        This rank's arena; None on a client.
    """
    version = MPI.Get_library_version()
    library = one_line(version)
    if config.transport == "p2p":
        return Chosen(TransportChoice("p2p", "asked for", library), None)
    memory = None if own is None else own.memory

    def unprobed(reason: str) -> Chosen:
        with abort_after(config.close_timeout_s, "open"):
            return Chosen(TransportChoice("mpi", reason, library), Window(memory, comm))

    if config.transport == "mpi":
        return unprobed("asked for")
    if topology.node_count == 1:
        return unprobed("one node: no bytes cross a wire")
    hang = known_hang(version)
    if hang is not None:
        return _told(Chosen(TransportChoice("p2p", hang, library, is_fallback=True), None), comm)
    grace_s = max(config.probe_timeout_s, _GRACE_S)
    with abort_after(config.probe_timeout_s + _OTHERS_FACTOR * grace_s, "probe", _ADVICE):
        probe = _Probe(config, comm=comm, topology=topology)
        if own is not None:
            probe.write(own)
        window = Window(memory, comm)
        failure, probe_s = probe.run(window)
    if failure is None:
        choice = TransportChoice("mpi", "probed: MPI_Get works", library, probe_s=probe_s)
        return Chosen(choice, window)
    choice = TransportChoice("p2p", failure, library, is_fallback=True, probe_s=probe_s)
    return _told(Chosen(choice, window), comm)


def server_to_probe(topology: Topology, client_rank: int) -> ServerIndex | None:
    """Return the server that a client reads from; None where no other node has one.

    The clients of a node take the servers of the nodes behind theirs in turn, so that every
    server is read about equally often.
    """
    node = topology.nodes[client_rank]
    far = [
        server for server, rank in enumerate(topology.server_ranks) if topology.nodes[rank] > node
    ]
    far += [
        server for server, rank in enumerate(topology.server_ranks) if topology.nodes[rank] < node
    ]
    if not far:
        return None
    clients = [rank for rank in topology.client_ranks if topology.nodes[rank] == node]
    return ServerIndex(far[clients.index(client_rank) % len(far)])


def pattern_of(server: int, nbytes: int) -> Memory:
    """Return the pattern of a server, uint8: no eight bytes twice, and none as another server's."""
    words = np.arange(1, nbytes // 8 + 1, dtype=np.uint64) + np.uint64(server << 32)
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


class _Probe:
    """One rank's part of the probe."""

    def __init__(self, config: Config, *, comm: MPI.Intracomm, topology: Topology) -> None:
        self._config = config
        self._comm = comm
        self._topology = topology
        self._rank = comm.Get_rank()
        self._nbytes = min(_PATTERN_BYTES, config.arena_bytes)
        self._idle = Idle(config)

    def write(self, arena: Arena) -> None:
        """Write this server's pattern. Not before the pages exist: no room is an error by name."""
        self._idle.until(lambda: arena.populated_bytes >= self._nbytes)
        server = self._topology.server_ranks.index(self._rank)
        arena.memory[: self._nbytes] = pattern_of(server, self._nbytes)

    def run(self, window: Window) -> tuple[str | None, float]:
        """Return why the window cannot be used, or None, and the slowest client's time, s."""
        self._idle.until(self._comm.Ibarrier().Test)  # all patterns are written
        is_late, is_wrong, took_s = False, False, 0.0
        server = None
        if not self._topology.is_server(self._rank):
            server = server_to_probe(self._topology, self._rank)
        if server is not None:
            started = time.monotonic()
            found = self._read(window, server)
            took_s = time.monotonic() - started
            is_late = found is None
            if found is not None:
                is_wrong = not np.array_equal(found, pattern_of(server, self._nbytes))
        # The least of each: of the ranks that failed in one way that is the lowest.
        nobody = self._comm.Get_size()
        mine = np.array(
            [
                self._rank if is_late else nobody,
                self._rank if is_wrong else nobody,
                -int(took_s * 1e6),
            ],
            np.int64,
        )
        worst = np.empty_like(mine)
        self._idle.until(self._comm.Iallreduce(mine, worst, op=MPI.MIN).Test)
        late_rank, wrong_rank, took_us = worst.tolist()
        failure = None
        if late_rank < nobody:
            limit = f"{self._config.probe_timeout_s:g} s"
            failure = f"a probing MPI_Get did not end within {limit} (rank {late_rank})"
        elif wrong_rank < nobody:
            failure = f"a probing MPI_Get brought wrong bytes (rank {wrong_rank})"
        return failure, -took_us / 1e6

    def _read(self, window: Window, server: ServerIndex) -> Memory | None:
        """Return what a Get brought; None where it was late."""
        target = anonymous_memory(whole_pages(self._nbytes))[: self._nbytes]
        until = time.monotonic() + self._config.probe_timeout_s
        fault = self._config.probe_fault
        if self._rank != self._topology.client_ranks[0]:
            fault = "none"
        timeout_s = self._config.probe_timeout_s
        with abort_after(timeout_s + max(timeout_s, _GRACE_S), "probe", _ADVICE):
            if fault == "stuck":
                MPI.COMM_SELF.Recv(bytearray(1), source=0)
            if fault == "hang":
                request = MPI.COMM_SELF.Irecv(target, source=0)
            else:
                request = window.get(self._topology.server_ranks[server], 0, target)
            self._idle.reset()
            while not request.Test():
                if time.monotonic() >= until:
                    window.set_aside(request, target)
                    return None
                self._idle.wait()
        if fault == "corrupt":
            target[self._nbytes // 2] ^= 1
        return target


def _told(chosen: Chosen, comm: MPI.Intracomm) -> Chosen:
    """Have rank 0 say that the job falls back, and why."""
    if comm.Get_rank() == 0:
        choice = chosen.choice
        print(
            f"ptstore: transport {choice.name}: {choice.reason}; {choice.library}",
            file=sys.stderr,
            flush=True,
        )
    return chosen
