"""What the stores of a run counted, read from a results file: the command ``ptstore stats``.

Owns the sums: tokens by source, bytes by path, reasons, counters of the servers. Knows the layout
of the files (``samples/``, ``batches/``, ``owners``, ``servers``, ``replica_share``), not the
experiments that wrote them. Never writes into a file, never starts MPI; h5py is wanted here alone.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi.types import SOURCES

__all__ = ["StatsError", "collect", "run"]

SCHEMA_VERSION = 1
_PARTS = (*SOURCES, "recomputed")
_SERVER_KEYS = ("server", "node")  # which server a row is of; all else was counted
# What h5py raises where a file is damaged or an object is of another kind than expected.
_DAMAGE = (OSError, KeyError, RuntimeError, TypeError, ValueError, AttributeError)

_Columns = dict[str, npt.NDArray[Any]]


_WITHOUT_COUNTERS = {
    "exp_fan_out": "plot_fan_out",
    "exp_vllm_ttft": "plot_vllm_ttft",
    "share_sweep": "plot_share_sweep",
}


class StatsError(ValueError):
    """The file is no results file, is damaged, or contradicts itself."""


def run(path: Path, *, as_json: bool) -> int:
    """Print what the stores counted; return the exit code.

    Collective: no, and it starts no MPI.

    Parameters
    ----------
    path
        A results file, finished or not (``*.h5``, ``*.h5.part``).
    as_json
        Print one JSON object in place of the text.

    Returns
    -------
    0, or 1 where the file cannot be read, or 2 where h5py is missing.
    """
    try:
        import_module("h5py")
    except ImportError:
        print(
            "ptstore stats reads HDF5 and needs h5py, which is not installed here: "
            "pip install 'ptstore-mpi[experiments]'",
            file=sys.stderr,
        )
        return 2
    try:
        found = collect(path)
    except StatsError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found) if as_json else "\n".join(_lines(found)))
    return 0


def collect(path: Path) -> dict[str, Any]:
    """Return what the stores of a run counted, as plain values for JSON.

    Returns
    -------
    ``file``, ``experiment``, ``start_utc``, ``complete``, ``transport`` (``name`` and ``reason``);
    ``systems``: by name ``requests``, ``tokens`` (``asked``, and by source ``count`` and
    ``share``), ``bytes`` by path, ``counts`` of other events, ``reasons`` by operation,
    ``servers`` (``count``, ``counters`` with ``sum``, ``max`` and ``max_over_mean``);
    ``replica_share``: by system the columns of the table of decisions, where the file has one.

    Raises
    ------
    StatsError
        There is no such file, or it is none of ours, damaged, or contradicts itself.
    """
    h5py: Any = import_module("h5py")
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "there is no such file"
        raise StatsError(f"{path}: expected a results file, {what}")
    try:
        file = h5py.File(path, "r", locking=False)  # its run may still be writing
    except _DAMAGE as error:
        raise StatsError(f"{path}: not a readable HDF5 file (truncated?): {error}") from None
    with file:
        _check_ours(path, file)
        try:
            return _collect(path, file)
        except _DAMAGE as error:
            if isinstance(error, StatsError):
                raise
            raise StatsError(f"{path}: damaged, or not as expected: {error}") from None


def _check_ours(path: Path, file: Any) -> None:
    try:
        version = file.attrs.get("schema_version")
        ours = version is not None and any(name in file for name in ("samples", "measurements"))
    except _DAMAGE as error:
        raise StatsError(f"{path}: damaged: {error}") from None
    experiment = str(file.attrs.get("experiment", ""))
    if experiment in _WITHOUT_COUNTERS:
        raise StatsError(
            f"{path}: a file of {experiment}, which keeps no counters of stores: "
            f"draw it with python -m plots.{_WITHOUT_COUNTERS[experiment]}"
        )
    if not ours:
        raise StatsError(
            f"{path}: expected a results file with schema_version and samples; this is some other "
            "HDF5 file, or its run ended before the first batch"
        )
    if np.ndim(version) or version != SCHEMA_VERSION:
        raise StatsError(f"{path}: expected schema_version {SCHEMA_VERSION}, found {version!r:.80}")


def _collect(path: Path, file: Any) -> dict[str, Any]:
    said = {
        name: str(file.attrs.get(name, "unknown"))
        for name in ("experiment", "start_utc", "transport", "transport_reason")
    }
    names = list(file["samples"]) if "samples" in file else []
    order = [name for name in str(file.attrs.get("systems", "")).split(",") if name in names]
    order += [name for name in names if name not in order]
    found: dict[str, Any] = {
        "file": str(path),
        "experiment": said["experiment"],
        "start_utc": said["start_utc"],
        "complete": bool(file.attrs.get("complete", False)),
        "transport": {"name": said["transport"], "reason": said["transport_reason"]},
        "systems": {name: _system(path, file, name) for name in order},
    }
    if "decisions" in file:
        found["replica_share"] = dict(_decisions(file["decisions"], order))
    if "replica_share" in file:
        found["replica_share"] = dict(_decisions(file["replica_share"], order))
    return found


def _system(path: Path, file: Any, name: str) -> dict[str, Any]:
    samples = _columns(file[f"samples/{name}"])
    tokens = {key: int(samples[f"{key}_tokens"].sum()) for key in _PARTS}
    asked = int(samples["asked_tokens"].sum())
    if sum(tokens.values()) != asked:
        raise StatsError(
            f"{path}: {name}: expected tokens by source that add up to the {asked} asked for, "
            f"found {tokens}"
        )
    counters = {}
    if f"batches/{name}/counters" in file:
        group = _columns(file[f"batches/{name}/counters"])
        counters = {key: float(np.nansum(values)) for key, values in group.items()}
    return {
        "requests": len(samples["asked_tokens"]),
        "tokens": {
            "asked": asked,
            **{k: {"count": n, "share": n / asked if asked else 0.0} for k, n in tokens.items()},
        },
        "bytes": _bytes(file, counters),
        "counts": _of_kind(counters, "_count"),
        "reasons": _reasons(samples, counters),
        "servers": _servers(file, name),
    }


def _bytes(file: Any, counters: Mapping[str, float]) -> dict[str, int]:
    """Return bytes by path: of the stores' counters, or by owner where these were recorded."""
    counted = _of_kind(counters, "_bytes")
    if not counted and "owners" in file:
        owners = _columns(file["owners"])
        counted = {k: int(v.sum()) for k, v in owners.items() if k.endswith("_bytes")}
    return counted


