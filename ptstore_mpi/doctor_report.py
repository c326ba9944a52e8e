"""What ``ptstore doctor`` found out: the facts, advice on each problem, and both as text.

Pure: no MPI, no clock, no file.
"""

from __future__ import annotations

import msgspec

__all__ = ["HostFacts", "JobFacts", "MpiFacts", "Report", "TierFacts", "advise", "render"]

_ROOM_SHARE = 0.8
_PROBE_SHARE = 0.5
_LONG_SLACK_NS = 10_000
_GIB = 1 << 30
_MEMORY_TYPES = frozenset({"ramfs", "tmpfs"})


class MpiFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The MPI that this runs on. Thread levels by name; ``netmod`` says so where it is unknown."""

    library: str
    standard: str
    netmod: str
    thread_level_asked: str
    thread_level: str
    started_by_mpi4py: bool


class TierFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A file tier of one host: its folder, what was found there, and how fast one thread was.

    ``wanted_bytes`` is what the files of the host's servers may take together. Speeds are None
    where there is too little room to try, or a trial failed.
    """

    name: str
    directory: str
    file_system: str
    free_bytes: int
    wanted_bytes: int
    direct: bool
    direct_reason: str
    write_bytes_per_s: float | None
    read_bytes_per_s: float | None


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One host: ranks and usable cores, room for arenas, threads of each client's copies."""

    host: str
    rank_count: int
    core_count: int
    shared_memory_free_bytes: int
    shared_memory_wanted_bytes: int
    copy_threads: int
    timer_slack_ns: int | None
    crc_instructions: bool
    tiers: list[TierFacts] = []


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The job that was opened: its roles, its transport, and the settings that matter here."""

    rank_count: int
    node_count: int
    server_count: int
    client_count: int
    clientless_node_count: int
    virtual_node_count: int
    transport: str
    transport_reason: str
    is_fallback: bool
    probe_s: float | None
    probe_timeout_s: float
    probe_fault: str
    verify: str
    idle: str
    shared_memory_dir: str
    hosts: list[HostFacts]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything; ``job`` is None, and ``error`` is not, where the job cannot be opened."""

    usable: bool
    mpi: MpiFacts
    job: JobFacts | None = None
    error: str | None = None
    advice: list[str] = []


def advise(mpi: MpiFacts, job: JobFacts) -> list[str]:
    """Return one line for each problem."""
    lines = []
    if job.rank_count == 1:
        lines.append(
            "one rank tells nothing about MPI, nor whether transport, servers_per_node and "
            "virtual_node_count can work: start me as you start your jobs, such as "
            "mpiexec -n 4 python -m mpi4py -m ptstore_mpi doctor"
        )
    elif not mpi.started_by_mpi4py:
        lines.append(
            "start jobs with python -m mpi4py: otherwise an uncaught exception on one rank hangs "
            "the others"
        )
    if mpi.thread_level != "multiple":
        lines.append(
            f"MPI gives thread level {mpi.thread_level}: a watchdog may not reach MPI_Abort and "
            f"then ends its own process only; ask for multiple (mpi4py.rc.thread_level)"
        )
    return (
        lines + _advise_transport(job) + [line for h in job.hosts for line in _advise_host(job, h)]
    )


def _advise_transport(job: JobFacts) -> list[str]:
    lines = []
    if job.is_fallback:
        lines.append(
            f"transport {job.transport}: {job.transport_reason}; set transport = "
            f'"{job.transport}" to skip the probe from now on'
        )
    elif job.probe_s is not None and job.probe_s > _PROBE_SHARE * job.probe_timeout_s:
        lines.append(
            f"the probe took {job.probe_s:.2f} s of the {job.probe_timeout_s:g} s it may take: "
            f"raise probe_timeout_s"
        )
    if job.probe_fault != "none":
        lines.append(f"probe_fault = {job.probe_fault} is for tests: unset it")
    if job.clientless_node_count:
        lines.append(
            f"{job.clientless_node_count} node(s) only serve, without a client: start more ranks "
            f"per node"
        )
    if job.virtual_node_count and job.rank_count > 1:
        lines.append(
            f"virtual_node_count = {job.virtual_node_count}: the nodes are not real, and rates "
            f"between them mean nothing"
        )
    if job.verify == "off":
        lines.append('bytes that cross a wire are not checked: set verify = "remote"')
    return lines


