"""Start and end of a job: split the ranks into servers and clients, run, close together.

    def main(store): ...            # called on every client rank
    ptstore_mpi.run(main, config)   # collective over all ranks

`run` is the whole story for a script. The longer form is ``job = launch(config)``, then
``job.serve()`` where ``job.is_server`` and work on ``job.client`` elsewhere, then ``job.close()``.
With one rank in all the server runs inside the process, so a script needs no ``mpiexec``.
"""

from __future__ import annotations

import inspect
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

from mpi4py import MPI

from ptstore_mpi import _native
from ptstore_mpi.arena import Arena, free_bytes_of
from ptstore_mpi.cache.tier import Tier
from ptstore_mpi.client import Store
from ptstore_mpi.config import Config
from ptstore_mpi.errors import ConfigError, PTStoreError, TransportError
from ptstore_mpi.idle import Idle
from ptstore_mpi.protocol.context import ClientContext, Ledger
from ptstore_mpi.topology import Topology
from ptstore_mpi.transport.leftovers import unlink_mpi_names
from ptstore_mpi.transport.local import LocalTransport
from ptstore_mpi.transport.mpi_job import MpiJob, automatic_copy_threads
from ptstore_mpi.transport.mpi_versions import one_line
from ptstore_mpi.transport.server_parts import check_shared_memory, make_handler, open_tier
from ptstore_mpi.transport.watchdog import abort
from ptstore_mpi.types import ServerIndex, TransportChoice, whole_pages

__all__ = ["Job", "launch", "run"]

T = TypeVar("T")

_ONE_VOICE_S = 2.0

unlink_mpi_names()  # MPI has just started: a program may be aborted before it opens a job


class Job:
    """This rank's part of a running job. `launch` makes it; `close` is collective.

    Attributes
    ----------
    client
        The store, on a client rank; None on a server.
    topology
        Roles of all ranks.
    choice
        What carries the bytes, and why.
    """

    def __init__(self, config: Config, comm: MPI.Comm) -> None:
        self._mpi: MpiJob | None = None
        self._self_comm: MPI.Comm | None = None
        self.client: Store | None = None
        unlink_mpi_names()  # again: a program may start MPI itself
        if comm.Get_size() == 1:
            self.topology = Topology((0,), (0,), (0,))
            self._self_comm = comm.Dup()
            try:
                self.client = _local_store(config, self.topology, self._self_comm)
            except BaseException:
                self._self_comm.Free()
                raise
            self.choice = self.client.transport_choice
            return
        self._mpi = MpiJob(config, comm)
        self.topology = self._mpi.topology
        self.choice = self._mpi.choice
        if self._mpi.transport is not None:
            rank = self._mpi.comm.Get_rank()
            self.client = Store(
                self._mpi.transport,
                _context(config, self.topology, rank),
                topology=self.topology,
                comm=self._mpi.role_comm,
                choice=self.choice,
            )

    @property
    def is_server(self) -> bool:
        """Whether this rank serves."""
        return self.client is None

    def serve(self) -> None:
        """Serve until every client has left. Collective with the clients' work and close.

        Raises
        ------
        TransportError
            This rank is a client.
        """
        server = self._mpi.server if self._mpi is not None else None
        if server is None:
            raise TransportError("serve: expected a rank that is a server, this one is a client")
        server.serve()

    def close(self) -> None:
        """End the job together. Collective; clients leave first, servers serve until then."""
        if self.client is not None:
            self.client.close()
        if self._mpi is not None:
            self._mpi.close()
            self._mpi = None
        if self._self_comm is not None:
            self._self_comm.Free()
            self._self_comm = None


def launch(config: Config | None = None, *, comm: MPI.Comm | None = None) -> Job:
    """Open a job over the ranks of ``comm``. Collective.

    Parameters
    ----------
    config
        Settings; None on every rank: `Config.load`. Equal on every rank.
    comm
        Ranks of the job, default ``COMM_WORLD``; it is duplicated.

    Raises
    ------
    ConfigError
        On every rank: settings that differ or cannot work on these ranks.
    TypeError, ValueError
        ``config`` is not a `Config`, or ``comm`` no communicator that this rank is in.
    """
    comm = _checked(comm)
    config = _load_together(comm) if config is None else config
    if not isinstance(config, Config):
        raise TypeError(f"config: expected a Config, got {config!r:.80}")
    return Job(config, comm)


