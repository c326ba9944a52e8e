"""What does the connector cost vLLM where nothing is ever reused? Measured beside plain vLLM.

    mpiexec -n 3 python -m mpi4py -m experiments.exp_vllm_overhead --context-tokens 1024

Driver = parse -> schedule(seed) -> run -> record. Two clients of one node answer the same prompts,
``plain`` without a connector, ``connector`` with one that looks every prompt up and saves it. They
take turns batch by batch, each while the other naps, and change places after half of the batches,
with new engines (`experiments.vllm_overhead.schedule`): neither other load nor the process nor the
order decides. No prompt has another's beginning. Saves of a batch end before the next turn begins.

Never averages (that is `experiments.report`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import record, report_vllm_overhead
from experiments.common import meeting, provenance
from experiments.common.datasets import DatasetError, require_files
from experiments.common.model_setup import find_model
from experiments.common.options import UsageError
from experiments.common.progress import RunProgress
from experiments.common.ranks import launcher_rank
from experiments.common.vllm_answers import EngineError
from experiments.exp_vllm_ttft import equal_tokens
from experiments.reading import ReportError
from experiments.vllm_overhead.engine import SETTINGS, Engine, open_vllm
from experiments.vllm_overhead.options import Options, parse_options
from experiments.vllm_overhead.schedule import (
    PHASES,
    Batch,
    Schedule,
    agree_on_schedule,
    find_pair,
    system_of,
)
from experiments.vllm_overhead.tables import EXPERIMENT, PLAIN, SYSTEMS, batches_of, samples_of
from experiments.vllm_ttft.engine import prepare

if TYPE_CHECKING:
    from experiments.common.jobs import Member
    from ptstore_mpi import Store

STORE = "ptstore"

OpenEngine = Callable[["Store", Path, Options, int, str], AbstractContextManager[Engine]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one client's part of the run ended with; the path is client 0's alone."""

    status: int
    path: Path | None


@dataclass(slots=True)
class Client:
    """What one client of the run holds.

    Attributes
    ----------
    member
        Its place in the job.
    place
        0 or 1 of the two that measure; None: it only waits for them.
    folder
        The model.
    """

    member: Member
    options: Options
    schedule: Schedule
    place: int | None
    folder: Path
    run_start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One system's turn in one batch, as it travels to client 0."""

    system: str
    samples: list[dict[str, Any]]
    outputs: list[tuple[int, ...]]
    row: dict[str, Any]
    counters: dict[str, float]


def main(argv: Sequence[str] | None = None, *, open_engine: OpenEngine | None = None) -> int:
    """Run the experiment. Collective over all ranks of the job.

    Parameters
    ----------
    argv
        Command line; that of the process if None.
    open_engine
        What answers the prompts; vLLM if None.

    Returns
    -------
    int
        0; 1 where what was measured contradicts itself; 2 where the command line, the data set or
        the number of clients is wrong, or vLLM is missing.
    """
    from ptstore_mpi import Config, ConfigError

    try:
        options = parse_options(argv)
        require_files(options.dataset)
        record.require_folder(Path(options.output) / EXPERIMENT)
        config = Config.load(memory_bytes=options.memory_bytes_per_node)
        if open_engine is None:
            prepare(options.for_prompts(options.requests))
            open_engine = open_vllm
    except (UsageError, DatasetError, record.RecordError, ConfigError, EngineError) as error:
        if launcher_rank() == 0:
            print(error, file=sys.stderr)
        return 2
    from experiments.common.jobs import SystemJob, run_clients  # starts MPI

    opened = open_engine
    outcome = run_clients(
        lambda member: run_client(member, options, opened), {STORE: SystemJob(config)}
    )
    if outcome is None or outcome.path is None:
        return 0 if outcome is None else outcome.status
    try:
        report_vllm_overhead.print_report(outcome.path)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"results: {outcome.path}")
    return outcome.status


def run_client(member: Member, options: Options, open_engine: OpenEngine) -> Outcome:
    """Run one client. Collective over the clients."""
    try:
        client = set_up(member, options)
    except UsageError as error:
        # Every client is here with the same error, so the job can end in order.
        if member.rank == 0:
            print(error, file=sys.stderr, flush=True)
        return Outcome(2, None)
    return Outcome(0, replay(client, open_engine))


def set_up(member: Member, options: Options) -> Client:
    """Find the two that measure, the model and the schedule. Collective over the clients.

    Raises
    ------
    UsageError
        On every client alike: no node has two of them, or the data set or the model cannot give
        what was asked for.
    """
    pair = find_pair(meeting.gather_to_all(member.comm, member.node))
    if pair is None:
        raise UsageError(
            f"expected two clients on one node, such as mpiexec -n 3 has, given {member.count} "
            f"in all, one on a node"
        )
    folder = find_model(member, options.model)
    schedule = agree_on_schedule(member, options, folder)
    place = pair.index(member.rank) if member.rank in pair else None
    return Client(member, options, schedule, place, folder)


