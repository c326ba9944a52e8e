"""Does a hot prefix break its owner? Many nodes load few documents, with fan-out and without.

    python -m experiments.exp_fan_out --nodes 8 64
    python -m experiments.exp_fan_out --nodes 560 --popularity zipf:1.0 --json

Driver = parse -> workload(seed) -> run -> record. The store's own client and server code runs on a
virtual clock where every node has a link of a given speed in each direction; bytes are counted, not
moved. All documents are stored beforehand, each on one node in turn; then every client loads one
document after the other, drawn by popularity. ``replicas``: nodes keep what they fetched;
``fan_out``: owners send readers on to these copies too. No model runs: seconds are those of the
loads alone.

Never draws (that is ``plots/``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import record
from experiments.common import provenance
from experiments.common.model_presets import MODELS
from experiments.common.options import popularity, positive
from experiments.fan_out.jobs import EXPERIMENT, LOADS, NODES, RUNS, Setting, run_job
from ptstore_mpi import ConfigError

MODES = ("replicas", "fan_out")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all combinations; 2 where the command line is wrong."""
    options = _parser().parse_args(argv)
    try:
        record.require_folder(Path(options.output) / EXPERIMENT)
        path = _run(options)
    except (record.RecordError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    if not options.json:
        print(f"results: {path}")
    return 0


def _run(options: argparse.Namespace) -> Path:
    started_utc = provenance.utc_now()
    attributes = provenance.collect(
        config={"experiment": vars(options)},
        seed=options.seed,
        clients=[provenance.describe_host()],
        started_utc=started_utc,
    )
    stem = f"{started_utc}_{provenance.job_id()}"
    folder = Path(options.output) / EXPERIMENT
    with record.ResultFile(folder, stem, {**attributes, "experiment": EXPERIMENT}) as file:
        number = 0
        for nodes in options.nodes:
            for name in options.popularity:
                for mode in options.modes:
                    setting = _setting(options, nodes=nodes, name=name, mode=mode)
                    began_s = time.perf_counter()
                    done = run_job(setting, number)
                    row = done.run | {"wall_s": time.perf_counter() - began_s}
                    file.append(RUNS, [row])
                    file.append(NODES, done.nodes)
                    file.append(LOADS, done.loads)
                    file.flush()
                    _say(row, as_json=options.json)
                    number += 1
        return file.finish()


def _setting(options: argparse.Namespace, *, nodes: int, name: str, mode: str) -> Setting:
    return Setting(
        nodes=nodes,
        clients_per_node=options.clients_per_node,
        documents=options.documents_per_node * nodes,
        popularity_name=name,
        mode=mode,
        loads=options.loads,
        context_tokens=options.context_tokens,
        segment_tokens=options.segment_tokens,
        bytes_per_token=MODELS[options.model].bytes_per_token,
        memory_bytes=int(options.memory_gb * 1e9),
        link_bytes_per_s=options.link_gb_per_s * 1e9,
        latency_s=options.latency_us * 1e-6,
        admission=options.admission,
        redirect_bytes=int(options.redirect_mb * 1e6),
        seed=options.seed,
    )


def _say(row: dict[str, Any], *, as_json: bool) -> None:
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in row.items()}
    if as_json:
        print(json.dumps(plain), flush=True)
        return
    print(
        f"{row['nodes_count']:4d} nodes  {row['popularity']:9s} {row['mode']:9s} "
        f"sent max/mean {row['sent_max_over_mean']:6.2f}, hottest {row['hottest_bytes'] / 1e9:9.1f}"
        f" GB; load p50 {row['load_p50_s'] * 1e3:8.1f} p99 {row['load_p99_s'] * 1e3:9.1f} ms, "
        f"all {row['virtual_s']:8.2f} s; local {row['local_share']:.2f}   ({row['wall_s']:.0f} s)",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.exp_fan_out",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=positive, nargs="+", default=[8, 64], metavar="COUNT")
    add("--popularity", type=popularity, nargs="+", default=["zipf:1.0", "power:6"])
    add("--modes", choices=MODES, nargs="+", default=list(MODES))
    add("--clients-per-node", type=positive, default=1, metavar="COUNT")
    add("--documents-per-node", type=positive, default=16, metavar="COUNT")
    add("--loads", type=positive, default=48, metavar="COUNT", help="of each client (default: 48)")
    add("--context-tokens", type=positive, default=4096, metavar="TOKENS")
    add("--segment-tokens", type=positive, default=1024, metavar="TOKENS")
    add("--model", choices=MODELS, default="mistral-7b")
    add("--memory-gb", type=float, default=64.0, metavar="GB", help="of each node (default: 64)")
    add("--link-gb-per-s", type=float, default=25.0, metavar="GB", help="(default: 25)")
    add("--latency-us", type=float, default=5.0, metavar="US", help="of a message (default: 5)")
    add("--admission", choices=("second_hit", "always"), default="always")
    add("--redirect-mb", type=float, default=64.0, metavar="MB", help="redirect_bytes of fan_out")
    add("--seed", type=positive, default=1)
    add("--json", action="store_true", help="one JSON line per run")
    add("--output", default="results", metavar="DIR", help="the file is DIR/exp_fan_out/...")
    return parser


if __name__ == "__main__":
    sys.exit(main())
