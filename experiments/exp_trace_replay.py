"""How much of a real trace does the pool find, and how far is that from the best there could be?

    python -m experiments.exp_trace_replay --trace mooncake --memory-tokens 2000000
    mpiexec -n 4 python -m mpi4py -m experiments.exp_trace_replay \
        --transport mpi --trace mooncake --requests 200 --bytes-per-token 64

Driver = parse -> trace(seed) -> replay -> record. No model runs: clients match, load and store the
increment, as an engine would, in the order of the trace. Over ``sim`` that is the store's own
client and server code in one process, bytes counted; over MPI bytes are moved, and each client
takes its own requests in order, one turn of all clients after the other.

Never averages (that is `experiments.report`), never draws (that is ``plots/``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ptstore_mpi
from experiments import record, report_trace_replay
from experiments.common import meeting, provenance
from experiments.common.datasets import DatasetError
from experiments.common.options import UsageError
from experiments.common.progress import RunProgress
from experiments.common.ranks import launcher_rank
from experiments.common.workload import WorkloadError
from experiments.trace_replay.bounds import ceiling_rows
from experiments.trace_replay.options import LEAST_SEGMENT_TOKENS, Options, parse_options
from experiments.trace_replay.places import MpiPlace, Place, SimPlace
from experiments.trace_replay.tables import (
    CEILINGS,
    DECISIONS,
    EXPERIMENT,
    OWNERS,
    REQUESTS,
    SERVERS,
    decision_rows,
)
from experiments.traces import Trace, load_trace, require_trace
from ptstore_mpi import Config, ConfigError
from ptstore_mpi.types import PAGE_BYTES, whole_pages

ROUTING = 23  # stream of the seed
TURN_REQUESTS = 512  # requests of all clients between two writes to the file


@dataclass(frozen=True, slots=True)
class Run:
    """What is replayed, where and how."""

    place: Place
    trace: Trace
    options: Options
    config: Config


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one client's part of the run ended with; the path is client 0's alone."""

    status: int
    path: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment. Collective over all ranks of the job.

    Returns
    -------
    int
        0, or 2 where the command line, the trace or a setting is wrong.
    """
    try:
        options = parse_options(argv)
        require_trace(options.trace, options.path)
        record.require_folder(Path(options.output) / EXPERIMENT)
        trace = read_trace(options)
        options = fitted(options, trace)
        outcome = start(trace, options, settings_of(options))
    except (UsageError, DatasetError, WorkloadError, record.RecordError, ConfigError) as error:
        if launcher_rank() == 0:
            print(error, file=sys.stderr)
        return 2
    if outcome is not None and outcome.path is not None:
        report_trace_replay.print_outcome(outcome.path, as_json=options.json)
    return outcome.status if outcome is not None else 0


def read_trace(options: Options) -> Trace:
    """Return the trace that was asked for."""
    return load_trace(
        options.trace,
        path=options.path,
        requests=options.requests,
        seed=options.seed,
        popularity=options.popularity,
        documents=options.documents,
        context_tokens=options.context_tokens,
    )


def fitted(options: Options, trace: Trace) -> Options:
    """Return options with the sizes that fit the trace where none were given."""
    block_tokens = options.block_tokens or trace.block_tokens
    least = max(LEAST_SEGMENT_TOKENS // block_tokens, 1) * block_tokens
    segment_tokens = options.segment_tokens or least
    if segment_tokens % block_tokens:
        raise UsageError(
            f"--segment-tokens: expected whole blocks of {block_tokens} tokens, "
            f"given {segment_tokens}"
        )
    return replace(options, block_tokens=block_tokens, segment_tokens=segment_tokens)


def settings_of(options: Options) -> Config:
    """Return the settings of the store; the rest may come from the environment."""
    settings: dict[str, Any] = {
        "memory_bytes": options.memory_bytes,
        "placement": options.placement,
        "eviction": options.policy,
        "segment_tokens": options.segment_tokens,
        "replica_admission": options.admission,
        "replica_max_share": options.replica_share / 100,
        "replica_min_share": options.replica_floor / 100,
        "ssd_dir": options.ssd_dir,
        "ssd_bytes": options.ssd_bytes,
    }
    if options.ssd_bytes:
        settings["slab_bytes"] = slab_bytes_of(options)
    if options.transport == "sim":  # where nothing moves, pieces of a segment only cost time
        segment_bytes = options.segment_tokens * options.bytes_per_token
        settings["get_bytes"] = max(Config().get_bytes, segment_bytes)
    return Config.load(**settings)


def slab_bytes_of(options: Options) -> int:
    """Return the size of the files of a tier: some 64 of them, and room for a segment in each."""
    block_count = options.segment_tokens // options.block_tokens
    slot_bytes = (
        options.segment_tokens * options.bytes_per_token + 64 * block_count + 2 * PAGE_BYTES
    )
    return whole_pages(min(max(options.ssd_bytes // 64, 4 * slot_bytes), options.ssd_bytes))


def start(trace: Trace, options: Options, config: Config) -> Outcome | None:
    """Replay over the transport that was asked for; None on a server."""
    if options.transport == "sim":
        return replay(Run(SimPlace(trace, options, config), trace, options, config))
    return ptstore_mpi.run(
        lambda store: replay(Run(MpiPlace(store, trace, options), trace, options, config)), config
    )


def routed(trace: Trace, options: Options, clients: int) -> npt.NDArray[np.int64]:
    """Return the client of each request.

    ``random``: a shuffled deal; ``round_robin``: in turn; ``affinity``: sessions in turn, each to
    one client.
    """
    count = len(trace.requests)
    if options.routing == "affinity":
        return np.array([request.session % clients for request in trace.requests])
    in_turn = np.arange(count) % clients
    if options.routing == "round_robin":
        return in_turn
    return np.random.default_rng([options.seed, ROUTING]).permutation(in_turn)


def replay(run: Run) -> Outcome:
    """Replay the trace and record it. Collective over the clients."""
    place, requests = run.place, run.trace.requests
    digests = meeting.gather_to_all(place.comm, run.trace.digest())
    if len(set(digests)) != 1:
        if 0 in place.replayers:
            problem = "expected the same trace on every client: do all nodes see the same data?"
            print(problem, file=sys.stderr, flush=True)
        return Outcome(2)
    clients = routed(run.trace, run.options, place.client_count)
    hosts = meeting.gather(place.comm, provenance.describe_host())
    file = _open_file(run, hosts) if hosts is not None else None
    mine = int(np.isin(clients, list(place.replayers)).sum())
    progress = RunProgress(
        mine,
        label=EXPERIMENT,
        shown=0 in place.replayers,
        counted="requests" if mine == len(requests) else "requests of client 0",
    )
    try:
        with progress:
            for first in range(0, len(requests), TURN_REQUESTS):
                turn = range(first, min(first + TURN_REQUESTS, len(requests)))
                rows = list(_take_turn(run, turn, clients, progress))
                gathered = meeting.gather(place.comm, rows)
                if file is not None and gathered is not None:
                    file.append(REQUESTS, _by_request(gathered))
                    file.flush()
        owners = meeting.gather(place.comm, [r.owner_rows() for r in place.replayers.values()])
        if file is None or owners is None:
            return Outcome(0)
        file.append(OWNERS, [row for of_client in owners for rows in of_client for row in rows])
        file.append(SERVERS, _server_rows(place))
        file.append(DECISIONS, decision_rows(place.decisions()))
        namespace = next(iter(place.replayers.values())).namespace
        rows = ceiling_rows(run.trace, namespace, run.options, nodes=place.node_count)
        file.append(CEILINGS, rows)
        return Outcome(0, file.finish())
    finally:
        if file is not None:
            file.close()


def _take_turn(
    run: Run, turn: range, clients: npt.NDArray[np.int64], progress: RunProgress
) -> Iterator[dict[str, Any]]:
    for number in turn:
        replayer = run.place.replayers.get(int(clients[number]))
        if replayer is not None:
            request = run.trace.requests[number]
            run.place.arrive(request)
            yield replayer.replay(number, request)
            progress.advance(run.trace.name)


def _by_request(gathered: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return sorted((row for rows in gathered for row in rows), key=lambda row: row["request"])


def _server_rows(place: Place) -> list[dict[str, int]]:
    return [
        {"server": server, **{n: counters.get(n, 0) for n in SERVERS.columns if n != "server"}}
        for server, counters in enumerate(place.server_counters())
    ]


def _open_file(run: Run, hosts: list[dict[str, Any]]) -> record.ResultFile:
    place, options, config = run.place, run.options, run.config
    started_utc = provenance.utc_now()
    settings = {name: getattr(config, name) for name in config.__struct_fields__}
    attributes = provenance.collect(
        config={"experiment": options.as_dict(), "store": settings},
        seed=options.seed,
        clients=hosts,
        started_utc=started_utc,
    )
    transport, reason = place.transport_choice
    attributes |= {
        "experiment": EXPERIMENT,
        "transport": transport,
        "transport_reason": reason,
        "trace": options.trace,
        "requests_count": len(run.trace.requests),
        "workload_sha256": run.trace.digest(),
        "nodes_count": place.node_count,
        "servers_count": place.server_count,
        "clients_count": place.client_count,
        "placement": options.placement,
        "policy": options.policy,
        "admission": options.admission,
        "replica_max_share": config.replica_max_share,
        "replica_min_share": config.replica_min_share,
        "ssd_tokens_per_node": options.ssd_tokens,
        "routing": options.routing,
        "model": options.model or "none",
        "bytes_per_token": options.bytes_per_token,
        "block_tokens": options.block_tokens,
        "segment_tokens": options.segment_tokens,
        "memory_bytes_per_node": options.memory_bytes,
        "memory_tokens_per_node": options.memory_bytes // options.bytes_per_token,
    }
    stem = f"{started_utc}_{provenance.job_id()}"
    return record.ResultFile(Path(options.output) / EXPERIMENT, stem, attributes)


if __name__ == "__main__":
    sys.exit(main())
