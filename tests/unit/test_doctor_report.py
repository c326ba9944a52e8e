"""What the doctor says about a job that has one problem, and about one that has none."""

from __future__ import annotations

import msgspec
import pytest

from ptstore_mpi import cli
from ptstore_mpi.doctor_report import (
    HostFacts,
    JobFacts,
    MpiFacts,
    Report,
    TierFacts,
    advise,
    render,
)

MPI = MpiFacts(
    library="MPICH 5.0.2",
    standard="5.0",
    netmod="ofi",
    thread_level_asked="multiple",
    thread_level="multiple",
    started_by_mpi4py=True,
)
HOST = HostFacts(
    host="n1",
    rank_count=4,
    core_count=8,
    shared_memory_free_bytes=100 << 30,
    shared_memory_wanted_bytes=2 << 30,
    copy_threads=2,
    timer_slack_ns=1000,
    crc_instructions=True,
)
JOB = JobFacts(
    rank_count=8,
    node_count=2,
    server_count=2,
    client_count=6,
    clientless_node_count=0,
    virtual_node_count=0,
    transport="mpi",
    transport_reason="probed: MPI_Get works",
    is_fallback=False,
    probe_s=0.01,
    probe_timeout_s=5.0,
    probe_fault="none",
    verify="remote",
    idle="adaptive",
    shared_memory_dir="/dev/shm",
    hosts=[HOST],
)


TIER = TierFacts(
    name="ssd",
    directory="/local/scratch",
    file_system="xfs",
    free_bytes=900 << 30,
    wanted_bytes=500 << 30,
    direct=True,
    direct_reason="O_DIRECT works",
    write_bytes_per_s=2.5e9,
    read_bytes_per_s=3.5e9,
)


def with_tier(**changes):
    tier = msgspec.structs.replace(TIER, **changes)
    return msgspec.structs.replace(JOB, hosts=[msgspec.structs.replace(HOST, tiers=[tier])])


def test_a_tier_is_told_where_there_is_one():
    job = with_tier()
    assert advise(MPI, job) == []
    text = render(Report(usable=True, mpi=MPI, job=job))
    for part in (
        "tier ssd",
        "500.00 GiB of 900.00 GiB free in /local/scratch (xfs)",
        "past the page cache: O_DIRECT works",
        "writes 2.50 GB/s and reads 3.50 GB/s",
    ):
        assert part in text
    assert "tier" not in render(Report(usable=True, mpi=MPI, job=JOB))


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"free_bytes": 100 << 30}, "ssd_bytes asks for 500.00 GiB, but /local/scratch has 100.00"),
        ({"file_system": "tmpfs"}, "/local/scratch is memory (tmpfs)"),
    ],
)
def test_advice_about_a_tier(changes, advice):
    (line,) = advise(MPI, with_tier(**changes))
    assert advice in line


def test_nothing_to_advise():
    assert advise(MPI, JOB) == []
    text = render(Report(usable=True, mpi=MPI, job=JOB))
    for part in ("MPICH 5.0.2", "8 on 2 node(s): 2 server(s), 6 client(s)", "probe: 10.0 ms",
                 "2.00 GiB wanted, 100.00 GiB free", "1 us", "usable         yes"):  # fmt: skip
        assert part in text
    assert "advice" not in text


@pytest.mark.parametrize(
    ("part", "changes", "advice"),
    [
        ("job", {"rank_count": 1, "virtual_node_count": 9}, "virtual_node_count can work"),
        ("job", {"clientless_node_count": 2}, "2 node(s) only serve"),
        ("mpi", {"started_by_mpi4py": False}, "python -m mpi4py"),
        ("mpi", {"thread_level": "serialized"}, "thread level serialized"),
        ("job", {"transport": "p2p", "is_fallback": True}, 'set transport = "p2p"'),
        ("job", {"probe_s": 2.6}, "raise probe_timeout_s"),
        ("job", {"probe_fault": "hang"}, "unset it"),
        ("job", {"virtual_node_count": 2}, "not real"),
        ("job", {"verify": "off"}, 'set verify = "remote"'),
        ("host", {"shared_memory_free_bytes": 2 << 30}, "lower memory_bytes"),
        ("host", {"timer_slack_ns": 50_000}, "50 us too long"),
        ("host", {"crc_instructions": False}, "CRC-32C"),
    ],
)
def test_one_line_for_each_problem(part, changes, advice):
    mpi = msgspec.structs.replace(MPI, **(changes if part == "mpi" else {}))
    host = msgspec.structs.replace(HOST, **(changes if part == "host" else {}))
    job = msgspec.structs.replace(JOB, **{"hosts": [host], **(changes if part == "job" else {})})
    (line,) = advise(mpi, job)
    assert advice in line
    assert f"advice         {line}" in render(Report(usable=True, mpi=mpi, job=job, advice=[line]))


def test_spinning_needs_cores():
    crowded = msgspec.structs.replace(HOST, rank_count=9)
    spinning = msgspec.structs.replace(JOB, idle="spin", hosts=[HOST, crowded])
    (line,) = advise(MPI, spinning)
    assert "9 ranks spin on 8 core(s)" in line
    assert not advise(MPI, msgspec.structs.replace(spinning, idle="adaptive"))


@pytest.mark.parametrize("argv", [[], ["nurse"], ["doctor", "--cure"]])
def test_a_wrong_command_line(argv, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(argv)
    assert raised.value.code == 2
    assert "usage: ptstore" in capsys.readouterr().err
