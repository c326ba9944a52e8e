"""Read a result file and say what it shows: a table, or JSON, one object per line.

    python -m experiments.report FILE_OR_FOLDER [--json]

Owns the averages. Never writes to the file. A folder means its newest ``*.h5``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from experiments import (
    record,
    report_fan_out,
    report_microbench,
    report_trace_replay,
    report_vllm_overhead,
    report_vllm_ttft,
)
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
from ptstore_mpi import SOURCES

TOKENS = ("asked", *SOURCES, "recomputed")
PARTS = ("ttft_s", "match_s", "load_s", "prefill_s", "store_s")
LOGIT_DIFFERENCE_LIMIT = 1e-3
RMA_COUNTER = "rma_bytes"
DISCARDED_COUNTER = "discarded_bytes"
_REPORTS: dict[Any, Any] = {
    module.EXPERIMENT: module
    for module in (report_fan_out, report_trace_replay, report_vllm_overhead, report_vllm_ttft)
}

__all__ = ["ReportError", "find_file", "main", "open_results", "print_report", "summarise"]


def find_file(path: Path) -> Path:
    """Return the file itself, or the newest ``*.h5`` of a folder (and of its subfolders)."""
    if not path.exists():
        raise ReportError(f"{path}: no such file or folder")
    if not path.is_dir():
        return path
    files = sorted(path.rglob("*.h5"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    if not files:
        parts = sorted(path.rglob("*.h5.part"))
        hint = f"; a run that did not end left {parts[-1]}" if parts else ""
        raise ReportError(f"{path}: expected a folder with *.h5 files, found none{hint}")
    return files[-1]


def summarise(file: h5py.File) -> list[dict[str, Any]]:
    """Return one summary per system, in the order in which the systems ran.

    Returns
    -------
    list of dict
        Keys and nesting as printed by ``--json``; seconds, tokens and bytes.

    Raises
    ------
    ReportError
        Samples are missing or the tokens of a request do not add up.
    """
    names = str(attribute(file, "systems", "")).split(",")
    present = [name for name in names if is_group(file, "samples") and holds(file["samples"], name)]
    if not present:
        raise ReportError(f"{file.filename}: expected samples of {names}, found none")
    vanilla = _columns(file, "vanilla") if "vanilla" in present else None
    return [_summarise_system(file, name, vanilla) for name in present]


def _summarise_system(file: h5py.File, name: str, vanilla: Columns | None) -> dict[str, Any]:
    columns = _columns(file, name)
    check_conservation(f"{file.filename}: {name}", columns)
    busy_s = _busy_s(file, name)
    count = len(columns["request"])
    summary: dict[str, Any] = {"system": name, "requests": count}
    summary |= {part: _spread(columns[part]) for part in PARTS}
    summary["requests_per_s"] = count / busy_s if busy_s > 0 else None
    summary["tokens"] = {key: int(columns[f"{key}_tokens"].sum()) for key in TOKENS}
    summary["speedup_by_source"] = _speedup_by_source(columns, vanilla)
    summary[RMA_COUNTER] = counter_total(file, name, RMA_COUNTER)
    exact = attribute(file, "dtype", "float32") == "float32" and _has_logits(file)
    if name == "vanilla":
        summary["outputs_equal"] = True
    elif vanilla is None:
        summary["outputs_equal"] = None
    else:
        summary["outputs_equal"] = _outputs_equal(columns, exact=exact)
    return summary


def _columns(file: h5py.File, name: str) -> Columns:
    columns = read_columns(file, f"samples/{name}", record.SAMPLE_COLUMNS)
    if not len(columns["request"]):
        raise ReportError(f"{file.filename}: samples of {name}: expected at least one row")
    wrong = np.flatnonzero(~(columns["ttft_s"] > 0))
    if wrong.size:
        row = int(wrong[0])
        raise ReportError(
            f"{file.filename}: samples of {name}, request {columns['request'][row]}: expected "
            f"ttft_s above 0, found {columns['ttft_s'][row]}"
        )
    return columns


def _spread(values: npt.NDArray[np.float64]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "mean": float(values.mean())}


def _busy_s(file: h5py.File, name: str) -> float:
    """Sum over batches the time of the slowest client: what the job spent on this system."""
    columns = read_columns(file, f"batches/{name}", record.BATCH_COLUMNS)
    batches, busy = columns["batch"], columns["busy_s"]
    return float(sum(busy[batches == batch].max() for batch in np.unique(batches)))


def _speedup_by_source(columns: Columns, vanilla: Columns | None) -> dict[str, float]:
    """Median of vanilla's TTFT / own TTFT of the same request, by its main source of reuse."""
    if vanilla is None:
        return {}
    reference = dict(zip(vanilla["request"].tolist(), vanilla["ttft_s"].tolist(), strict=True))
    ratios: dict[str, list[float]] = {}
    for row, source in enumerate(main_sources(columns)):
        request = int(columns["request"][row])
        if source != "recomputed" and request in reference:
            ratio = reference[request] / float(columns["ttft_s"][row])
            ratios.setdefault(source, []).append(ratio)
    return {source: float(np.median(ratios[source])) for source in SOURCES if source in ratios}


def main_sources(columns: Columns) -> list[str]:
    """Return, per row, where most of the reused tokens came from; "recomputed" if none were."""
    tokens = np.stack([columns[f"{source}_tokens"] for source in SOURCES])
    return [
        SOURCES[place] if tokens[place, row] > 0 else "recomputed"
        for row, place in enumerate(np.argmax(tokens, axis=0).tolist())
    ]


