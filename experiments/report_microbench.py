"""The report of `exp_microbench`: medians of ours and the reference, and their ratio.

The ratio says how good ours is: 1 is as good as the reference, more is better. Called by
`experiments.report`; a folder means the newest run with all its parts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.microbench.measure import MEASUREMENTS, RATE_UNITS
from experiments.reading import ReportError, attribute, open_results, read_columns

EXPERIMENT = "exp_microbench"


def files_of_run(path: Path) -> list[Path]:
    """Return the files of the run that ``path`` belongs to, by name."""
    with open_results(path) as file:
        run = attribute(file, "run", "")
    found = []
    for other in sorted({path, *path.parent.glob("*.h5")}):
        try:
            with open_results(other) as file:
                if (
                    attribute(file, "experiment") == EXPERIMENT
                    and attribute(file, "run", "") == run
                ):
                    found.append(other)
        except ReportError as error:
            print(f"not reported: {error}", file=sys.stderr)
    return found


def summarise(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one row per name, parameter and wire, as printed by ``--json``."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        with open_results(path) as file:
            columns = read_columns(file, MEASUREMENTS.name, MEASUREMENTS.columns)
            wire = str(attribute(file, "wire", ""))
        if not all((columns[name] > 0).all() for name in ("ours", "reference")):
            raise ReportError(f"{path}: measurements: expected ours and reference above 0")
        unknown = sorted(set(columns["parameter"]) - {"tokens", "size_bytes"})
        if unknown:
            raise ReportError(
                f"{path}: measurements: expected parameter tokens or size_bytes, found {unknown}"
            )
        keys = list(zip(columns["name"], columns["value"].tolist(), strict=True))
        for key in dict.fromkeys(keys):
            mine = np.array([other == key for other in keys])
            rows.append(_summarise_one({k: v[mine] for k, v in columns.items()}, wire))
    return rows


def print_report(paths: Sequence[Path]) -> None:
    """Print a table to standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    rows = summarise(paths)
    with open_results(paths[0]) as file:
        title = f"{EXPERIMENT} {attribute(file, 'run')}: {attribute(file, 'mpi_library')}"
    table = Table(title=title, title_justify="left")
    for heading in ("name", "size", "wire", "ours", "reference", "ratio", "against"):
        right = heading in ("size", "ours", "reference", "ratio")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    console.print("medians; ratio: 1 is as good as the reference, more is better")


def _summarise_one(columns: dict[str, Any], wire: str) -> dict[str, Any]:
    ours, reference = float(np.median(columns["ours"])), float(np.median(columns["reference"]))
    unit = columns["unit"][0]
    row: dict[str, Any] = {
        "name": columns["name"][0],
        columns["parameter"][0]: int(columns["value"][0]),
        "ours": ours,
        "reference": reference,
        "unit": unit,
        "ratio": ours / reference if unit in RATE_UNITS else reference / ours,
        "against": columns["against"][0],
        "repeats": len(columns["ours"]),
    }
    return {**row, "wire": wire} if wire else row


def _cells(row: dict[str, Any]) -> list[str]:
    size = f"{row['tokens']:,} tokens" if "tokens" in row else _bytes(row["size_bytes"])
    return [
        row["name"],
        size,
        row.get("wire", ""),
        _quantity(row["ours"], row["unit"]),
        _quantity(row["reference"], row["unit"]),
        f"{row['ratio']:.2f}",
        row["against"],
    ]


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes/s":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "tokens/s":
        return f"{value / 1e6:.1f} Mtokens/s"
    return f"{value * 1e6:.0f} us" if value < 1e-2 else f"{value:.3f} s"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count} B"