def replay(client: Client, open_engine: OpenEngine) -> Path | None:
    """Answer all prompts on both systems and record them. Collective over the clients."""
    member, schedule = client.member, client.schedule
    hosts = meeting.gather(member.comm, provenance.describe_host())
    file = _open_file(client, hosts) if hosts is not None else None
    progress = RunProgress(
        sum(map(len, schedule.batches)),
        label=EXPERIMENT,
        shown=member.rank == 0,
        counted="batches",
    )
    try:
        with progress:
            meeting.meet(member.comm)
            client.run_start_s = time.perf_counter()
            for phase in PHASES:
                system = None if client.place is None else system_of(client.place, phase)
                with ExitStack() as stack:
                    engine = None
                    if system is not None:
                        engine = stack.enter_context(_open(client, open_engine, system))
                        engine.answer([prompt.tokens for prompt in schedule.warm_ups[phase]])
                    for batch in schedule.batches[phase]:
                        turns = take_turns(client, engine, system, batch)
                        gathered = meeting.gather(member.comm, turns)
                        if file is not None and gathered is not None:
                            record_batch(file, [turn for found in gathered for turn in found])
                        progress.advance(f"phase {phase}")
        return file.finish() if file is not None else None
    finally:
        if file is not None:
            file.close()


def _open(client: Client, open_engine: OpenEngine, system: str) -> AbstractContextManager[Engine]:
    store, longest = client.member.stores[STORE], client.schedule.longest_tokens
    return open_engine(store, client.folder, client.options, longest, system)


def take_turns(
    client: Client, engine: Engine | None, system: str | None, batch: Batch
) -> list[Turn]:
    """Answer one batch on both systems, and return this client's part. Collective."""
    found = []
    for number, name in enumerate(batch.order):
        meeting.meet(client.member.comm)
        if engine is not None and name == system:
            found.append(take_turn(client, engine, name, batch, number))
    meeting.meet(client.member.comm)
    return found


def take_turn(client: Client, engine: Engine, system: str, batch: Batch, number: int) -> Turn:
    """Answer one batch on this client's system."""
    store, rank = client.member.stores[STORE], client.member.rank
    before = record.flatten_counters(store.stats())
    answered = engine.answer([prompt.tokens for prompt in batch.prompts])
    after = record.flatten_counters(store.stats())
    samples = [
        {
            "request": prompt.request,
            "client": rank,
            "batch": batch.number,
            "ttft_s": answer.ttft_s,
            "prompt_tokens": answer.prompt_tokens,
            "asked_tokens": len(prompt.tokens),
            "output_tokens": client.options.output_tokens,
            **answer.facts,
        }
        for prompt, answer in zip(batch.prompts, answered.answers, strict=True)
    ]
    row = {
        "batch": batch.number,
        "client": rank,
        "turn": number,
        "start_s": answered.start_s - client.run_start_s,
        "wall_s": answered.wall_s,
        "cpu_s": answered.cpu_s,
        "settled_s": answered.settled_s,
        "settled_cpu_s": answered.settled_cpu_s,
    }
    outputs = [answer.tokens for answer in answered.answers]
    counters = record.difference(before, after) if system != PLAIN else {}
    return Turn(system, samples, outputs, row, counters)


def record_batch(file: record.ResultFile, turns: Sequence[Turn]) -> None:
    """Append the turns of one batch, the answers compared with those of plain vLLM."""
    outputs = {turn.system: turn.outputs for turn in turns}
    for turn in turns:
        pairs = zip(turn.outputs, outputs[PLAIN], strict=True)
        same = [equal_tokens(own, plain) for own, plain in pairs]
        samples: list[Mapping[str, Any]] = [
            sample | {"same_tokens": count}
            for sample, count in zip(turn.samples, same, strict=True)
        ]
        file.append(samples_of(turn.system), samples)
        file.append_counted(batches_of(turn.system), [turn.row], [turn.counters])
    file.flush()


def _open_file(client: Client, hosts: list[dict[str, Any]]) -> record.ResultFile:
    options, store = client.options, client.member.stores[STORE]
    settings = {name: getattr(store.config, name) for name in store.config.__struct_fields__}
    started_utc = provenance.utc_now()
    attributes = provenance.collect(
        config={"experiment": options.as_dict(), "store": settings, "connector": SETTINGS},
        seed=options.seed,
        clients=hosts,
        started_utc=started_utc,
    )
    attributes |= {
        "experiment": EXPERIMENT,
        "transport": store.transport_choice.name,
        "transport_reason": store.transport_choice.reason,
        "systems": ",".join(SYSTEMS),
        "reference": PLAIN,
        "dataset": options.dataset,
        "context_tokens": options.context_tokens,
        "dtype": options.dtype,
        "model": client.folder.name,
        "output_tokens": options.output_tokens,
        "memory_bytes_per_node": options.memory_bytes_per_node,
        "requests_count": options.requests,
        "workload_sha256": client.schedule.digest,
    }
    stem = f"{started_utc}_{provenance.job_id()}"
    return record.ResultFile(Path(options.output) / EXPERIMENT, stem, attributes)


if __name__ == "__main__":
    sys.exit(main())
