"""How close is the store to what memory, wire and messages allow? Ours against a reference.

    python -m experiments.exp_microbench local                         # one process
    mpiexec -n 4 python -m mpi4py -m experiments.exp_microbench remote     # two nodes
    mpiexec -n 3 python -m mpi4py -m experiments.exp_microbench messages   # any number of servers
    make bench                                                         # all of them, then a report

Driver = parse -> run -> record. Each part measures ours and a reference in turn within one run;
every repeat goes into HDF5. Never averages (that is `experiments.report`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import record
from experiments.common import meeting, provenance
from experiments.common.options import MOST_THREADS, whole_number
from experiments.microbench.measure import MEASUREMENTS, Measurement

EXPERIMENT = "exp_microbench"
PARTS = ("local", "remote", "messages", "alone")
INDEXED_BLOCKS = (10_000, 1_000_000)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part. Collective over all ranks of the job."""
    options = _parser().parse_args(argv)
    try:
        record.require_folder(Path(options.output) / EXPERIMENT)
    except record.RecordError as error:
        print(error, file=sys.stderr)
        return 2
    if options.part in ("local", "alone") and not _is_one_process():
        print(f"{options.part}: expected one process, no mpiexec", file=sys.stderr)
        return 2
    return {"local": _local, "remote": _remote, "messages": _messages, "alone": _alone}[
        options.part
    ](options)


def _is_one_process() -> bool:
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.Get_size() == 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="exp_microbench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--repeats", type=whole_number(1, 10_000), default=9, metavar="N", help="default 9"
    )
    parser.add_argument(
        "--threads",
        type=whole_number(1, MOST_THREADS),
        default=1,
        metavar="N",
        help="threads of copies; default 1",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the smallest size of everything only: a first try"
    )
    parser.add_argument("--wire", default="", help="a name for what carries bytes between nodes")
    parser.add_argument(
        "--run", default="", help="a name that several parts share, to be reported together"
    )
    parser.add_argument("--output", default="results", metavar="FOLDER", help="default results")
    return parser


def _local(options: argparse.Namespace) -> int:
    import ptstore_mpi
    from experiments.microbench import local

    config = ptstore_mpi.Config.load(
        replica_admission="never",
        memory_bytes=local.MEMORY_BYTES,
        copy_threads=options.threads,
        store_timeout_s=120.0,
        eviction="none",
    )

    def work(store: Any) -> None:
        sizes = local.SIZES_BYTES[: 1 if options.quick else None]
        found = local.measure(
            store, sizes_bytes=sizes, repeats=options.repeats, thread_count=options.threads
        )
        _record(store, options, config, found)

    ptstore_mpi.run(work, config)
    return 0


def _alone(options: argparse.Namespace) -> int:
    import ptstore_mpi
    from experiments.microbench import alone, serving

    config = ptstore_mpi.Config.load(memory_bytes="64MiB", replica_admission="never")
    start_up = list(alone.measure_start_up(repeats=min(options.repeats, 3)))

    def work(store: Any) -> None:
        hashing = alone.measure_hashing(store, repeats=options.repeats)
        probing = alone.measure_probing(repeats=options.repeats)
        messages = serving.measure(repeats=options.repeats)
        _record(store, options, config, iter([*start_up, *hashing, *probing, *messages]))

    ptstore_mpi.run(work, config)
    return 0


def _remote(options: argparse.Namespace) -> int:
    from mpi4py import MPI

    import ptstore_mpi
    from experiments.microbench import remote

    config = ptstore_mpi.Config.load(
        replica_admission="never",
        memory_bytes=remote.MEMORY_BYTES,
        segment_tokens=remote.SEGMENT_TOKENS,
        placement="local",
        copy_threads=options.threads,
    )
    job = ptstore_mpi.launch(config)
    if job.topology.node_count < 2:
        if MPI.COMM_WORLD.Get_rank() == 0:
            print("remote: expected at least 2 nodes, got 1 (see README)", file=sys.stderr)
        _close(job)
        return 2
    window = remote.RawWindow(MPI.COMM_WORLD, is_server=job.is_server)
    if job.client is not None:
        sizes = remote.SIZES_BYTES[: 1 if options.quick else None]
        measurements = list(
            remote.measure(job.client, window, sizes_bytes=sizes, repeats=options.repeats)
        )
        _record(job.client, options, config, iter(measurements))
    _close(job)
    window.free()
    return 0


def _messages(options: argparse.Namespace) -> int:
    from mpi4py import MPI

    import ptstore_mpi
    from experiments.microbench import messages

    config = ptstore_mpi.Config.load(
        replica_admission="never",
        memory_bytes=messages.MEMORY_BYTES,
        placement="random",
        store_timeout_s=60.0,
    )
    comm = MPI.COMM_WORLD
    last = comm.Get_size() - 1
    raw = None
    if comm.Get_rank() in (0, last) and last:
        raw = messages.measure_raw(comm, client=last, server=0)
    job = ptstore_mpi.launch(config)
    if job.client is not None:
        measurements: list[Measurement] = []
        if job.client.client_rank == job.client.client_count - 1:
            for blocks in INDEXED_BLOCKS[: 1 if options.quick else None]:
                measurements += messages.measure(
                    job.client, indexed_blocks=blocks, repeats=options.repeats, raw=raw
                )
        _record(job.client, options, config, iter(measurements))
    _close(job)
    return 0


def _close(job: Any) -> None:
    if job.is_server:
        job.serve()
    job.close()


def _record(
    store: Any, options: argparse.Namespace, config: Any, measurements: Iterator[Measurement]
) -> None:
    """Write what any client measured. Collective over the clients."""
    started_utc = provenance.utc_now()
    hosts = meeting.gather(store.comm, provenance.describe_host())
    rows = meeting.gather(store.comm, [each.row() for each in measurements])
    if hosts is None or rows is None:
        return
    settings = {name: getattr(config, name) for name in config.__struct_fields__}
    attributes = provenance.collect(
        config={"experiment": vars(options), "store": settings},
        seed=0,
        clients=hosts,
        started_utc=started_utc,
    )
    attributes |= {
        "experiment": EXPERIMENT,
        "part": options.part,
        "run": options.run or started_utc,
        "wire": options.wire,
        "transport": store.transport_choice.name,
        "transport_reason": store.transport_choice.reason,
    }
    stem = f"{started_utc}_{provenance.job_id()}_{options.part}"
    with record.ResultFile(Path(options.output) / EXPERIMENT, stem, attributes) as file:
        file.append(MEASUREMENTS, [row for client_rows in rows for row in client_rows])
        print(f"results: {file.finish()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
