"""The report of `exp_trace_replay`: what a replay found, moved and refused, and the ceilings.

Owns the ratios. Called by `experiments.report` and at the end of the driver.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from experiments.reading import (
    Columns,
    ReportError,
    attribute,
    check_conservation,
    is_group,
    open_results,
    read_columns,
)
from experiments.trace_replay.tables import CEILINGS, EXPERIMENT, OWNERS, REQUESTS
from ptstore_mpi import SOURCES

TOKENS = ("asked", *SOURCES, "recomputed", "stored")
NAMES = ("trace", "transport", "placement", "policy", "routing", "model")
NUMBERS = (
    "nodes_count", "clients_count", "bytes_per_token", "block_tokens", "segment_tokens",
    "memory_tokens_per_node", "memory_bytes_per_node",
)  # fmt: skip
REPLICAS_AND_TIERS = (
    "admission", "replica_max_share", "replica_min_share", "ssd_tokens_per_node",
)  # fmt: skip

__all__ = ["EXPERIMENT", "print_json", "print_outcome", "print_report", "summarise"]


def summarise(file: h5py.File) -> dict[str, Any]:
    """Return the summary of a replay, as printed by ``--json``; tokens, bytes and seconds.

    Raises
    ------
    ReportError
        Something is missing, or the tokens of a request do not add up.
    """
    columns = read_columns(file, REQUESTS.name, REQUESTS.columns)
    _check(file.filename, columns)
    asked = int(columns["asked_tokens"].sum())
    loaded = asked - int(columns["recomputed_tokens"].sum())
    per_token = _number(file, "bytes_per_token")
    tokens = {name: int(columns[f"{name}_tokens"].sum()) for name in TOKENS}
    summary: dict[str, Any] = {name: str(attribute(file, name)) for name in NAMES}
    summary |= {name: int(_number(file, name)) for name in NUMBERS}
    summary |= {name: _setting(file, name) for name in REPLICAS_AND_TIERS}
    summary |= {
        "requests": len(columns["request"]),
        "hit_ratio": {
            "block": _ratio(columns["matched_blocks"].sum(), columns["asked_blocks"].sum()),
            "usable_prefix": loaded / asked,
        },
        "ceiling": _ceilings(file),
        "tokens": tokens,
        "bytes": {
            "loaded_on_node": int((tokens["owned"] + tokens["replica"]) * per_token),
            "loaded_from_other_nodes": int(tokens["remote"] * per_token),
            "stored": int(tokens["stored"] * per_token),
        },
        "stores": dict(sorted(Counter(columns["store_reason"].tolist()).items())),
        **_owner_load(file),
        "seconds": _seconds(columns),
    }
    return summary


def _check(where: str, columns: Columns) -> None:
    if not len(columns["request"]) or columns["asked_tokens"].min() < 1:
        raise ReportError(f"{where}: expected requests that each ask for a token")
    check_conservation(where, columns)


def _number(file: h5py.File, name: str) -> float:
    value = attribute(file, name)
    if not isinstance(value, int | float | np.number) or not 0 < value < float("inf"):
        raise ReportError(
            f"{file.filename}: attribute {name!r}: expected a number above 0, found {value!r:.80}"
        )
    return float(value)


def _setting(file: h5py.File, name: str) -> str | int | float | None:
    """Return a setting that older files lack: None there."""
    value = attribute(file, name)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, int | float | np.number) or not 0 <= value < float("inf"):
        raise ReportError(
            f"{file.filename}: attribute {name!r}: expected a number, found {value!r:.80}"
        )
    return int(value) if isinstance(value, int | np.integer) else float(value)


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0


def _ceilings(file: h5py.File) -> dict[str, Any]:
    """Return both ceilings; None of a run that has not ended."""
    if not is_group(file, CEILINGS.name):
        return {"infinite": None, "belady": None}
    rows = read_columns(file, CEILINGS.name, CEILINGS.columns)
    ssd_tokens = float(file.attrs.get("ssd_tokens_per_node", 0))
    ssd_bytes = ssd_tokens * _number(file, "bytes_per_token")
    own = (_number(file, "memory_bytes_per_node") + ssd_bytes) * _number(file, "nodes_count")
    found = {}
    for name, capacity in (("infinite", 0), ("belady", own)):
        places = np.flatnonzero(rows["capacity_bytes"] == capacity)
        if not places.size:
            raise ReportError(f"{file.filename}: ceilings: expected one of {capacity:.0f} bytes")
        found[name] = {kind: float(rows[kind][places[0]]) for kind in ("block", "usable_prefix")}
    return found


def _owner_load(file: h5py.File) -> dict[str, Any]:
    """Return what the owners sent to other nodes; None where nothing was, or is not known yet."""
    none = {"owner_load_max_over_mean": None, "owner_load_max_bytes": None}
    if not is_group(file, OWNERS.name):
        return none
    rows = read_columns(file, OWNERS.name, OWNERS.columns)
    count = int(_number(file, "servers_count"))
    if len(rows["server"]) and not 0 <= rows["server"].min() <= rows["server"].max() < count:
        raise ReportError(f"{file.filename}: owners: expected servers below {count}")
    sent = np.bincount(rows["server"], weights=rows["sent_bytes"], minlength=count)
    if not sent.sum() > 0:
        return none
    return {
        "owner_load_max_over_mean": float(sent.max() / sent.mean()),
        "owner_load_max_bytes": int(sent.max()),
    }


def _seconds(columns: Columns) -> dict[str, float] | None:
    """Return the sum of the clients' seconds in the store; None where nothing took time."""
    seconds = {part: float(columns[f"{part}_s"].sum()) for part in ("match", "load", "store")}
    return seconds if all(np.isfinite(value) for value in seconds.values()) else None


