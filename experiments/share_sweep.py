"""How much of the memory is best kept for replicas, and does the adaptive share find that?

    python -m experiments.share_sweep                            # data sets that need no files
    PTSTORE_DATA=... python -m experiments.share_sweep --workloads power zipf mooncake

Each workload is replayed on a simulated job of 8 nodes (`exp_trace_replay`, transport ``sim``)
with fixed shares of every node's memory, and with ``replica_share = adaptive``. No byte moves and
no model runs: the time to the first token is *modelled*, tokens by source times the seconds that
one of them takes (`TIMES`), over the second half of the requests, when the pool is warm.

=========  ================================================================================
recompute  prefill of a 7B model on an A100: 10,000 tokens/s (14.5 GFLOP a token, 312 TFLOP/s
           at 46 %)
remote     20 GB/s of a 200 Gb/s network port, then as local
local      100 GB/s of a node's memory
disk       3 GB/s of an NVMe SSD; no such tier is in these runs
=========  ================================================================================

A token of Mistral-7B has 131,072 bytes. Never draws (that is ``plots/plot_share_sweep.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from experiments import record
from experiments.common import provenance
from experiments.common.datasets import DatasetError
from experiments.common.options import UsageError, unit_share, whole_number
from experiments.exp_trace_replay import fitted, read_trace, routed, settings_of
from experiments.trace_replay.options import Options, parse_options
from experiments.trace_replay.places import SimPlace
from experiments.trace_replay.tables import DECISIONS, decision_rows
from experiments.traces import Trace
from ptstore_mpi import SOURCES, Config, ConfigError

EXPERIMENT = "share_sweep"
FIXED_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
ADAPTIVE = -1.0
MOST_SHARE = 0.75
TIMES = {"local": 0.01, "remote": 0.06, "disk": 0.34, "recompute": 0.763}  # s for 1 GB of KV
GB_BYTES = 1e9
QUESTIONS = "--trace embedded --documents 128 --requests 6000 --memory-tokens 40000"
WORKLOADS = {
    "power": f"{QUESTIONS} --popularity power:6",
    "zipf": f"{QUESTIONS} --popularity zipf:1.0",
    "mooncake": "--trace mooncake --requests 4000 --memory-tokens 300000",
}
"""Options of `exp_trace_replay`; memory is that of a node."""
LOCAL = ("owned", "replica", "engine")

RUNS = record.Table(
    "runs",
    {
        "workload": (record.TEXT, "text"),
        "share": ("f8", "1"),  # ADAPTIVE: moved by the servers
        "ttft_s": ("f8", "s"),  # modelled mean, as all below over the warm half
        "hit_ratio": ("f8", "1"),
        "local_share": ("f8", "1"),  # of the hits
        "load_max_over_mean": ("f8", "1"),  # bytes read from an owner by other nodes
        "mean_share": ("f8", "1"),  # at the end, over all servers
        "move_count": ("i8", "1"),
    },
)


@dataclass(frozen=True, slots=True)
class Run:
    """One workload with one share."""

    row: dict[str, Any]
    decisions: list[dict[str, Any]]


def settings_for(config: Config, share: float) -> Config:
    """Return settings with a fixed share, or the adaptive one."""
    if share != ADAPTIVE:
        return msgspec.structs.replace(config, replica_min_share=share, replica_max_share=share)
    assumed = {f"assumed_{name}_s": value_s for name, value_s in TIMES.items()}
    return msgspec.structs.replace(
        config,
        replica_share="adaptive",
        replica_min_share=0.0,
        replica_max_share=MOST_SHARE,
        **assumed,
    )


def modelled_ttft_s(tokens: Counter[str], bytes_per_token: int) -> float:
    """Return the seconds that these tokens by source take, one after the other."""
    seconds = sum(TIMES["local"] * tokens[name] for name in LOCAL)
    seconds += sum(TIMES[name] * tokens[name] for name in ("remote", "disk", "recompute"))
    return seconds * bytes_per_token / GB_BYTES


def measure(workload: str, trace: Trace, options: Options, share: float) -> Run:
    """Replay a workload with one share and model its warm half."""
    place = SimPlace(trace, options, settings_for(settings_of(options), share))
    clients = routed(trace, options, place.client_count)
    tokens: Counter[str] = Counter()
    warm_from = len(trace.requests) // 2
    before: Counter[int] = Counter()
    for number, request in enumerate(trace.requests):
        if number == warm_from:
            before = _sent_bytes(place)
        place.arrive(request)
        row = place.replayers[int(clients[number])].replay(number, request)
        if number >= warm_from:
            tokens.update({name: row[f"{name}_tokens"] for name in SOURCES})
            tokens["recompute"] += row["recomputed_tokens"]
            tokens["asked"] += row["asked_tokens"]
    sent = _sent_bytes(place)
    sent.subtract(before)
    loads = [sent[server] for server in range(place.server_count)]
    hits = tokens["asked"] - tokens["recompute"]
    counters = place.server_counters()
    shares = [c.get("balance_share_ppm", round(1e6 * share)) / 1e6 for c in counters]
    count = len(trace.requests) - warm_from
    return Run(
        {
            "workload": workload,
            "share": share,
            "ttft_s": modelled_ttft_s(tokens, options.bytes_per_token) / count,
            "hit_ratio": hits / tokens["asked"],
            "local_share": sum(tokens[name] for name in LOCAL) / hits if hits else 0.0,
            "load_max_over_mean": max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0,
            "mean_share": sum(shares) / len(shares),
            "move_count": sum(c.get("balance_move_count", 0) for c in counters),
        },
        [{"workload": workload, **row} for row in decision_rows(place.decisions())],
    )


def _sent_bytes(place: SimPlace) -> Counter[int]:
    """Return the bytes that clients of other nodes have read so far, by server."""
    sent: Counter[int] = Counter()
    for replayer in place.replayers.values():
        for row in replayer.owner_rows():
            sent[row["server"]] += row["sent_bytes"]
    return sent


def sweep(
    workloads: Sequence[str], shares: Sequence[float], *, requests: int, seed: int
) -> Iterator[Run]:
    """Yield every workload with every share."""
    for workload in workloads:
        words = [*WORKLOADS[workload].split(), "--seed", str(seed)]
        words += ["--requests", str(requests)] if requests else []
        options = parse_options(words)
        trace = read_trace(options)
        for share in shares:
            yield measure(workload, trace, fitted(options, trace), share)


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, by workload, the best fixed share and what the adaptive one has on top of it."""
    found = {}
    for workload in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == workload]
        fixed = [row for row in own if row["share"] != ADAPTIVE]
        adaptive = [row for row in own if row["share"] == ADAPTIVE]
        if fixed and adaptive:
            best = min(fixed, key=lambda row: row["ttft_s"])
            found[workload] = {
                "best_share": best["share"],
                "best_ttft_s": best["ttft_s"],
                "adaptive_ttft_s": adaptive[0]["ttft_s"],
                "adaptive_over_best": adaptive[0]["ttft_s"] / best["ttft_s"],
            }
    return found


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each run, and the verdict of each workload."""
    print("workload       share  modelled TTFT  hits   local  load max/mean  share at end  moves")
    for row in rows:
        share = "adaptive" if row["share"] == ADAPTIVE else f"{100 * row['share']:.1f} %"
        print(
            f"{row['workload']:12} {share:>8} {1e3 * row['ttft_s']:11.2f} ms"
            f" {row['hit_ratio']:6.3f} {row['local_share']:6.3f} {row['load_max_over_mean']:14.2f}"
            f" {100 * row['mean_share']:11.1f} % {row['move_count']:6}"
        )
    for workload, verdict in verdicts(rows).items():
        print(
            f"{workload}: adaptive / best fixed share ({100 * verdict['best_share']:.1f} %) = "
            f"{verdict['adaptive_over_best']:.3f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep and record it; 2 where the command line or the data are wrong."""
    parser = argparse.ArgumentParser(prog="python -m experiments.share_sweep")
    add = parser.add_argument
    add(
        "--workloads",
        choices=tuple(WORKLOADS),
        nargs="+",
        default=["power", "zipf"],
        help="mooncake needs PTSTORE_DATA (default: power zipf)",
    )
    add(
        "--requests",
        type=whole_number(0, 1 << 40),
        default=0,
        metavar="COUNT",
        help="the first of each workload; 0: all it has, some minutes (default: 0)",
    )
    add(
        "--shares",
        type=unit_share,
        nargs="+",
        default=FIXED_SHARES,
        metavar="SHARE",
        help=f"fixed ones beside adaptive, 0 to 1 (default: {' '.join(map(str, FIXED_SHARES))})",
    )
    add(
        "--seed",
        type=whole_number(0, 1 << 59),
        default=1,
        help="the only source of chance (default: 1)",
    )
    add(
        "--output",
        default="results",
        metavar="DIR",
        help="the file is DIR/share_sweep/<UTC>_<job id>.h5 (default: results)",
    )
    add("--json", action="store_true", help="print one JSON object in place of the table")
    options = parser.parse_args(argv)
    try:
        folder = Path(options.output) / EXPERIMENT
        record.require_folder(folder)
        rows, path = _record(options, folder)
    except (UsageError, DatasetError, ConfigError, record.RecordError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"file": str(path), "runs": rows, "verdicts": verdicts(rows)}))
    else:
        print_table(rows)
        print(f"results: {path}")
    return 0


def _record(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], Path]:
    started_utc = provenance.utc_now()
    attributes = provenance.collect(
        config={"experiment": vars(options) | {"times": TIMES, "workloads": WORKLOADS}},
        seed=options.seed,
        clients=[provenance.describe_host()],
        started_utc=started_utc,
    ) | {"experiment": EXPERIMENT, **{f"{name}_s_per_gb": value for name, value in TIMES.items()}}
    table = record.Table(DECISIONS.name, {"workload": (record.TEXT, "text"), **DECISIONS.columns})
    rows: list[dict[str, Any]] = []
    shares = (*options.shares, ADAPTIVE)
    stem = f"{started_utc}_{provenance.job_id()}"
    with record.ResultFile(folder, stem, attributes) as file:
        for run in sweep(options.workloads, shares, requests=options.requests, seed=options.seed):
            rows.append(run.row)
            file.append(RUNS, [run.row])
            file.append(table, run.decisions)
            file.flush()
        return rows, file.finish()


if __name__ == "__main__":
    sys.exit(main())