def _advise_host(job: JobFacts, host: HostFacts) -> list[str]:
    lines = []
    wanted, free = host.shared_memory_wanted_bytes, host.shared_memory_free_bytes
    if wanted > _ROOM_SHARE * free:
        lines.append(
            f"host {host.host}: the arenas want {_gib(wanted)} of the {_gib(free)} that are free "
            f"in {job.shared_memory_dir}; lower memory_bytes or clear it"
        )
    if job.idle == "spin" and host.rank_count > host.core_count:
        lines.append(
            f"host {host.host}: {host.rank_count} ranks spin on {host.core_count} core(s); set "
            f'idle = "adaptive"'
        )
    if host.timer_slack_ns is not None and host.timer_slack_ns > _LONG_SLACK_NS:
        lines.append(
            f"host {host.host}: naps last {host.timer_slack_ns / 1000:g} us too long and the "
            f"system does not let that be changed: expect slower matches"
        )
    if not host.crc_instructions and job.verify != "off":
        lines.append(
            f"host {host.host}: its CPU has no CRC-32C instructions: checksums bound the loads"
        )
    return lines + [line for tier in host.tiers for line in _advise_tier(host, tier)]


def _advise_tier(host: HostFacts, tier: TierFacts) -> list[str]:
    lines = []
    if tier.wanted_bytes > tier.free_bytes:
        lines.append(
            f"host {host.host}: {tier.name}_bytes asks for {_gib(tier.wanted_bytes)}, but "
            f"{tier.directory} has {_gib(tier.free_bytes)} free: the tier ends there"
        )
    if tier.file_system in _MEMORY_TYPES:
        lines.append(
            f"host {host.host}: {tier.directory} is memory ({tier.file_system}): give what it "
            f"takes to memory_bytes instead, or name a folder on a disk"
        )
    return lines


def render(report: Report) -> str:
    """Return a report as lines of text."""
    mpi, job = report.mpi, report.job
    lines = [
        f"MPI            {mpi.library} (MPI {mpi.standard})",
        f"netmod         {mpi.netmod}",
        f"thread level   {mpi.thread_level} (asked for: {mpi.thread_level_asked})",
    ]
    if job is not None:
        probe = "not probed" if job.probe_s is None else f"probe: {1000 * job.probe_s:.1f} ms"
        lines += [
            f"ranks          {job.rank_count} on {job.node_count} node(s): {job.server_count} "
            f"server(s), {job.client_count} client(s)",
            f"transport      {job.transport}: {job.transport_reason} ({probe})",
            f"verify         {job.verify}",
        ]
        lines += [line for host in job.hosts for line in _render_host(job, host)]
    if report.error is not None:
        lines.append(f"NOT USABLE     {report.error}")
    else:
        lines.append("usable         yes")
    lines += [f"advice         {line}" for line in report.advice]
    return "\n".join(lines)


def _render_host(job: JobFacts, host: HostFacts) -> list[str]:
    slack = "not known" if host.timer_slack_ns is None else f"{host.timer_slack_ns / 1000:g} us"
    return [
        f"host           {host.host}: {host.rank_count} rank(s), {host.core_count} core(s)",
        f"  shared memory  {_gib(host.shared_memory_wanted_bytes)} wanted, "
        f"{_gib(host.shared_memory_free_bytes)} free in {job.shared_memory_dir}",
        f"  copies         {host.copy_threads} thread(s) per client",
        f"  checksums      {'CRC-32C instructions' if host.crc_instructions else 'plain code'}",
        f"  timer slack    {slack}",
        *(line for tier in host.tiers for line in _render_tier(tier)),
    ]


def _render_tier(tier: TierFacts) -> list[str]:
    direct = "past the page cache" if tier.direct else "through the page cache"
    speed = "not tried: too little room, or it failed"
    if tier.write_bytes_per_s is not None and tier.read_bytes_per_s is not None:
        write, read = tier.write_bytes_per_s / 1e9, tier.read_bytes_per_s / 1e9
        speed = f"one thread writes {write:.2f} GB/s and reads {read:.2f} GB/s"
    return [
        f"  tier {tier.name:<9} {_gib(tier.wanted_bytes)} of {_gib(tier.free_bytes)} free in "
        f"{tier.directory} ({tier.file_system}), {direct}: {tier.direct_reason}",
        f"                 {speed}",
    ]


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
