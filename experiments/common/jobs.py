"""Several stores for the same clients: one job of its own for each pooled system, all at once.

Owns who serves what. On every node the lowest ranks serve, ``servers_per_node`` for each system in
the order of the systems, and all others are clients, which take part in every job. Each job has
its own servers, arenas and transport. With one system this is `ptstore_mpi.run`, and in one process
every store is within it. Never knows what the clients do.

::

    ranks of a node, systems a and b:     0         1         2        3
                                          serves a  serves b  client   client
    job of a:                             x                   x        x
    job of b:                                       x         x        x
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec
from mpi4py import MPI

import ptstore_mpi
from experiments.common import meeting
from ptstore_mpi import Config, ConfigError, Store
from ptstore_mpi.arena import free_bytes_of
from ptstore_mpi.topology import assign_roles, split_nodes
from ptstore_mpi.transport.leftovers import unlink_mpi_names

__all__ = ["Member", "SystemJob", "run_clients"]

T = TypeVar("T")

unlink_mpi_names()  # MPI has just started: a run that is refused never opens a job, which would


@dataclass(frozen=True, slots=True)
class SystemJob:
    """The job of one pooled system.

    Attributes
    ----------
    config
        Its settings; of what says where nodes and servers are, the same for all systems.
    within_node
        Whether every node has a job by itself: nothing is pooled beyond it.
    """

    config: Config
    within_node: bool = False

    def settings(self) -> Config:
        """Return the settings of the job over its own ranks: those of one node are a whole."""
        if self.within_node:
            return msgspec.structs.replace(self.config, virtual_node_count=0)
        return self.config


@dataclass(frozen=True, slots=True)
class Member:
    """One client of the run.

    Attributes
    ----------
    comm
        Communicator of all clients.
    rank, count
        This client among them, from 0, and how many there are.
    node
        Its node, from 0.
    stores
        Its store by name of the system.
    """

    comm: Any
    rank: int
    count: int
    node: int
    stores: Mapping[str, Store]


def run_clients(main: Callable[[Member], T], jobs: Mapping[str, SystemJob]) -> T | None:
    """Run ``main`` on every client while the servers of all jobs serve. Collective over all ranks.

    Parameters
    ----------
    main
        Called once on every client. An exception ends all jobs, as with `ptstore_mpi.run`.
    jobs
        By name of the system, at least one; equal on every rank.

    Returns
    -------
    What ``main`` returned, on a client; None on a server.

    Raises
    ------
    SystemExit
        2 on every rank: there are too few ranks or too little memory. Rank 0 has said so.
    """
    if MPI.COMM_WORLD.Get_size() == 1:
        return _nested(main, jobs, dict.fromkeys(jobs))
    if len(jobs) == 1 and not next(iter(jobs.values())).within_node:
        return _nested(main, jobs, dict.fromkeys(jobs))
    return _run_dealt(main, jobs)


def _nested(
    main: Callable[[Member], T],
    jobs: Mapping[str, SystemJob],
    comms: Mapping[str, MPI.Comm | None],
    *,
    clients: MPI.Comm | None = None,
    node: int | None = None,
) -> T | None:
    """Open the jobs one within the other, so that the last one opened is closed first."""
    stores: dict[str, Store] = {}

    def enter(left: list[str]) -> T | None:
        if not left:
            first = next(iter(stores.values()))
            comm = first.comm if clients is None else clients
            place = first.node if node is None else node
            return main(Member(comm, comm.Get_rank(), comm.Get_size(), place, stores))

        def opened(store: Store) -> T | None:
            stores[left[0]] = store
            return enter(left[1:])

        return ptstore_mpi.run(opened, jobs[left[0]].settings(), comm=comms[left[0]])

    return enter(list(jobs))


def _run_dealt(main: Callable[[Member], T], jobs: Mapping[str, SystemJob]) -> T | None:
    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    try:
        nodes, serves = _deal_roles(world, jobs)
    except ConfigError as error:
        _refuse(world, error)
    nodes_with_clients = {node for node, name in zip(nodes, serves, strict=True) if name is None}
    comms: dict[str, MPI.Comm | None] = {}
    for name, job in jobs.items():
        color = nodes[rank] if job.within_node else 0
        takes_part = serves[rank] in (None, name)
        if job.within_node and nodes[rank] not in nodes_with_clients:
            takes_part = False
        split = world.Split(color if takes_part else MPI.UNDEFINED, rank)
        comms[name] = split if takes_part else None
    clients = world.Split(0 if serves[rank] is None else MPI.UNDEFINED, rank)
    result = None
    own = serves[rank]
    if own is None:
        result = _nested(main, jobs, comms, clients=clients, node=nodes[rank])
        clients.Free()
    elif comms[own] is not None:
        ptstore_mpi.run(_serves_only, jobs[own].settings(), comm=comms[own])
    for comm in comms.values():
        if comm is not None:
            comm.Free()
    return result


def _deal_roles(
    world: MPI.Intracomm, jobs: Mapping[str, SystemJob]
) -> tuple[tuple[int, ...], list[str | None]]:
    """Return the node of each rank, and the system that it serves; None for a client. Collective.

    Raises
    ------
    ConfigError
        On every rank: a node has too few ranks or too little memory.
    """
    config = next(iter(jobs.values())).config
    meeting.meet(world)  # the ranks may start seconds apart
    host_comm = world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())
    lowest_rank = host_comm.allreduce(world.Get_rank(), op=MPI.MIN)
    host_comm.Free()
    try:
        free_bytes = free_bytes_of(config.shared_memory_dir)
    except ConfigError:
        free_bytes = 0  # the first job to be opened says what is wrong with the folder
    found = world.allgather((lowest_rank, socket.gethostname(), free_bytes))
    nodes = [node for node, _, _ in found]
    if config.virtual_node_count:
        nodes = split_nodes(nodes, config.virtual_node_count)
    names = [name for name in jobs for _ in range(config.servers_per_node)]
    try:
        topology = assign_roles(nodes, len(names))
    except ConfigError:
        raise ConfigError(_too_few(nodes, names)) from None
    serves: list[str | None] = [None] * len(nodes)
    for node in range(topology.node_count):
        for server_rank, name in zip(topology.ranks_of(node), names, strict=False):
            serves[server_rank] = name
    _check_memory(found, serves, config)
    return topology.nodes, serves


def _too_few(nodes: list[int], names: list[str]) -> str:
    sizes = [nodes.count(node) for node in dict.fromkeys(nodes)]
    each = len(names) + 1
    return (
        f"expected at least {each} ranks on each node, {each * len(sizes)} on {len(sizes)} "
        f"node(s): a server for each of {', '.join(names)}, and a client; given "
        f"{len(nodes)}: {', '.join(map(str, sizes))} by node"
    )


def _check_memory(
    found: list[tuple[int, str, int]], serves: list[str | None], config: Config
) -> None:
    """Each job looks for its own arenas alone, and before the others have filled theirs."""
    if not any(free for _, _, free in found):
        return
    for host in sorted({name for _, name, _ in found}):
        here = [place for place, (_, name, _) in enumerate(found) if name == host]
        wanted = config.arena_bytes * sum(serves[place] is not None for place in here)
        free_bytes = min(found[place][2] for place in here)
        if wanted > free_bytes:
            raise ConfigError(
                f"host {host}: the servers of all systems want arenas of {wanted} bytes in "
                f"{config.shared_memory_dir}, but there and in memory {free_bytes} bytes are free; "
                f"each system has the memory of a node to itself: ask for less, or fewer systems"
            )


def _refuse(world: MPI.Intracomm, error: ConfigError) -> NoReturn:
    if world.Get_rank() == 0:
        print(error, file=sys.stderr, flush=True)
    meeting.meet(world)  # a rank that leaves with an error ends those that still speak
    raise SystemExit(2)


def _serves_only(store: Store) -> NoReturn:
    raise AssertionError("a rank that serves was given a store")
