"""The report of `exp_vllm_overhead`: what the connector costs where nothing is reused.

Owns the ratios, batch by batch. Called by `experiments.report` and at the end of the driver.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    open_results,
    read_columns,
)
from experiments.vllm_overhead.tables import (
    BATCH_COLUMNS,
    CONNECTOR,
    EXPERIMENT,
    PLAIN,
    SAMPLE_COLUMNS,
    SYSTEMS,
)
from ptstore_mpi import SOURCES

TOKENS = ("asked", *SOURCES, "recomputed")
CLOCKS = ("wall_s", "cpu_s", "settled_s", "settled_cpu_s")
RATIOS = {  # name -> what it is
    "requests_per_s": "requests/s",
    "requests_per_s_settled": "requests/s with saves",
    "ttft_s": "TTFT",
    "cpu_s": "CPU",
    "cpu_s_settled": "CPU with saves",
}
DONE = {"stored", "known", "dedup"}

__all__ = ["EXPERIMENT", "print_json", "print_report", "summarise"]


@dataclass(frozen=True, slots=True)
class _System:
    """What is in the file of one system; `ttft_s` is the median of each batch."""

    samples: Columns
    batches: Columns
    ttft_s: npt.NDArray[np.float64]


def summarise(file: h5py.File) -> list[dict[str, Any]]:
    """Return one summary per system and then the ratios, as printed by ``--json``.

    Raises
    ------
    ReportError
        Samples are missing, the systems answered other batches, or the tokens of a request do not
        add up.
    """
    found = {name: _read(file, name) for name in SYSTEMS}
    plain, connector = found[PLAIN], found[CONNECTOR]
    if not np.array_equal(plain.batches["batch"], connector.batches["batch"]):
        raise ReportError(f"{file.filename}: expected the same batches of {' and '.join(SYSTEMS)}")
    systems = [_summarise(name, of_system) for name, of_system in found.items()]
    return [*systems, _compare(plain, connector)]


def _read(file: h5py.File, name: str) -> _System:
    where = f"{file.filename}: {name}"
    samples = read_columns(file, f"samples/{name}", SAMPLE_COLUMNS)
    batches = read_columns(file, f"batches/{name}", BATCH_COLUMNS)
    if not len(batches["batch"]):
        raise ReportError(f"{where}: expected at least one batch")
    check_conservation(where, samples)
    _require(where, "request", samples, samples["ttft_s"] > 0, "ttft_s above 0", "ttft_s")
    _require(
        where, "request", samples, samples["prompt_tokens"] == samples["asked_tokens"],
        "the engine to have seen the prompt that was asked", "prompt_tokens",
    )  # fmt: skip
    for clock in CLOCKS:
        _require(where, "batch", batches, batches[clock] > 0, f"{clock} above 0", clock)
    numbers = batches["batch"]
    if sorted(set(samples["batch"])) != sorted(numbers):
        raise ReportError(f"{where}: expected one row for each batch of the samples")
    medians = [float(np.median(samples["ttft_s"][samples["batch"] == one])) for one in numbers]
    return _System(samples, batches, np.array(medians))


def _require(
    where: str, key: str, columns: Columns, right: npt.NDArray[np.bool_], expected: str, name: str
) -> None:
    wrong = np.flatnonzero(~right)
    if wrong.size:
        row = int(wrong[0])
        raise ReportError(
            f"{where}, {key} {columns[key][row]}: expected {expected}, found {name} "
            f"{columns[name][row]}"
        )


def _summarise(name: str, found: _System) -> dict[str, Any]:
    samples, batches = found.samples, found.batches
    count = len(samples["request"])
    total = {clock: float(batches[clock].sum()) for clock in CLOCKS}
    p50, p90, p99 = np.percentile(samples["ttft_s"], (50, 90, 99))
    return {
        "system": name,
        "requests": count,
        "ttft_s": {
            "p50": float(p50), "p90": float(p90), "p99": float(p99),
            "mean": float(samples["ttft_s"].mean()),
        },
        "requests_per_s": count / total["wall_s"],
        "requests_per_s_settled": count / total["settled_s"],
        "cpu_s": total["cpu_s"] / count,
        "cpu_s_settled": total["settled_cpu_s"] / count,
        "match_s": float(np.median(samples["match_s"])),
        "stored_bytes": int(samples["stored_bytes"].sum()),
        "store_reasons": sorted({part for r in samples["store_reason"] for part in r.split("+")}),
        "reasons": sorted(set(samples["reason"])),
        "tokens": {key: int(samples[f"{key}_tokens"].sum()) for key in TOKENS},
        "first_tokens_equal": bool(np.all(samples["same_tokens"] > 0)),
        "outputs_equal": bool(np.all(samples["same_tokens"] == samples["output_tokens"])),
    }  # fmt: skip


def _compare(plain: _System, connector: _System) -> dict[str, Any]:
    """Return connector / plain: quartiles over the batches, each with itself."""
    ours, other = connector.batches, plain.batches
    ratios = {
        "requests_per_s": other["wall_s"] / ours["wall_s"],
        "requests_per_s_settled": other["settled_s"] / ours["settled_s"],
        "ttft_s": connector.ttft_s / plain.ttft_s,
        "cpu_s": ours["cpu_s"] / other["cpu_s"],
        "cpu_s_settled": ours["settled_cpu_s"] / other["settled_cpu_s"],
    }
    quartiles = {name: np.percentile(values, (25, 50, 75)) for name, values in ratios.items()}
    return {
        "ratio": f"{CONNECTOR} / {PLAIN}",
        "batches": len(ours["batch"]),
        **{
            name: dict(zip(("p25", "p50", "p75"), map(float, found), strict=True))
            for name, found in quartiles.items()
        },
    }


def print_json(path: Path) -> None:
    """Print the summaries of a result file, one line per system, and one with the ratios."""
    with open_results(path) as file:
        for row in summarise(file):
            print(json.dumps(row))


def print_report(path: Path) -> None:
    """Print the tables of a result file to standard output."""
    from rich.console import Console

    with open_results(path) as file:
        *systems, ratios = summarise(file)
        title = (
            f"{EXPERIMENT} {attribute(file, 'start_utc', '')}: "
            f"{attribute(file, 'model', 'unknown')}, {attribute(file, 'dtype', 'unknown')}, "
            f"{attribute(file, 'context_tokens', 'unknown')} tokens of context"
        )
        complete = bool(attribute(file, "complete", False))
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    console.print(_systems_table(title, systems))
    console.print(
        "seconds; CPU is the client's for each request, to the last token, and to the end of the "
        "last save; the server's is not in it",
        highlight=False,
    )
    console.print(_ratios_table(ratios))
    for note in _notes(systems):
        console.print(note, highlight=False)
    if not complete:
        console.print("[bold]incomplete:[/bold] the run has not ended, or was killed")


def _systems_table(title: str, systems: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("system", "n", "TTFT p50", "p90", "match", "req/s", "with saves", "CPU",
                    "with saves", "MB saved", "outputs"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in systems:
        table.add_row(
            row["system"],
            str(row["requests"]),
            *(f"{row['ttft_s'][key]:.3f}" for key in ("p50", "p90")),
            f"{row['match_s']:.4f}",
            *(f"{row[name]:.3f}" for name in RATIOS if name != "ttft_s"),
            f"{row['stored_bytes'] / 1e6:,.1f}",
            "equal" if row["outputs_equal"] else "DIFFER",
        )
    return table


def _ratios_table(ratios: dict[str, Any]) -> Any:
    from rich.table import Table

    title = f"{ratios['ratio']}, over {ratios['batches']} batches"
    table = Table(title=title, title_justify="left")
    for heading in ("of", "median", "quartiles"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, what in RATIOS.items():
        low, middle, high = (ratios[name][key] for key in ("p25", "p50", "p75"))
        table.add_row(what, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    return table


def _notes(systems: list[dict[str, Any]]) -> list[str]:
    """Say where a system did not do what it is here for."""
    notes = []
    for row in systems:
        reused = sum(row["tokens"][key] for key in SOURCES)
        if reused:
            notes.append(f"{row['system']}: expected to reuse nothing, reused {reused:,} tokens")
        reasons = set(row["store_reasons"])
        if row["system"] == CONNECTOR and (not row["stored_bytes"] or reasons - DONE):
            notes.append(
                f"{row['system']}: expected all prompts to be saved, "
                f"reasons {', '.join(sorted(reasons))}"
            )
    return notes
