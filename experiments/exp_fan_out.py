"""Does a hot prefix break its owner? Many nodes load few documents, with fan-out and without.

    python -m experiments.exp_fan_out --nodes 8 64
    python -m experiments.exp_fan_out --nodes 560 --popularity zipf:1.0 --json

Driver = parse -> workload(seed) -> run -> record. The store's own client and server code runs on a
virtual clock where every node has a link of a given speed in each direction; bytes are counted, not
moved. All documents are stored beforehand, each on one node in turn; then every client loads one
document after the other, drawn by popularity. ``replicas``: nodes keep what they fetched;
``fan_out``: owners send readers on to these copies too. No model runs: seconds are those of the
loads alone.

Never averages (that is `experiments.report`), never draws (that is ``plots/``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments import record, report_fan_out
from experiments.common import provenance
from experiments.common.model_presets import MODELS
from experiments.common.options import UsageError
from experiments.common.progress import RunProgress
from experiments.fan_out.jobs import JobError, Setting, run_job
from experiments.fan_out.options import Options, parse_options
from experiments.fan_out.tables import EXPERIMENT, LOADS, NODES, RUNS
from ptstore_mpi import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run all combinations.

    Returns
    -------
    int
        0, or 2 where the command line or a setting is wrong.
    """
    try:
        options = parse_options(argv)
        record.require_folder(Path(options.output) / EXPERIMENT)
        path = run(options)
    except (UsageError, record.RecordError, ConfigError, JobError) as error:
        print(error, file=sys.stderr)
        return 2
    report_fan_out.print_outcome(path, as_json=options.json)
    return 0


def run(options: Options) -> Path:
    """Run all combinations and record each as it ends; return the file."""
    settings = list(settings_of(options))
    progress = RunProgress(len(settings), label=EXPERIMENT, shown=True, counted="runs")
    with _open_file(options) as file, progress:
        for number, setting in enumerate(settings):
            began_s = time.perf_counter()
            done = run_job(setting, number)
            file.append(RUNS, [done.run | {"wall_s": time.perf_counter() - began_s}])
            file.append(NODES, done.nodes)
            file.append(LOADS, done.loads)
            file.flush()
            progress.advance(f"{setting.nodes} nodes, {setting.popularity_name}, {setting.mode}")
        return file.finish()


def settings_of(options: Options) -> Iterator[Setting]:
    """Yield the setting of each run."""
    for nodes in options.nodes:
        for name in options.popularity:
            for mode in options.modes:
                yield Setting(
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


def _open_file(options: Options) -> record.ResultFile:
    started_utc = provenance.utc_now()
    attributes = provenance.collect(
        config={"experiment": options.as_dict()},
        seed=options.seed,
        clients=[provenance.describe_host()],
        started_utc=started_utc,
    )
    attributes |= {
        "experiment": EXPERIMENT,
        "transport": "sim",
        "transport_reason": "bytes are counted, on links of a virtual clock",
        "model": options.model,
        "bytes_per_token": MODELS[options.model].bytes_per_token,
        "context_tokens": options.context_tokens,
        "segment_tokens": options.segment_tokens,
        "memory_bytes_per_node": int(options.memory_gb * 1e9),
        "admission": options.admission,
        "redirect_bytes": int(options.redirect_mb * 1e6),
        "link_bytes_per_s": options.link_gb_per_s * 1e9,
        "latency_s": options.latency_us * 1e-6,
    }
    stem = f"{started_utc}_{provenance.job_id()}"
    return record.ResultFile(Path(options.output) / EXPERIMENT, stem, attributes)


if __name__ == "__main__":
    sys.exit(main())
