"""Does pooling prefixes over nodes lower the time to the first token? Question answering replayed.

    mpiexec -n 4 python -m mpi4py -m experiments.exp_qa_replay --dataset embedded

Driver = parse -> workload(seed) -> run -> record. Every system answers the same requests on the
same client, batch by batch in turn, so that other load on the machine falls on all alike; the
first system of a batch, ``vanilla``, is the reference for the outputs of the others. Clients wait
for each other between turns with naps. Raw samples go into HDF5, flushed after each batch.

Never averages (that is `experiments.report`), never draws (that is ``plots/``).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from experiments import record, report
from experiments.baselines import Sample, System, build_system
from experiments.baselines.base import Place
from experiments.common import meeting, provenance
from experiments.common.datasets import DatasetError, load_documents, require_files
from experiments.common.options import Options, UsageError, parse_options
from experiments.common.progress import RunProgress
from experiments.common.ranks import launcher_rank
from experiments.common.workload import (
    Popularity,
    Request,
    Workload,
    WorkloadError,
    WorkloadOptions,
    build_workload,
)

EXPERIMENT = "exp_qa_replay"
WARM_UP_TOKENS = 64


@dataclass(slots=True)
class Client:
    """What one client of the run holds."""

    store: Any
    engine: Any
    systems: list[System]
    workload: Workload
    options: Options
    run_start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one client's part of the run ended with; the path is client 0's alone."""

    status: int
    path: Path | None


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
        0, or 2 where the command line or the data set is wrong.
    """
    try:
        options = parse_options(argv)
        require_files(options.dataset)
        record.require_folder(Path(options.output) / EXPERIMENT)
    except (UsageError, DatasetError, record.RecordError) as error:
        if launcher_rank() == 0:
            print(error, file=sys.stderr)
        return 2
    import ptstore_mpi

    try:
        config = ptstore_mpi.Config.load(
            memory_bytes=options.memory_bytes_per_node, placement=options.placement
        )
    except ptstore_mpi.ConfigError as error:
        if launcher_rank() == 0:
            print(error, file=sys.stderr)
        return 2
    outcome = ptstore_mpi.run(lambda store: run_client(store, options, config), config)
    if outcome is None:
        return 0
    if outcome.path is not None:
        report.print_report(outcome.path)
        print(f"results: {outcome.path}")
    return outcome.status


def run_client(store: Any, options: Options, config: Any) -> Outcome:
    """Run one client. Collective over the clients."""
    try:
        client = set_up(store, options)
    except UsageError as error:
        # Every client is here with the same error, so the job can end in order.
        if store.client_rank == 0:
            print(error, file=sys.stderr, flush=True)
        return Outcome(2, None)
    try:
        return Outcome(0, replay(client, config))
    finally:
        for system in client.systems:
            system.close()


def set_up(store: Any, options: Options) -> Client:
    """Build workload, engine and systems. Collective over the clients.

    Raises
    ------
    UsageError
        On every client alike: the data set or the model cannot give what was asked for.
    """
    if options.threads == 0:
        from ptstore_mpi.integrations.process_setup import default_thread_count

        share = default_thread_count(meeting.clients_on_this_host(store.comm))
        options = replace(options, threads=share)
    folder = find_model(store, options)
    workload = agree_on_workload(store, options, folder)

    from ptstore_mpi.integrations.transformers import TransformersEngine

    engine = TransformersEngine.from_pretrained(
        folder, dtype=options.dtype, threads=options.threads
    )
    neighbours = meeting.gather_to_all(store.comm, store.node).count(store.node)
    cache_bytes = options.memory_bytes_per_node // neighbours
    systems = [
        build_system(name, engine=engine, store=store, cache_bytes=cache_bytes)
        for name in options.systems
    ]
    engine.prefill(workload.requests[0].tokens[:WARM_UP_TOKENS])
    return Client(store, engine, systems, workload, options)


def find_model(store: Any, options: Options) -> Path:
    """Return the model's folder; client 0 prepares the embedded one before the others look."""
    if options.model:
        return Path(options.model)
    from ptstore_mpi.integrations import smollm2

    if store.client_rank == 0:
        smollm2.prepare()
    meeting.meet(store.comm)
    return Path(smollm2.prepare())


def agree_on_workload(store: Any, options: Options, folder: Path) -> Workload:
    """Build the workload, and see that all clients built the same. Collective.

    Raises
    ------
    UsageError
        On every client, if any of them could not build it.
    """
    workload, problem = None, ""
    try:
        workload = _build_workload(store, options, folder)
    except (DatasetError, WorkloadError) as error:
        problem = str(error)
    problems = [found for found in meeting.gather_to_all(store.comm, problem) if found]
    if workload is None or problems:
        raise UsageError(problems[0])
    digests = meeting.gather_to_all(store.comm, workload.digest())
    if len(set(digests)) != 1:
        raise UsageError(
            f"expected the same prompts on every client, got digests {sorted(set(digests))}: "
            "do all nodes see the same data, model and version of Python?"
        )
    return workload


