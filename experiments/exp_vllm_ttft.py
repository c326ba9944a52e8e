"""What does the store do to the time to the first token of vLLM? Measured over context length.

    mpiexec -n 4 python -m mpi4py -m experiments.exp_vllm_ttft --context-tokens 1024,8064

Driver = parse -> prompts(seed) -> run -> record. All systems are one engine under other switches,
so they run the same code on one clock. Two clients measure in turn, each while the other naps:

1. Client 0 answers with everything off: ``vanilla``. It answers again and saves, which fills the
   store and vLLM's own cache alike. Then vLLM's own cache answers: ``prefix``. That is emptied, and
   the store of the own node answers: ``ptstore_local``.
2. The first client of another node, which has never seen the prompt, answers from there:
   ``ptstore_remote``. No copies are kept, and no prompt is asked again.

Every length has its turn before the next repeat. Never averages (that is `experiments.report`),
never draws (that is ``plots/``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import record, report_vllm_ttft
from experiments.common import meeting, provenance
from experiments.common.datasets import DatasetError, require_files
from experiments.common.model_setup import find_model
from experiments.common.options import UsageError
from experiments.common.progress import RunProgress
from experiments.common.ranks import launcher_rank
from experiments.common.vllm_answers import EngineError
from experiments.reading import ReportError
from experiments.vllm_ttft.engine import CONNECTOR, Answer, Engine, open_vllm, prepare
from experiments.vllm_ttft.options import Options, parse_options
from experiments.vllm_ttft.prompts import Prompt, Prompts, agree_on_prompts
from experiments.vllm_ttft.tables import EXPERIMENT, REFERENCES, SYSTEMS, samples_of

if TYPE_CHECKING:
    from experiments.common.jobs import Member
    from ptstore_mpi import Config, Store

STORE = "ptstore"
STORE_SETTINGS = {"replica_admission": "never", "placement": "local"}

OpenEngine = Callable[["Store", Path, Options, int], AbstractContextManager[Engine]]


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
    away
        The client that loads from another node; None: there is one node.
    engine
        None where this client only waits for the others.
    """

    member: Member
    options: Options
    prompts: Prompts
    away: int | None
    engine: Engine | None
    run_start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer of one system, as it travels to client 0."""

    system: str
    answer: Answer
    row: dict[str, Any]


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
        0; 1 where outputs differ, nothing was reused or the record contradicts itself; 2 where
        the command line or the data set is wrong, or vLLM is missing.
    """
    from ptstore_mpi import ConfigError

    try:
        options = parse_options(argv)
        require_files(options.dataset)
        record.require_folder(Path(options.output) / EXPERIMENT)
        config = store_config(options)
        if open_engine is None:
            prepare(options)
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
        report_vllm_ttft.print_report(outcome.path)
        problems = report_vllm_ttft.problems(outcome.path)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"results: {outcome.path}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else outcome.status


def store_config(options: Options) -> Config:
    """Return the settings of the store: what is stored stays where it was, and is not copied.

    Raises
    ------
    ConfigError
        A setting of the environment is wrong.
    """
    import msgspec

    from ptstore_mpi import Config

    config = Config.load(memory_bytes=options.memory_bytes_per_node)
    return msgspec.structs.replace(config, **STORE_SETTINGS)


def run_client(member: Member, options: Options, open_engine: OpenEngine) -> Outcome:
    """Run one client. Collective over the clients."""
    try:
        folder = find_model(member, options.model)
        prompts = agree_on_prompts(member, options, folder)
    except UsageError as error:
        # Every client is here with the same error, so the job can end in order.
        if member.rank == 0:
            print(error, file=sys.stderr, flush=True)
        return Outcome(2, None)
    nodes = meeting.gather_to_all(member.comm, member.node)
    away = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), None)
    if away is None and member.rank == 0:
        print("ptstore_remote is left out: it needs a client on another node", file=sys.stderr)
    with ExitStack() as stack:
        engine = None
        if member.rank in (0, away):
            store = member.stores[STORE]
            opening = open_engine(store, folder, options, prompts.longest_tokens)
            engine = stack.enter_context(opening)
        client = Client(member, options, prompts, away, engine)
        return Outcome(0, replay(client, folder.name))


