"""Resources of an MPI job: roles, communicators, arenas, the window; opened and closed together.

Everything here is collective over the job's ranks. What may wait long waits with naps: a blocking
MPI call on more ranks than cores starves those that compute.

::

    job communicator (a duplicate, named "ptstore")
    |-- node communicator      arenas are made, mapped and unlinked over it
    |-- control, data, peers   requests and replies; data of stores; server to server
    |-- fetches                with `p2p`: asks and the bytes of loads
    |-- clients                for the caller's own use
    |-- leave                  where clients wait at the end until the last one has come
    `-- window                 with `mpi`: one over all arenas
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import msgspec
import numpy as np
from mpi4py import MPI

from ptstore_mpi.arena import Arena, free_bytes_of
from ptstore_mpi.config import Config
from ptstore_mpi.errors import ConfigError, PTStoreError, TransportError
from ptstore_mpi.idle import Idle, lower_timer_slack
from ptstore_mpi.topology import Topology, assign_roles, split_nodes
from ptstore_mpi.transport.fetch import Fetcher, FetchServer, MessageFetcher, WindowFetcher
from ptstore_mpi.transport.leftovers import LauncherWatch
from ptstore_mpi.transport.mpi_client import MpiClientTransport
from ptstore_mpi.transport.mpi_server import MpiServer
from ptstore_mpi.transport.probe import choose_transport
from ptstore_mpi.transport.server_parts import check_shared_memory, make_handler, open_tier
from ptstore_mpi.transport.stall import StallWatch
from ptstore_mpi.transport.watchdog import abort_after
from ptstore_mpi.types import ServerIndex

__all__ = ["MpiJob"]


class _Host(msgspec.Struct, frozen=True):
    """What the ranks tell each other at start."""

    name: str
    node: int
    settings: bytes
    shared_memory_free_bytes: int
    error: str | None


class MpiJob:
    """This rank's part of a job of several ranks. Construction and `close` are collective.

    Parameters
    ----------
    config
        Settings, equal on every rank.
    comm
        Ranks of the job; it is duplicated.

    Raises
    ------
    ConfigError
        On every rank: the settings differ between ranks, the roles cannot be dealt, or the
        arenas of one host do not fit its shared memory, or that cannot be asked.
    TransportError
        On every rank: an arena cannot be made or mapped.
    """

    def __init__(self, config: Config, comm: MPI.Comm) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(LauncherWatch().close)
            lower_timer_slack()
            self.config = config
            self._idle = Idle(config)
            self._comms: list[MPI.Intracomm] = []
            self._idle.until(comm.Ibarrier().Test)  # the ranks may start seconds apart
            with abort_after(config.close_timeout_s, "open"):
                self.comm = self._keep(comm.Dup(), "ptstore")
                self._stall = self._watch_for_stalls()
                undo.callback(self._stall.close)
                hosts = self._settle()
            own = self._arenas[self._server_index()] if self.is_server else None
            # Outside of that limit: a probe has one of its own, which may be longer.
            chosen = choose_transport(config, comm=self.comm, topology=self.topology, own=own)
            self.choice, self._window = chosen.choice, chosen.window
            with abort_after(config.close_timeout_s, "open"):
                self._fetches = None
                if self.choice.name == "p2p":
                    self._fetches = self._keep(self.comm.Dup(), "ptstore-fetches")
                self.server = self._make_server(own) if own is not None else None
                self.transport = None if self.is_server else self._make_transport(hosts)
            self._watches = undo.pop_all()

    # -- open ------------------------------------------------------------------------------

    def _settle(self) -> list[_Host]:
        """Deal the roles, make communicators and arenas; where that fails it fails everywhere."""
        rank = self.comm.Get_rank()
        try:
            self.topology, hosts = self._meet()
            self.is_server = self.topology.is_server(rank)
            node = self.topology.nodes[rank]
            self._node_comm = self._keep(self.comm.Split(node, rank), "ptstore-node")
            self._control = self._keep(self.comm.Dup(), "ptstore-control")
            self._data = self._keep(self.comm.Dup(), "ptstore-data")
            self._peers = self._keep(self.comm.Dup(), "ptstore-peers")
            self.role_comm = self._keep(self.comm.Split(int(self.is_server), rank), "ptstore-role")
            self._leave = self._keep(self.role_comm.Dup(), "ptstore-leave")
            self._arenas = self._map_arenas()
        except PTStoreError:
            self._free_communicators()
            raise
        return hosts

    def _keep(self, comm: MPI.Comm, name: str) -> MPI.Intracomm:
        """Name ``comm`` and have it freed at the end."""
        assert isinstance(comm, MPI.Intracomm)
        comm.Set_name(name)
        self._comms.append(comm)
        return comm

    def _free_communicators(self) -> None:
        while self._comms:
            self._comms.pop().Free()

    def _watch_for_stalls(self) -> StallWatch:
        moment = time.strftime("%Y%m%dT%H%M%S")
        name = self.comm.bcast(f"ptstore-stall-{moment}-{os.getpid()}.txt", root=0)
        path = Path(self.config.stall_dir) / name
        return StallWatch(self.comm.Get_rank(), path, self.config.stall_timeout_s)

    def _meet(self) -> tuple[Topology, list[_Host]]:
        host_comm = self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.comm.Get_rank())
        lowest_rank = host_comm.allreduce(self.comm.Get_rank(), op=MPI.MIN)
        host_comm.Free()
        free_bytes, error = 0, None
        try:
            free_bytes = free_bytes_of(self.config.shared_memory_dir)
        except ConfigError as raised:
            error = str(raised)
        settings = msgspec.json.encode(self.config)
        mine = _Host(socket.gethostname(), lowest_rank, settings, free_bytes, error)
        hosts: list[_Host] = self.comm.allgather(mine)
        differing = [rank for rank, host in enumerate(hosts) if host.settings != hosts[0].settings]
        if differing:
            raise ConfigError(
                f"the settings must be equal on every rank; rank 0 has "
                f"{hosts[0].settings.decode()}, rank {differing[0]} has "
                f"{hosts[differing[0]].settings.decode()}"
            )
        for host in hosts:
            if host.error is not None:
                raise ConfigError(f"host {host.name}: {host.error}")
        nodes = [host.node for host in hosts]
        if self.config.virtual_node_count:
            nodes = split_nodes(nodes, self.config.virtual_node_count)
        topology = assign_roles(nodes, self.config.servers_per_node)
        for name in sorted({host.name for host in hosts}):
            servers = [r for r in topology.server_ranks if hosts[r].name == name]
            free_bytes = min(host.shared_memory_free_bytes for host in hosts if host.name == name)
            check_shared_memory(
                self.config, host=name, server_count=len(servers), free_bytes=free_bytes
            )
        return topology, hosts

    def _map_arenas(self) -> dict[ServerIndex, Arena]:
        """Make this node's arenas, map them on every rank of the node, take their names away."""
        arenas: dict[ServerIndex, Arena] = {}
        failure: str | None = None
        node = self.topology.nodes[self.comm.Get_rank()]
        for place, index in enumerate(self.topology.servers_of(node)):
            arena: Arena | None = None
            try:
                if self._node_comm.Get_rank() == place:
                    arena = Arena.create(self.config.shared_memory_dir, self.config.arena_bytes)
                path = self._node_comm.bcast(str(arena.path) if arena else None, root=place)
                if arena is None and path is not None:
                    arena = Arena.attach(path, self.config.arena_bytes)
            except (PTStoreError, OSError) as error:
                failure = str(error)
                if self._node_comm.Get_rank() == place and arena is None:
                    self._node_comm.bcast(None, root=place)
            if arena is not None:
                arenas[index] = arena
        failures = [text for text in self.comm.allgather(failure) if text]
        for arena in arenas.values():
            arena.unlink()
        if failures:
            for arena in arenas.values():
                arena.close()
            raise TransportError(failures[0])
        for arena in arenas.values():
            arena.start_populating()
        return arenas

    def _server_index(self) -> ServerIndex:
        return ServerIndex(self.topology.server_ranks.index(self.comm.Get_rank()))

    def _make_server(self, arena: Arena) -> MpiServer:
        return MpiServer(
            make_handler(
                self._server_index(),
                arena.memory,
                self.config,
                server_count=len(self.topology.server_ranks),
                tier=open_tier(self._server_index(), arena.memory, self.config),
            ),
            arena,
            control=self._control,
            peers=self._peers,
            data=self._data,
            server_ranks=self.topology.server_ranks,
            client_ranks=self.topology.client_ranks,
            near_ranks=self.topology.ranks_of(self.topology.nodes[self.comm.Get_rank()]),
            config=self.config,
            stall=self._stall,
            fetches=FetchServer(self._fetches, arena.memory) if self._fetches else None,
        )

    def _make_transport(self, hosts: list[_Host]) -> MpiClientTransport:
        host = hosts[self.comm.Get_rank()].name
        neighbours = sum(hosts[rank].name == host for rank in self.topology.client_ranks)
        fetcher: Fetcher
        if self._fetches is not None:
            fetcher = MessageFetcher(self._fetches)
        else:
            assert self._window is not None
            fetcher = WindowFetcher(self._window)
        return MpiClientTransport(
            {index: arena.memory for index, arena in self._arenas.items()},
            fetcher=fetcher,
            control=self._control,
            data=self._data,
            server_ranks=self.topology.server_ranks,
            config=self.config,
            copy_threads=self.config.copy_threads or automatic_copy_threads(neighbours),
            stall=self._stall,
            is_populated=lambda: all(arena.is_populated for arena in self._arenas.values()),
        )

    # -- close -----------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything. Servers have served until every client left; clients have left.

        Clients wait for each other without a deadline: one may still compute for hours. From
        then on a client gives the servers ``close_timeout_s``.
        """
        everybody = self.comm.Ibarrier()
        self._wait(self._leave.Ibarrier() if self.server is None else everybody)
        with abort_after(self.config.close_timeout_s, "close", evidence=self._stall.report):
            self._wait(everybody)
            if self.server is not None:
                self._drain_peers(self.server)
            self._wait(self.comm.Ibarrier())
            if self._window is not None:
                self._window.close(self._idle)
            if self.server is not None:
                self.server.close_tier()
            for arena in self._arenas.values():
                arena.close()
            self._free_communicators()
        self._watches.close()

    def _wait(self, request: MPI.Request) -> None:
        """Wait for the others while serving on, or taking what is still on its way here."""
        while not request.Test():
            if self.server is not None:
                self.server.step()
            elif self.transport is not None:
                self.transport.discard_replies()
            self._idle.wait()

    def _drain_peers(self, server: MpiServer) -> None:
        """Serve until no message between servers is under way anywhere.

        The servers sum what they sent, received and still have under way, round after round:
        it is over once a round finds nothing under way, as many received as sent, and the same
        as the round before.
        """
        before: list[int] = []
        while True:
            sent, received = server.peer_counts
            counts = np.array([sent, received, not server.is_quiet], dtype=np.int64)
            total = np.empty_like(counts)
            server.serve_until(self.role_comm.Iallreduce(counts, total, op=MPI.SUM).Test)
            now = total.tolist()
            if now == before and now[0] == now[1] and not now[2]:
                return
            before = now


def automatic_copy_threads(client_count: int, *, core_count: int | None = None) -> int:
    """Return the threads of a copy where ``client_count`` clients share a host's cores."""
    cores = len(os.sched_getaffinity(0)) if core_count is None else core_count
    return max(1, min(4, cores // client_count))