def _build_workload(store: Any, options: Options, folder: Path) -> Workload:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    workload = build_workload(
        load_documents(options.dataset, seed=options.seed),
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        WorkloadOptions(
            context_tokens=options.context_tokens,
            documents=options.documents,
            requests=options.requests,
            popularity=Popularity.parse(options.popularity),
            routing=options.routing,
            clients=store.client_count,
            seed=options.seed,
        ),
    )
    longest = max(len(request.tokens) for request in workload.requests)
    positions = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if positions is not None and longest > positions:
        raise WorkloadError(
            f"--context-tokens {options.context_tokens}: the longest prompt has {longest} tokens, "
            f"this model takes {positions}"
        )
    return workload


def replay(client: Client, config: Any) -> Path | None:
    """Answer all requests on all systems and record them. Collective over the clients."""
    store, options = client.store, client.options
    own = client.workload.of_client(store.client_rank)
    most = max(meeting.gather_to_all(store.comm, len(own)))
    batch_count = -(-most // options.batch)
    hosts = meeting.gather(store.comm, provenance.describe_host())
    file = _open_file(client, config, hosts) if hosts is not None else None
    progress = RunProgress(
        len(own) * len(client.systems), label=EXPERIMENT, shown=store.client_rank == 0
    )
    try:
        with progress:
            meeting.meet(store.comm)
            client.run_start_s = time.perf_counter()
            for batch in range(batch_count):
                requests = own[batch * options.batch : (batch + 1) * options.batch]
                turns = list(take_turns(client, batch, requests, progress.advance))
                _record(file, meeting.gather(store.comm, turns), options.systems)
        return file.finish() if file is not None else None
    finally:
        if file is not None:
            file.close()


def take_turns(
    client: Client, batch: int, requests: Sequence[Request], advance: Callable[[str], None]
) -> Iterator[Turn]:
    """Yield each system's turn over the same requests. Collective: clients meet before each."""
    store = client.store
    place = Place(store.client_rank, store.node, batch, client.run_start_s)
    references: dict[int, Sample] = {}
    for system in client.systems:
        meeting.meet(store.comm)
        before = record.flatten_counters(store.stats())
        start_s = time.perf_counter()
        samples = []
        for request in requests:
            sample = system.answer(request, place)
            system.settle(sample)
            samples.append(sample)
            advance(system.name)
        busy_s = time.perf_counter() - start_s
        after = record.flatten_counters(store.stats())
        if system.name == "vanilla":
            references = {sample.request: sample for sample in samples}
        for sample in samples:
            if sample.request in references:
                sample.compare(references[sample.request])
        yield Turn(
            samples=[sample.row() for sample in samples],
            row={"batch": batch, "client": store.client_rank, "busy_s": busy_s},
            counters=record.difference(before, after) if system.name == "ptstore" else {},
        )


def _record(
    file: record.ResultFile | None, gathered: list[list[Turn]] | None, systems: Sequence[str]
) -> None:
    if file is None or gathered is None:
        return
    for place, system in enumerate(systems):
        turns = [client_turns[place] for client_turns in gathered]
        samples = [row for turn in turns for row in turn.samples]
        file.append(record.samples_of(system), samples)
        file.append_batches(system, [turn.row for turn in turns], [turn.counters for turn in turns])
    file.flush()


def _open_file(client: Client, config: Any, hosts: list[dict[str, Any]]) -> record.ResultFile:
    options = client.options
    started_utc = provenance.utc_now()
    settings = {"experiment": options.as_dict(), "store": _plain(config)}
    attributes = provenance.collect(
        config=settings, seed=options.seed, clients=hosts, started_utc=started_utc
    )
    layout = client.engine.layout
    attributes |= {
        "experiment": EXPERIMENT,
        "transport": client.store.transport_choice.name,
        "transport_reason": client.store.transport_choice.reason,
        "systems": ",".join(options.systems),
        "dataset": options.dataset,
        "context_tokens": options.context_tokens,
        "dtype": options.dtype,
        "model_id": client.engine.model_id,
        "block_tokens": layout.block_tokens,
        "bytes_per_token": layout.bytes_per_token,
        "memory_bytes_per_node": options.memory_bytes_per_node,
        "requests_count": len(client.workload.requests),
        "workload_sha256": client.workload.digest(),
    }
    stem = f"{started_utc}_{provenance.job_id()}"
    return record.ResultFile(Path(options.output) / EXPERIMENT, stem, attributes)


def _plain(config: Any) -> dict[str, Any]:
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    names = getattr(config, "__struct_fields__", ())
    return {name: getattr(config, name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