def replay(client: Client, model: str) -> Path | None:
    """Answer all prompts on all systems and record them. Collective over the clients."""
    member, prompts = client.member, client.prompts
    hosts = meeting.gather(member.comm, provenance.describe_host())
    file = _open_file(client, model, hosts) if hosts is not None else None
    progress = RunProgress(
        len(prompts.measured), label=EXPERIMENT, shown=member.rank == 0, counted="prompts"
    )
    try:
        with progress:
            take_turns(client, prompts.warm_up)
            meeting.meet(member.comm)
            client.run_start_s = time.perf_counter()
            for prompt in prompts.measured:
                gathered = meeting.gather(member.comm, take_turns(client, prompt))
                if file is not None and gathered is not None:
                    found = [measured for of_client in gathered for measured in of_client]
                    record_answers(file, found, client.options)
                progress.advance(f"{prompt.context_tokens} tokens, repeat {prompt.repeat}")
        return file.finish() if file is not None else None
    finally:
        if file is not None:
            file.close()


def take_turns(client: Client, prompt: Prompt) -> list[Measured]:
    """Answer one prompt on all systems, and return this client's part. Collective."""
    found: list[Measured] = []
    for turn, rank in ((answer_at_home, 0), (answer_away, client.away)):
        meeting.meet(client.member.comm)
        if client.engine is not None and client.member.rank == rank:
            found += [
                Measured(system, answer, _row(client, prompt, answer))
                for system, answer in turn(client.engine, prompt.tokens)
            ]
    meeting.meet(client.member.comm)
    return found


def answer_at_home(engine: Engine, tokens: Sequence[int]) -> Iterator[tuple[str, Answer]]:
    """Yield the answers of the systems of client 0; the prompt is stored in between."""
    engine.forget()
    yield "vanilla", engine.answer(tokens, own_cache=False)
    engine.forget()
    engine.answer(tokens, own_cache=False, save=True)
    engine.settle()
    yield "prefix", engine.answer(tokens, own_cache=True)
    engine.forget()
    yield "ptstore_local", engine.answer(tokens, own_cache=True, load=True)


def answer_away(engine: Engine, tokens: Sequence[int]) -> Iterator[tuple[str, Answer]]:
    """Yield the answer of the client on another node."""
    engine.forget()
    yield "ptstore_remote", engine.answer(tokens, own_cache=True, load=True)


def _row(client: Client, prompt: Prompt, answer: Answer) -> dict[str, Any]:
    return {
        "request": prompt.request,
        "client": client.member.rank,
        "node": client.member.node,
        "repeat": prompt.repeat,
        "context_tokens": prompt.context_tokens,
        "prompt_tokens": answer.prompt_tokens,
        "start_s": answer.start_s - client.run_start_s,
        "ttft_s": answer.ttft_s,
        "ttft_cpu_s": answer.ttft_cpu_s,
        "total_s": answer.total_s,
        "cpu_s": answer.cpu_s,
        "asked_tokens": len(prompt.tokens),
        "output_tokens": client.options.output_tokens,
        **answer.facts,
    }


def record_answers(file: record.ResultFile, found: Sequence[Measured], options: Options) -> None:
    """Append the answers of one prompt, compared with those of the reference."""
    answers = {measured.system: measured.answer for measured in found}
    reference = answers[REFERENCES[options.dtype]].tokens
    for measured in found:
        same = equal_tokens(measured.answer.tokens, reference)
        file.append(samples_of(measured.system), [measured.row | {"same_tokens": same}])
    file.flush()


def equal_tokens(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Count the tokens up to the first that differs."""
    pairs = zip(tokens, reference, strict=False)
    return next((place for place, (own, other) in enumerate(pairs) if own != other), len(tokens))


def _open_file(client: Client, model: str, hosts: list[dict[str, Any]]) -> record.ResultFile:
    options, store = client.options, client.member.stores[STORE]
    settings = {name: getattr(store.config, name) for name in store.config.__struct_fields__}
    started_utc = provenance.utc_now()
    attributes = provenance.collect(
        config={"experiment": options.as_dict(), "store": settings, "connector": CONNECTOR},
        seed=options.seed,
        clients=hosts,
        started_utc=started_utc,
    )
    systems = [name for name in SYSTEMS if name != "ptstore_remote" or client.away is not None]
    attributes |= {
        "experiment": EXPERIMENT,
        "transport": store.transport_choice.name,
        "transport_reason": store.transport_choice.reason,
        "systems": ",".join(systems),
        "reference": REFERENCES[options.dtype],
        "dataset": options.dataset,
        "dtype": options.dtype,
        "model": model,
        "output_tokens": options.output_tokens,
        "memory_bytes_per_node": options.memory_bytes_per_node,
        "requests_count": len(client.prompts.measured),
        "workload_sha256": client.prompts.digest(),
    }
    stem = f"{started_utc}_{provenance.job_id()}"
    return record.ResultFile(Path(options.output) / EXPERIMENT, stem, attributes)


if __name__ == "__main__":
    sys.exit(main())
