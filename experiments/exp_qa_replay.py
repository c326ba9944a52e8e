"""Does pooling prefixes over nodes lower the time to the first token? Question answering replayed.

    mpiexec -n 4 python -m mpi4py -m experiments.exp_qa_replay --dataset embedded

Driver = parse -> workload(seed) -> run -> record. Every system answers the same requests on the
same client, batch by batch; the first one, ``vanilla``, is the reference for the outputs of the
others. Systems take turns after each batch, so that other load on the machine falls on all alike,
or, where the engine cannot (`experiments.engines`), after all batches. Every pooled system has
servers and memory of its own (`experiments.common.jobs`). Clients wait for each other between
turns with naps. Raw samples go into HDF5, flushed after each batch.

Never averages (that is `experiments.report`), never draws (that is ``plots/``).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import record, report
from experiments.baselines import STORE_SETTINGS, WITHIN_NODE, Sample, System
from experiments.baselines.base import Place
from experiments.common import meeting, provenance
from experiments.common.datasets import DatasetError, require_files
from experiments.common.model_setup import agree_on_workload, find_model
from experiments.common.options import Options, UsageError, parse_options
from experiments.common.progress import RunProgress
from experiments.common.ranks import launcher_rank
from experiments.common.workload import Request, Workload
from experiments.engines import find_engine
from experiments.engines.base import Engine, opened

if TYPE_CHECKING:
    from experiments.common.jobs import Member, SystemJob
    from ptstore_mpi import Config

EXPERIMENT = "exp_qa_replay"


@dataclass(slots=True)
class Client:
    """What one client of the run holds; `references` are vanilla's answers by request."""

    member: Member
    engine: Engine
    systems: list[System]
    workload: Workload
    options: Options
    references: dict[int, Sample] = field(default_factory=dict)
    run_start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one client's part of the run ended with; the path is client 0's alone."""

    status: int
    path: Path | None


ServerRow = tuple[int, dict[str, int]]
"""Node and counters of a server."""


@dataclass(slots=True)
class Turn:
    """One system's turn in one batch on one client, as it travels to client 0."""

    samples: list[dict[str, Any]]
    row: dict[str, Any]
    counters: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment. Collective over all ranks of the job.

    Returns
    -------
    int
        0, or 2 where the command line or the data set is wrong, or the engine not installed.
    """
    try:
        options = parse_options(argv)
        find_engine(options.engine).require()
        require_files(options.dataset)
        record.require_folder(Path(options.output) / EXPERIMENT)
    except (UsageError, DatasetError, record.RecordError) as error:
        if launcher_rank() == 0:
            print(error, file=sys.stderr)
        return 2
    from ptstore_mpi import ConfigError

    try:
        configs = configs_of(options)
    except ConfigError as error:
        if launcher_rank() == 0:
            print(error, file=sys.stderr)
        return 2
    from experiments.common.jobs import SystemJob, run_clients  # starts MPI

    jobs = {name: SystemJob(config, name in WITHIN_NODE) for name, config in configs.items()}
    outcome = run_clients(lambda member: run_client(member, options, jobs), jobs)
    if outcome is None:
        return 0
    if outcome.path is not None:
        report.print_report(outcome.path)
        print(f"results: {outcome.path}")
    return outcome.status


def configs_of(options: Options) -> dict[str, Config]:
    """Return the settings of the systems that have servers; of one at least, whom clients need.

    Raises
    ------
    ConfigError
        A setting of the environment is wrong.
    """
    import msgspec

    from ptstore_mpi import Config

    config = Config.load(memory_bytes=options.memory_bytes_per_node, placement=options.placement)
    names = [name for name in options.systems if name in STORE_SETTINGS] or ["ptstore"]
    return {name: msgspec.structs.replace(config, **STORE_SETTINGS[name]) for name in names}


def run_client(member: Member, options: Options, jobs: Mapping[str, SystemJob]) -> Outcome:
    """Run one client. Collective over the clients."""
    try:
        client = set_up(member, options)
    except UsageError as error:
        # Every client is here with the same error, so the job can end in order.
        if member.rank == 0:
            print(error, file=sys.stderr, flush=True)
        return Outcome(2, None)
    return Outcome(0, replay(client, jobs))


def set_up(member: Member, options: Options) -> Client:
    """Build workload, engine and systems. Collective over the clients.

    Raises
    ------
    UsageError
        On every client alike: the data set or the model cannot give what was asked for.
    """
    if options.threads == 0:
        from ptstore_mpi.integrations.process_setup import default_thread_count

        share = default_thread_count(meeting.clients_on_this_host(member.comm))
        options = replace(options, threads=share)
    kind = find_engine(options.engine)
    kind.prepare_process(options.threads)
    folder = find_model(member, options.model)
    workload = agree_on_workload(member, options, folder)
    engine = kind.start(folder, options, workload)
    neighbours = meeting.gather_to_all(member.comm, member.node).count(member.node)
    cache_bytes = options.memory_bytes_per_node // neighbours
    systems = [
        engine.build_system(name, stores=member.stores, cache_bytes=cache_bytes)
        for name in options.systems
    ]
    return Client(member, engine, systems, workload, options)


def replay(client: Client, jobs: Mapping[str, SystemJob]) -> Path | None:
    """Answer all requests on all systems and record them. Collective over the clients."""
    member, options = client.member, client.options
    own = client.workload.of_client(member.rank)
    most = max(meeting.gather_to_all(member.comm, len(own)))
    batch_count = -(-most // options.batch)
    hosts = meeting.gather(member.comm, provenance.describe_host())
    file = _open_file(client, jobs, hosts) if hosts is not None else None
    progress = RunProgress(len(own) * len(client.systems), label=EXPERIMENT, shown=member.rank == 0)
    try:
        with progress:
            meeting.meet(member.comm)
            client.run_start_s = time.perf_counter()
            for group in client.engine.rounds(client.systems):
                with opened(group):
                    for batch in range(batch_count):
                        requests = own[batch * options.batch : (batch + 1) * options.batch]
                        turns = [
                            take_turn(client, system, batch, requests, progress.advance)
                            for system in group
                        ]
                        _record(file, meeting.gather(member.comm, turns), group)
        counted = meeting.gather(member.comm, _server_counters(client))
        if file is None or counted is None:
            return None
        _record_servers(file, counted)
        return file.finish()
    finally:
        if file is not None:
            file.close()


def take_turn(
    client: Client,
    system: System,
    batch: int,
    requests: Sequence[Request],
    advance: Callable[[str], None],
) -> Turn:
    """Answer some requests on one system. Collective: clients meet before."""
    member = client.member
    place = Place(member.rank, member.node, batch, client.run_start_s)
    store = member.stores.get(system.name)
    meeting.meet(member.comm)
    before = record.flatten_counters(store.stats()) if store is not None else {}
    start_s = time.perf_counter()
    samples = []
    for request in requests:
        sample = system.answer(request, place)
        system.settle(sample)
        samples.append(sample)
        advance(system.name)
    busy_s = time.perf_counter() - start_s
    after = record.flatten_counters(store.stats()) if store is not None else {}
    _compare(client, system, samples)
    return Turn(
        samples=[sample.row() for sample in samples],
        row={"batch": batch, "client": member.rank, "busy_s": busy_s},
        counters=record.difference(before, after),
    )


def _compare(client: Client, system: System, samples: Sequence[Sample]) -> None:
    """Compare answers with vanilla's, which are kept until the last system has given its own."""
    if system.name == "vanilla":
        client.references |= {sample.request: sample for sample in samples}
    for sample in samples:
        if sample.request in client.references:
            sample.compare(client.references[sample.request])
        if system is client.systems[-1]:
            client.references.pop(sample.request, None)


