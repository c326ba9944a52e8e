"""The report of `exp_vllm_ttft`: TTFT of every system at every length of the context.

Owns the ratios and percentiles. Called by `experiments.report` and at the end of the driver.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from experiments.reading import (
    Columns,
    ReportError,
    attribute,
    check_conservation,
    holds,
    is_group,
    open_results,
    read_columns,
)
from experiments.vllm_ttft.tables import EXPERIMENT, SAMPLE_COLUMNS, SYSTEMS
from ptstore_mpi import SOURCES

TOKENS = ("asked", *SOURCES, "recomputed")
SPREADS = ("ttft_s", "ttft_cpu_s", "cpu_s", "total_s", "match_s", "load_s")
SPEEDUPS = {"speedup": "ttft_s", "cpu_speedup": "ttft_cpu_s"}

__all__ = ["EXPERIMENT", "print_json", "print_report", "summarise"]


def summarise(file: h5py.File) -> list[dict[str, Any]]:
    """Return one summary per length and system, as printed by ``--json``; seconds and tokens.

    Raises
    ------
    ReportError
        Samples are missing, or the tokens of a request do not add up.
    """
    samples = file["samples"] if is_group(file, "samples") else None
    present = [name for name in SYSTEMS if samples is not None and holds(samples, name)]
    if not present:
        raise ReportError(f"{file.filename}: expected samples of {', '.join(SYSTEMS)}, found none")
    columns = {name: _columns(file, name) for name in present}
    lengths = sorted({int(n) for found in columns.values() for n in found["context_tokens"]})
    rows = []
    for length in lengths:
        here = {name: _of_length(found, length) for name, found in columns.items()}
        here = {name: found for name, found in here.items() if len(found["request"])}
        vanilla = here.get("vanilla")
        rows += [_summarise(name, length, found, vanilla) for name, found in here.items()]
    return rows


def _columns(file: h5py.File, name: str) -> Columns:
    columns = read_columns(file, f"samples/{name}", SAMPLE_COLUMNS)
    where = f"{file.filename}: {name}"
    if not len(columns["request"]):
        raise ReportError(f"{where}: expected at least one row")
    check_conservation(where, columns)
    for name in SPEEDUPS.values():
        _require(where, columns, columns[name] > 0, f"{name} above 0", name)
    _require(
        where, columns, columns["prompt_tokens"] == columns["asked_tokens"],
        "the engine to have seen the prompt that was asked", "prompt_tokens",
    )  # fmt: skip
    return columns


def _require(
    where: str, columns: Columns, right: npt.NDArray[np.bool_], expected: str, name: str
) -> None:
    wrong = np.flatnonzero(~right)
    if wrong.size:
        row = int(wrong[0])
        raise ReportError(
            f"{where}, request {columns['request'][row]}: expected {expected}, found {name} "
            f"{columns[name][row]}"
        )


def _of_length(columns: Columns, length: int) -> Columns:
    rows = columns["context_tokens"] == length
    return {name: values[rows] for name, values in columns.items()}


def _summarise(
    system: str, length: int, columns: Columns, vanilla: Columns | None
) -> dict[str, Any]:
    spreads = {name: _spread(columns[name]) for name in SPREADS}
    speedups = {
        key: None if vanilla is None else float(np.median(vanilla[name])) / spreads[name]["p50"]
        for key, name in SPEEDUPS.items()
    }
    return {
        "system": system,
        "context_tokens": length,
        "requests": len(columns["request"]),
        **spreads,
        **speedups,
        "outputs_equal": bool(np.all(columns["same_tokens"] == columns["output_tokens"])),
        "tokens": {key: int(columns[f"{key}_tokens"].sum()) for key in TOKENS},
        "reasons": sorted(set(columns["reason"])),
    }


def _spread(values: npt.NDArray[np.float64]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    spread = {"p50": p50, "p90": p90, "p99": p99, "mean": values.mean(), "min": values.min()}
    return {name: float(value) for name, value in spread.items()}


def print_json(path: Path) -> None:
    """Print the summaries of a result file, one line per length and system."""
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
        reference = attribute(file, "reference", "unknown")
        run = f"{attribute(file, 'model', 'unknown')}, {attribute(file, 'dtype', 'unknown')}"
        carried = (
            f"transport {attribute(file, 'transport', 'unknown')}: "
            f"{attribute(file, 'transport_reason', 'unknown')}"
        )
        complete = bool(attribute(file, "complete", False))
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    table = Table(title=f"{EXPERIMENT} {started}: {run}", title_justify="left")
    for heading in ("context", "system", "n", "TTFT p50", "p90", "match", "load", "speedup",
                    "CPU", "CPU speedup", "tokens reused", "outputs"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row), end_section=row["system"] == list(SYSTEMS)[-1])
    console.print(table)
    console.print(
        f"seconds; match, load and CPU are medians, CPU is the client's up to the first token; "
        f"outputs are compared with those of {reference}",
        highlight=False,
    )
    console.print(carried, highlight=False)
    for note in _notes(rows):
        console.print(note, highlight=False)
    if not complete:
        console.print("[bold]incomplete:[/bold] the run has not ended, or was killed")


def problems(path: Path) -> list[str]:
    """Return where a run shows what must not be: other outputs, or nothing reused."""
    with open_results(path) as file:
        rows = summarise(file)
        reference = attribute(file, "reference", "vanilla")
    differ = [
        f"{row['system']} at {row['context_tokens']:,} tokens: outputs differ from {reference}'s"
        for row in rows
        if not row["outputs_equal"] and (SYSTEMS[row["system"]] or reference == "vanilla")
    ]
    return differ + _notes(rows)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['context_tokens']:,}",
        row["system"],
        str(row["requests"]),
        *(f"{row['ttft_s'][key]:.3f}" for key in ("p50", "p90")),
        *(f"{row[name]['p50']:.4f}" for name in ("match_s", "load_s")),
        _times(row["speedup"]),
        f"{row['ttft_cpu_s']['p50']:.3f}",
        _times(row["cpu_speedup"]),
        ", ".join(f"{key} {n:,}" for key in SOURCES if (n := row["tokens"][key])) or "-",
        "equal" if row["outputs_equal"] else "DIFFER",
    ]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}x"


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """Say where a system did not do what it is here for."""
    notes = []
    for row in rows:
        source, tokens = SYSTEMS[row["system"]], row["tokens"]
        others = sum(tokens[key] for key in SOURCES if key != source)
        if (source and not tokens[source]) or others:
            notes.append(
                f"{row['system']} at {row['context_tokens']:,} tokens: expected to reuse "
                f"{f'{source} tokens' if source else 'nothing'}, "
                f"reasons {', '.join(row['reasons'])}"
            )
    return notes