def run(
    main: Callable[[Store], T], config: Config | None = None, *, comm: MPI.Comm | None = None
) -> T | None:
    """Run ``main(store)`` on every client rank while the servers serve. Collective.

    An exception aborts the whole job with rank and phase: it never enters the collective close,
    where the other ranks would wait for ever. With one rank it is simply raised.

    Parameters
    ----------
    main
        Called once on every client rank.
    config, comm
        As in `launch`.

    Returns
    -------
    What ``main`` returned, on a client; None on a server.

    Raises
    ------
    TypeError
        ``main`` is not a function. With one rank also whatever `launch` and ``main`` raise.
    """
    if not callable(main) or inspect.iscoroutinefunction(main):
        raise TypeError(f"main: expected a function of the store, got {main!r:.80}")
    comm = _checked(comm)
    if comm.Get_size() == 1:
        return _run_alone(main, config, comm)
    phase = "open"
    result: T | None = None
    try:
        job = launch(config, comm=comm)
        leaving: SystemExit | None = None
        if job.client is not None:
            phase = "main"
            try:
                result = main(job.client)
            except SystemExit as error:
                if error.code:
                    raise
                leaving = error  # sys.exit(0): an orderly end
        else:
            phase = "serve"
            job.serve()
        phase = "close"
        job.close()
    except BaseException as error:
        _abort_job(error, phase, rank=comm.Get_rank())
    if leaving is not None:
        raise leaving
    return result


def _run_alone(main: Callable[[Store], T], config: Config | None, comm: MPI.Comm) -> T:
    job = launch(config, comm=comm)
    assert job.client is not None
    try:
        return main(job.client)
    finally:
        job.close()


def _load_together(comm: MPI.Comm) -> Config:
    """Return the settings; where a rank has none, raise its error on every rank."""
    config: Config | None = None
    error: ConfigError | None = None
    try:
        config = Config.load()
    except ConfigError as raised:
        error = raised
    Idle(Config()).until(comm.Ibarrier().Test)  # the ranks may start seconds apart
    for failure in comm.allgather(error):
        if failure is not None:
            raise failure
    assert config is not None
    return config


def _checked(comm: MPI.Comm | None) -> MPI.Comm:
    if comm is None:
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm: expected a communicator, got {comm!r:.80}")
    if comm == MPI.COMM_NULL:
        raise ValueError("comm: expected a communicator that this rank is in, got COMM_NULL")
    return comm


def _abort_job(error: BaseException, phase: str, *, rank: int) -> NoReturn:
    sys.stdout.flush()
    if phase == "open" and isinstance(error, PTStoreError):
        if rank:  # nearly always every rank has the same error: let rank 0 tell it once
            time.sleep(_ONE_VOICE_S)
        abort(f"cannot open the job: {error}")
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        said = "" if isinstance(error.code, int) else f": {error.code}"
        abort(f"sys.exit in phase {phase!r}{said}; the job is aborted", code=code)
    traceback.print_exception(error)
    abort(f"failed in phase {phase!r}; the job is aborted")


def _local_store(config: Config, topology: Topology, comm: MPI.Comm) -> Store:
    free_bytes = free_bytes_of(config.shared_memory_dir)
    check_shared_memory(config, host="here", server_count=1, free_bytes=free_bytes)
    arena = Arena.create(config.shared_memory_dir, config.arena_bytes)
    arena.unlink()
    tier: Tier | None = None
    try:
        server = ServerIndex(0)
        tier = open_tier(server, arena.memory, config)
        transport = LocalTransport(
            make_handler(server, arena.memory, config, server_count=1, tier=tier),
            arena,
            staging_bytes=config.staging_bytes,
            copy_threads=config.copy_threads or automatic_copy_threads(1),
        )
    except BaseException:
        if tier is not None:
            tier.close()
        arena.close()
        raise
    arena.start_populating()
    return Store(
        transport,
        _context(config, topology, 0),
        topology=topology,
        comm=comm,
        choice=TransportChoice(
            "local", "one rank: the server runs in process", one_line(MPI.Get_library_version())
        ),
    )


def _context(config: Config, topology: Topology, rank: int) -> ClientContext:
    staging = _native.RegionAllocator(whole_pages(config.staging_bytes))
    return ClientContext(
        config,
        Ledger(rank, staging),
        server_count=len(topology.server_ranks),
        near=topology.servers_of(topology.nodes[rank]),
    )
