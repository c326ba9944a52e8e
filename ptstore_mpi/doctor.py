"""``ptstore doctor``: open a real job, say what it runs on, and what is wrong with it.

Owns the asking; `ptstore_mpi.doctor_report` judges and prints. Moves no data but the probe's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

import mpi4py
import msgspec
from mpi4py import MPI

from ptstore_mpi import _native
from ptstore_mpi.arena import free_bytes_of
from ptstore_mpi.config import Config
from ptstore_mpi.doctor_report import (
    HostFacts,
    JobFacts,
    MpiFacts,
    Report,
    TierFacts,
    advise,
    render,
)
from ptstore_mpi.errors import PTStoreError
from ptstore_mpi.idle import lower_timer_slack, timer_slack_ns
from ptstore_mpi.job import Job, launch
from ptstore_mpi.tiers.file_system import examine, measure_speed
from ptstore_mpi.tiers.settings import TierSettings
from ptstore_mpi.topology import Topology
from ptstore_mpi.transport.mpi_job import automatic_copy_threads
from ptstore_mpi.transport.mpi_versions import netmod, one_line
from ptstore_mpi.transport.server_parts import tier_settings
from ptstore_mpi.transport.watchdog import before_abort
from ptstore_mpi.types import TransportChoice

__all__ = ["run"]

_LAST_WORDS_S = 2.0
_POLL_S = 1e-3
_TURN_S = 1.0  # far more than an abort takes
_LAST_TURN_S = 5.0

_SHARE_TRIED = 4  # of what is free is written at most
_LEAST_TRIED_BYTES = 8 << 20
_MOST_TRIED_BYTES = 256 << 20


class _RankFacts(msgspec.Struct, frozen=True):
    """What one rank knows of its host before anything is opened."""

    host: str
    core_count: int
    shared_memory_free_bytes: int
    timer_slack_ns: int | None
    crc_instructions: bool


def run(*, as_json: bool) -> int:
    """Examine the job that this process is a rank of; rank 0 prints. Collective.

    Returns
    -------
    0 when a job can be opened with these settings, 1 when not.
    """
    comm = MPI.COMM_WORLD
    mpi = _mpi_facts()
    before_abort(lambda why: _tell_alone(Report(usable=False, mpi=mpi, error=why), as_json=as_json))
    try:
        config, ranks = _prepare(comm)
        tiers = _tiers_of(config, ranks, comm)
        job = launch(config, comm=comm)
    except PTStoreError as error:
        report = Report(usable=False, mpi=mpi, error=str(error))
        return _tell(report, comm, as_json=as_json)
    topology, choice = job.topology, job.choice
    _end(job)
    facts = _job_facts(config, ranks, topology, choice=choice, tiers=tiers)
    report = Report(usable=True, mpi=mpi, job=facts, advice=advise(mpi, facts))
    return _tell(report, comm, as_json=as_json)


def _prepare(comm: MPI.Intracomm) -> tuple[Config, list[_RankFacts]]:
    """Return the settings and what every rank knows; the same error on every rank if one has it."""
    _meet(comm, seconds=None)
    error: PTStoreError | None = None
    config: Config | None = None
    mine: _RankFacts | None = None
    try:
        config = Config.load()
        lower_timer_slack()
        mine = _RankFacts(
            socket.gethostname(),
            len(os.sched_getaffinity(0)),
            free_bytes_of(config.shared_memory_dir),
            timer_slack_ns(),
            _native.crc32c_uses_hardware(),
        )
    except PTStoreError as raised:
        error = raised
    answers: list[tuple[_RankFacts | None, PTStoreError | None]] = comm.allgather((mine, error))
    for _, failure in answers:
        if failure is not None:
            raise failure
    assert config is not None
    return config, [facts for facts, _ in answers if facts is not None]


def _tiers_of(
    config: Config, ranks: list[_RankFacts], comm: MPI.Intracomm
) -> dict[str, list[TierFacts]]:
    """Return what the first rank of each host found of its file tiers, by host. Collective."""
    if not tier_settings(config):
        return {}
    host = ranks[comm.Get_rank()].host
    is_first = all(facts.host != host for facts in ranks[: comm.Get_rank()])
    found: list[TierFacts] = []
    error: PTStoreError | None = None
    try:
        for name, settings in tier_settings(config).items() if is_first else ():
            found.append(_tier_facts(name, settings, config))
    except PTStoreError as raised:
        error = raised
    _meet(comm, seconds=None)  # with naps: the others would take the cores of those who measure
    answers: list[tuple[list[TierFacts], PTStoreError | None]] = comm.allgather((found, error))
    for _, failure in answers:
        if failure is not None:
            raise failure
    hosts = [facts.host for facts in ranks]
    pairs = zip(hosts, answers, strict=True)
    return {name: facts for name, (facts, _) in pairs if facts}


def _tier_facts(name: str, settings: TierSettings, config: Config) -> TierFacts:
    """Examine the folder of a file tier of this host, and write and read a file there."""
    facts = examine(settings.directory, settings.direct)
    most_bytes = facts.free_bytes // _SHARE_TRIED
    speed = None
    if most_bytes >= _LEAST_TRIED_BYTES:
        with contextlib.suppress(OSError):  # jobs go on without a tier that fails, too
            speed = measure_speed(
                settings.directory,
                direct=facts.direct,
                most_bytes=min(most_bytes, _MOST_TRIED_BYTES),
            )
    return TierFacts(
        name=name,
        directory=settings.directory,
        file_system=facts.file_system,
        free_bytes=facts.free_bytes,
        wanted_bytes=settings.capacity_bytes * config.servers_per_node,
        direct=facts.direct,
        direct_reason=facts.direct_reason,
        write_bytes_per_s=None if speed is None else speed.write_bytes_per_s,
        read_bytes_per_s=None if speed is None else speed.read_bytes_per_s,
    )


def _end(job: Job) -> None:
    if job.is_server:
        job.serve()
    job.close()


def _mpi_facts() -> MpiFacts:
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    version = MPI.Get_library_version()
    return MpiFacts(
        library=one_line(version),
        standard=".".join(map(str, MPI.Get_version())),
        netmod=netmod(version, os.environ),
        thread_level_asked=str(mpi4py.rc.thread_level),
        thread_level=levels[MPI.Query_thread()],
        started_by_mpi4py="mpi4py.run" in sys.modules,
    )


def _job_facts(
    config: Config,
    ranks: list[_RankFacts],
    topology: Topology,
    *,
    choice: TransportChoice,
    tiers: dict[str, list[TierFacts]],
) -> JobFacts:
    hosts = []
    for name in dict.fromkeys(rank.host for rank in ranks):
        own = [rank for rank, facts in enumerate(ranks) if facts.host == name]
        facts = ranks[own[0]]
        clients = sum(rank in topology.client_ranks for rank in own)
        servers = sum(topology.is_server(rank) for rank in own)
        threads = automatic_copy_threads(max(clients, 1), core_count=facts.core_count)
        hosts.append(
            HostFacts(
                host=name,
                rank_count=len(own),
                core_count=facts.core_count,
                shared_memory_free_bytes=min(ranks[r].shared_memory_free_bytes for r in own),
                shared_memory_wanted_bytes=servers * config.arena_bytes,
                copy_threads=config.copy_threads or threads,
                timer_slack_ns=facts.timer_slack_ns,
                crc_instructions=facts.crc_instructions,
                tiers=tiers.get(name, []),
            )
        )
    return JobFacts(
        rank_count=len(ranks),
        node_count=topology.node_count,
        server_count=len(topology.server_ranks),
        client_count=len(topology.client_ranks),
        clientless_node_count=topology.node_count
        - len({topology.nodes[rank] for rank in topology.client_ranks}),
        virtual_node_count=config.virtual_node_count,
        transport=choice.name,
        transport_reason=choice.reason,
        is_fallback=choice.is_fallback,
        probe_s=choice.probe_s,
        probe_timeout_s=config.probe_timeout_s,
        probe_fault=config.probe_fault,
        verify=config.verify,
        idle=config.idle,
        shared_memory_dir=config.shared_memory_dir,
        hosts=hosts,
    )


def _tell(report: Report, comm: MPI.Intracomm, *, as_json: bool) -> int:
    before_abort(None)
    if comm.Get_rank() == 0:
        _print(report, as_json=as_json)
    # An exit code other than 0 ends all ranks: rank 0 speaks first. A rank may be missing.
    _meet(comm, seconds=_LAST_WORDS_S)
    return 0 if report.usable else 1


def _tell_alone(report: Report, *, as_json: bool) -> None:
    """Tell why the job is about to be aborted. Where many ranks are, only the lowest should."""
    time.sleep(min(MPI.COMM_WORLD.Get_rank() * _TURN_S, _LAST_TURN_S))
    _print(report, as_json=as_json)


def _print(report: Report, *, as_json: bool) -> None:
    text = msgspec.json.encode(report).decode() if as_json else render(report)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _meet(comm: MPI.Intracomm, *, seconds: float | None) -> None:
    request = comm.Ibarrier()
    until = None if seconds is None else time.monotonic() + seconds
    while not request.Test() and (until is None or time.monotonic() < until):
        time.sleep(_POLL_S)