def _outputs_equal(columns: Columns, *, exact: bool) -> bool:
    """Tell whether all outputs are those of vanilla: the tokens, and if ``exact`` the logits.

    In a narrower dtype than float32 a prompt computed in two parts differs from one computed
    whole by the rounding of other matrix shapes, whoever kept the first part.
    """
    same = columns["same_token"] == 1
    close = columns["max_abs_logit_diff"] <= LOGIT_DIFFERENCE_LIMIT  # nan compares false
    return bool(np.all(same & close if exact else same))


def _has_logits(file: h5py.File) -> bool:
    return attribute(file, "compared", "tokens and logits") != "tokens"


def counter_total(file: h5py.File, name: str, counter: str) -> int:
    """Sum a counter of the store over batches and clients; 0 where a system has none."""
    group = f"batches/{name}/counters"
    if not is_group(file, group):
        return 0
    names = [key for key in file[group] if key == counter or key.endswith(f".{counter}")]
    if not names:
        return 0
    columns = read_columns(file, group, dict.fromkeys(names, ("f8", "1")))
    return int(sum(values[np.isfinite(values)].sum() for values in columns.values()))


def print_report(path: Path) -> None:
    """Print the table of a result file to standard output."""
    from rich.console import Console
    from rich.table import Table

    with open_results(path) as file:
        rows = summarise(file)
        title = (
            f"{attribute(file, 'experiment')} {attribute(file, 'start_utc')}: "
            f"{attribute(file, 'requests_count')} requests, {attribute(file, 'clients_count')} "
            f"clients, {attribute(file, 'servers_count')} servers"
        )
        carried = (
            f"transport {attribute(file, 'transport', 'unknown')}: "
            f"{attribute(file, 'transport_reason', 'unknown')}"
        )
        complete = bool(attribute(file, "complete", False))
        order = f"engine {attribute(file, 'engine', 'transformers')}: systems answered "
        order += str(attribute(file, "order", "in turn"))
        if not _has_logits(file):
            order += "; of the outputs the first tokens were compared, there are no logits"
        notes = [_rma_note(file, row) for row in rows if row["tokens"]["remote"]]
        notes += [_overhead_note(row) for row in rows if row["match_s"]["mean"] > 0]
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    table = Table(title=title, title_justify="left")
    for heading in ("system", "TTFT mean", "p50", "p90", "match", "load", "prefill", "store",
                    "req/s", "speedup by source", "outputs"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    console.print("seconds; match, load, prefill, store are means; store comes after the token")
    console.print(_tokens_table(rows))
    for note in (order, carried, *notes):
        console.print(note, highlight=False)
    if not complete:
        console.print("[bold]incomplete:[/bold] the run has not ended, or was killed")


def _cells(row: dict[str, Any]) -> list[str]:
    speedup = ", ".join(f"{key} {value:.1f}x" for key, value in row["speedup_by_source"].items())
    equal = {True: "equal", False: "DIFFER", None: "not compared"}[row["outputs_equal"]]
    rate = row["requests_per_s"]
    return [
        row["system"],
        *(f"{row['ttft_s'][key]:.3f}" for key in ("mean", "p50", "p90")),
        *(f"{row[part]['mean']:.3f}" for part in PARTS[1:]),
        "-" if rate is None else f"{rate:.3f}",
        speedup or "-",
        equal,
    ]


def _tokens_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="tokens by source", title_justify="left")
    table.add_column("system")
    for key in TOKENS:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(row["system"], *(f"{row['tokens'][key]:,}" for key in TOKENS))
    return table


def _rma_note(file: h5py.File, row: dict[str, Any]) -> str:
    per_token = attribute(file, "bytes_per_token", 0)
    if not isinstance(per_token, int | float | np.number) or not 0 <= per_token < float("inf"):
        raise ReportError(
            f"{file.filename}: attribute 'bytes_per_token': expected a number of bytes, "
            f"found {per_token!r:.80}"
        )
    remote = row["tokens"]["remote"]
    discarded = counter_total(file, row["system"], DISCARDED_COUNTER)
    by = "in messages" if attribute(file, "transport") == "p2p" else "by RMA"
    return (
        f"{row['system']}: {row[RMA_COUNTER]:,} bytes {by}; {remote:,} remote tokens x "
        f"{per_token:,.12g} bytes = {remote * per_token:,.0f}, and {discarded:,} discarded"
    )


def _overhead_note(row: dict[str, Any]) -> str:
    extra_s = row["match_s"]["mean"] + row["store_s"]["mean"]
    whole_s = row["ttft_s"]["mean"] + row["store_s"]["mean"]
    return f"{row['system']}: match + store take {extra_s / whole_s:.2%} of the time of a request"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a report; 1 if there is nothing to report."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__)
    parser.add_argument("path", type=Path, help="a result file, or a folder: its newest *.h5")
    parser.add_argument("--json", action="store_true", help="one JSON object per system per line")
    options = parser.parse_args(argv)
    try:
        path = find_file(options.path)
        with open_results(path) as file:
            experiment = attribute(file, "experiment")
        if experiment == report_microbench.EXPERIMENT:
            parts = report_microbench.files_of_run(path)
            if options.json:
                for row in report_microbench.summarise(parts):
                    print(json.dumps(row))
            else:
                report_microbench.print_report(parts)
        elif experiment in _REPORTS:
            module = _REPORTS[experiment]
            (module.print_json if options.json else module.print_report)(path)
        elif options.json:
            with open_results(path) as file:
                for row in summarise(file):
                    print(json.dumps(row))
        else:
            print_report(path)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