def _server_counters(client: Client) -> dict[str, list[ServerRow]]:
    """Return what this client asks the servers at the end: each is asked by one client."""
    member, found = client.member, {}
    nodes = meeting.gather_to_all(member.comm, member.node)
    for system in client.systems:
        store = member.stores.get(system.name)
        within_node = system.name in WITHIN_NODE
        asks = nodes.index(member.node) if within_node else 0
        if store is None or member.rank != asks:
            continue
        places = [store.topology.nodes[rank] for rank in store.topology.server_ranks]
        counted = store.server_stats()
        if len(counted) == len(places):  # else one is silent, and which is not known
            found[system.name] = [
                (member.node if within_node else place, counters)
                for place, counters in zip(places, counted, strict=True)
            ]
    return found


def _record_servers(
    file: record.ResultFile, counted: Sequence[Mapping[str, list[ServerRow]]]
) -> None:
    for system in dict.fromkeys(name for of_client in counted for name in of_client):
        rows = [row for of_client in counted for row in of_client.get(system, [])]
        rows.sort(key=lambda row: row[0])
        places = [{"server": number, "node": node} for number, (node, _) in enumerate(rows)]
        file.append_counted(record.servers_of(system), places, [c for _, c in rows])


def _record(
    file: record.ResultFile | None, gathered: list[list[Turn]] | None, systems: Sequence[System]
) -> None:
    if file is None or gathered is None:
        return
    for place, system in enumerate(systems):
        turns = [client_turns[place] for client_turns in gathered]
        samples = [row for turn in turns for row in turn.samples]
        file.append(record.samples_of(system.name), samples)
        counters = [turn.counters for turn in turns]
        file.append_counted(record.batches_of(system.name), [turn.row for turn in turns], counters)
    file.flush()


def _open_file(
    client: Client, jobs: Mapping[str, SystemJob], hosts: list[dict[str, Any]]
) -> record.ResultFile:
    options = client.options
    started_utc = provenance.utc_now()
    settings = {name: _plain(job.settings()) for name, job in jobs.items()}
    engines = {system.name: system.settings() for system in client.systems}
    attributes = provenance.collect(
        config={"experiment": options.as_dict(), "store": settings, "engine": engines},
        seed=options.seed,
        clients=hosts,
        started_utc=started_utc,
    )
    engine = client.engine
    choices = {name: store.transport_choice for name, store in client.member.stores.items()}
    main_choice = list(choices.values())[-1]
    attributes |= {
        "experiment": EXPERIMENT,
        "transport": main_choice.name,
        "transport_reason": main_choice.reason,
        "transports": json.dumps({name: [c.name, c.reason] for name, c in choices.items()}),
        "systems": ",".join(options.systems),
        "engine": options.engine,
        "order": "in turn" if engine.alternates else "one after the other",
        "compared": engine.compared,
        "dataset": options.dataset,
        "context_tokens": options.context_tokens,
        "dtype": options.dtype,
        "model_id": engine.model_id,
        "block_tokens": engine.block_tokens,
        "bytes_per_token": engine.bytes_per_token,
        "memory_bytes_per_node": options.memory_bytes_per_node,
        "requests_count": len(client.workload.requests),
        "workload_sha256": client.workload.digest(),
    }
    stem = f"{started_utc}_{provenance.job_id()}"
    return record.ResultFile(Path(options.output) / EXPERIMENT, stem, attributes)


def _plain(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


if __name__ == "__main__":
    sys.exit(main())
