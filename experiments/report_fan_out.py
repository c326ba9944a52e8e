"""The report of `exp_fan_out`: what each node sent, and how long loads took, run by run.

Owns the ratios and percentiles. Called by `experiments.report` and at the end of the driver.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from experiments.fan_out.tables import EXPERIMENT, LOADS, NODES, RUNS
from experiments.reading import Columns, ReportError, attribute, open_results, read_columns

SOURCES = ("owned", "replica", "remote")
COUNTS = ("redirect_count", "stale_hint_count", "deferred_count")
PERCENTILES = (50, 90, 99)

__all__ = ["EXPERIMENT", "print_json", "print_outcome", "print_report", "summarise"]


def summarise(file: h5py.File) -> list[dict[str, Any]]:
    """Return one summary per run, as printed by ``--json``; bytes, tokens and seconds.

    Raises
    ------
    ReportError
        Something is missing, or tokens or bytes do not add up.
    """
    runs = read_columns(file, RUNS.name, RUNS.columns)
    nodes = read_columns(file, NODES.name, NODES.columns)
    loads = read_columns(file, LOADS.name, LOADS.columns)
    if not len(runs["run"]):
        raise ReportError(f"{file.filename}: expected at least one run")
    return [
        _summarise_run(file.filename, _row(runs, i), nodes, loads) for i in range(len(runs["run"]))
    ]


def _summarise_run(
    where: str, run: dict[str, Any], nodes: Columns, loads: Columns
) -> dict[str, Any]:
    of_node, of_load = nodes["run"] == run["run"], loads["run"] == run["run"]
    sent, load_s = nodes["sent_bytes"][of_node], loads["load_s"][of_load]
    where = f"{where}: run {run['run']}"
    if len(sent) != run["nodes_count"] or not len(load_s):
        raise ReportError(
            f"{where}: expected {run['nodes_count']} nodes and loads, found {len(sent)} and "
            f"{len(load_s)}"
        )
    if sent.sum() != run["sent_bytes"]:
        raise ReportError(f"{where}: nodes sent {sent.sum()} bytes, the run {run['sent_bytes']}")
    tokens = {name: int(loads[f"{name}_tokens"][of_load].sum()) for name in ("asked", *SOURCES)}
    if sum(tokens[name] for name in SOURCES) != tokens["asked"]:
        raise ReportError(f"{where}: tokens by source do not add up to those asked for: {tokens}")
    percentiles = np.percentile(load_s, PERCENTILES)
    return {
        **run,
        "loads_count": len(load_s),
        "tokens": tokens,
        "hottest_bytes": int(sent.max()),
        "sent_max_over_mean": float(sent.max() / sent.mean()) if sent.any() else 1.0,
        "replica_bytes": int(nodes["replica_bytes"][of_node].sum()),
        "load_s": {f"p{p}": float(v) for p, v in zip(PERCENTILES, percentiles, strict=True)},
    }


def _row(columns: Columns, place: int) -> dict[str, Any]:
    row = {name: values[place] for name, values in columns.items()}
    return {name: v.item() if isinstance(v, np.generic) else v for name, v in row.items()}


def print_outcome(path: Path, *, as_json: bool) -> None:
    """Print what the driver ends with: lines of JSON, or the report and the file's name."""
    if as_json:
        print_json(path)
    else:
        print_report(path)
        print(f"results: {path}")


def print_json(path: Path) -> None:
    """Print the summaries of a result file, one line per run."""
    with open_results(path) as file:
        for row in summarise(file):
            print(json.dumps(row))


def print_report(path: Path) -> None:
    """Print the table of a result file to standard output."""
    from rich.console import Console
    from rich.table import Table

    with open_results(path) as file:
        rows = summarise(file)
        started = attribute(file, "start_utc", "")
        complete = bool(attribute(file, "complete", False))
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    table = Table(title=f"{EXPERIMENT} {started}", title_justify="left")
    for heading in ("nodes", "popularity", "mode", "max/mean", "max GB", "p50 ms",
                    "p99 ms", "all s", "local", "sent on", "stale", "deferred"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    console.print("seconds of a virtual clock: loads alone, no model runs", highlight=False)
    if not complete:
        console.print("[bold]incomplete:[/bold] the run has not ended, or was killed")


def _cells(row: dict[str, Any]) -> list[str]:
    tokens = row["tokens"]
    return [
        str(row["nodes_count"]),
        row["popularity"],
        row["mode"],
        f"{row['sent_max_over_mean']:.2f}",
        f"{row['hottest_bytes'] / 1e9:,.1f}",
        *(f"{row['load_s'][name] * 1e3:,.1f}" for name in ("p50", "p99")),
        f"{row['virtual_s']:.2f}",
        f"{(tokens['owned'] + tokens['replica']) / tokens['asked']:.2f}",
        *(f"{row[name]:,}" for name in COUNTS),
    ]