def print_outcome(path: Path, *, as_json: bool) -> None:
    """Print what the driver ends with: one line of JSON, or the report and the file's name."""
    if as_json:
        print_json(path)
    else:
        print_report(path)
        print(f"results: {path}")


def print_json(path: Path) -> None:
    """Print the summary of a result file, one line."""
    with open_results(path) as file:
        print(json.dumps(summarise(file)))


def print_report(path: Path) -> None:
    """Print the tables of a result file to standard output."""
    from rich.console import Console
    from rich.table import Table

    with open_results(path) as file:
        row = summarise(file)
        started = attribute(file, "start_utc", "")
        complete = bool(attribute(file, "complete", False))
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    console.print(
        f"{EXPERIMENT} {started}: {row['trace']}, {row['requests']:,} requests, "
        f"{row['clients_count']} clients, {row['nodes_count']} nodes of "
        f"{row['memory_tokens_per_node']:,} tokens",
        highlight=False,
    )
    ratios = Table()
    for heading in ("hit ratio", "replay", "belady", "infinite"):
        ratios.add_column(heading, justify="left" if heading == "hit ratio" else "right")
    for kind in ("block", "usable_prefix"):
        ceilings = [row["ceiling"][name] for name in ("belady", "infinite")]
        values = [row["hit_ratio"][kind], *(c[kind] if c else None for c in ceilings)]
        ratios.add_row(kind, *("-" if value is None else f"{value:.4f}" for value in values))
    tokens = Table(title="tokens by source", title_justify="left")
    for name in TOKENS:
        tokens.add_column(name, justify="right")
    tokens.add_row(*(f"{row['tokens'][name]:,}" for name in TOKENS))
    console.print(ratios)
    console.print(tokens)
    for note in _notes(row):
        console.print(note, highlight=False)
    if not complete:
        console.print("[bold]incomplete:[/bold] the run has not ended, or was killed")


def _notes(row: dict[str, Any]) -> list[str]:
    moved = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in row["bytes"].items())
    stores = ", ".join(f"{reason} {count:,}" for reason, count in row["stores"].items())
    notes = [
        f"{row['transport']}, {row['placement']} placement, {row['policy']} eviction, "
        f"{row['routing']} routing, "
        f"{row['bytes_per_token']:,} bytes per token ({row['model']}), "
        f"blocks of {row['block_tokens']} and segments of {row['segment_tokens']} tokens",
        *_tier_notes(row),
        f"bytes: {moved}",
        f"stores: {stores}",
    ]
    if row["owner_load_max_over_mean"] is not None:
        notes.append(
            f"bytes that left an owner's node: max / mean {row['owner_load_max_over_mean']:.2f}, "
            f"max {row['owner_load_max_bytes']:,}"
        )
    if row["seconds"] is not None:
        spent = ", ".join(f"{part} {value:.3f}" for part, value in row["seconds"].items())
        notes.append(f"seconds of all clients: {spent}")
    return notes


def _tier_notes(row: dict[str, Any]) -> list[str]:
    if row["admission"] is None:
        return []
    shares = [row["replica_min_share"] or 0, row["replica_max_share"] or 0]
    ssd_tokens = row["ssd_tokens_per_node"] or 0
    ssd = f"; SSD of {ssd_tokens:,} tokens on each node" if ssd_tokens else ""
    return [f"replicas: {row['admission']}, {shares[0]:.0%} to {shares[1]:.0%} of the memory{ssd}"]