def _of_kind(counters: Mapping[str, float], ending: str) -> dict[str, int]:
    """Return the counters of the stores that count bytes, or events; by their last name."""
    return {
        name.rpartition(".")[2]: int(value)
        for name, value in sorted(counters.items())
        if name.endswith(ending)
    }


def _reasons(samples: _Columns, counters: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Return reasons by operation: of the stores' counters, else those of the requests."""
    found: dict[str, dict[str, int]] = {}
    for name, value in sorted(counters.items()):
        kind, _, rest = name.partition(".")
        if kind == "reasons" and value > 0:
            operation, _, reason = rest.partition(".")
            found.setdefault(operation, {})[reason] = int(value)
    if not found:
        for operation, column in (("request", "reason"), ("store", "store_reason")):
            texts = [_text(value) for value in samples[column]]
            found[operation] = dict(sorted(Counter(texts).items()))
    return found


def _servers(file: Any, name: str) -> dict[str, Any]:
    """Return the counters of the servers of a system: of its own group, or of the only one."""
    if "servers" not in file:
        return {"count": 0, "counters": {}}
    group = file["servers"]
    if "server" not in group:
        if name not in group:
            return {"count": 0, "counters": {}}
        group = group[name]
    rows = _columns(group)
    counted = {key: values for key, values in rows.items() if key not in _SERVER_KEYS}
    if "counters" in group:
        counted |= _columns(group["counters"])
    return {
        "count": len(rows["server"]),
        "counters": {key: _spread(values) for key, values in counted.items() if len(values)},
    }


def _spread(values: npt.NDArray[Any]) -> dict[str, Any]:
    total, most = float(np.nansum(values)), float(np.nanmax(values))
    ratio = most / (total / len(values)) if total > 0 else None
    return {"sum": int(total), "max": int(most), "max_over_mean": ratio}


def _decisions(group: Any, order: list[str]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Yield the tables of decisions: one for each system, or one in all."""
    columns = _columns(group)
    if columns:
        yield order[0] if len(order) == 1 else "all", _plain(columns)
    for name in group:
        inner = _columns(group[name]) if name not in columns else {}
        if inner:
            yield name, _plain(inner)


def _plain(columns: _Columns) -> dict[str, list[Any]]:
    return {
        name: [_text(v) if isinstance(v, bytes) else v for v in values.tolist()]
        for name, values in columns.items()
    }


def _columns(group: Any) -> _Columns:
    """Return the data sets of a group that have one axis, all equally long."""
    found: _Columns = {}
    for name in group:
        if not hasattr(group[name], "shape"):
            continue
        values = np.asarray(group[name][:])
        if values.ndim != 1 or len(values) != len(next(iter(found.values()), values)):
            raise StatsError(
                f"{group.file.filename}: {group.name}: expected equally long columns of one axis, "
                f"found {name!r} of shape {values.shape}"
            )
        found[name] = values
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# -- the text ------------------------------------------------------------------------------


def _lines(found: dict[str, Any]) -> Iterator[str]:
    end = "" if found["complete"] else "  (incomplete: the run has not ended, or was killed)"
    yield f"{found['experiment']} {found['start_utc']}{end}"
    yield f"transport {found['transport']['name']}: {found['transport']['reason']}"
    if not found["systems"]:
        yield "no store was asked anything in this run: measurements only"
    for name, system in found["systems"].items():
        yield ""
        yield from _system_lines(name, system)
    for name, columns in found.get("replica_share", {}).items():
        yield ""
        yield f"{name}: decisions on the replicas' share"
        rows = [[_shown(value) for value in row] for row in zip(*columns.values(), strict=True)]
        yield from _table(list(columns), rows)


def _system_lines(name: str, system: dict[str, Any]) -> Iterator[str]:
    tokens = dict(system["tokens"])
    asked = tokens.pop("asked")
    yield f"{name}: {system['requests']:,} requests, {asked:,} tokens asked for"
    parts = (f"{k} {part['count']:,} ({part['share']:.1%})" for k, part in tokens.items())
    yield f"  tokens: {', '.join(parts)}"
    if system["bytes"]:
        yield f"  bytes: {_listed(system['bytes'])}"
    if system["counts"]:
        yield f"  counts: {_listed(system['counts'])}"
    for operation, reasons in system["reasons"].items():
        yield f"  reasons, {operation}: {_listed(reasons)}"
    counters = system["servers"]["counters"]
    if counters:
        yield f"  servers: {system['servers']['count']}"
        rows = [
            [key, f"{c['sum']:,}", f"{c['max']:,}", _shown(c["max_over_mean"])]
            for key, c in counters.items()
            if c["sum"]
        ]
        yield from _table(["counter", "sum", "max", "max/mean"], rows)
        if len(rows) < len(counters):
            zeros = ", ".join(key for key, c in counters.items() if not c["sum"])
            yield textwrap.fill(
                f"0: {zeros}", 100, initial_indent=4 * " ", subsequent_indent=7 * " "
            )


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _table(headings: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield f"    {'  '.join(cells)}".rstrip()
