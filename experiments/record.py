"""The HDF5 file of a run: raw samples, appended batch by batch.

Owns the schema, the file's name and its life: written as ``<name>.h5.part``, flushed after every
batch, renamed to ``<name>.h5`` at the end. Never overwrites a file, never averages.

::

    /                       attributes: schema_version, experiment, complete, provenance
    /samples/<system>/      one row per request, in the order they were gathered
        request ttft_s ...  datasets of one axis, attribute `units` on each
    /batches/<system>/      one row per batch and client
        batch client busy_s
        counters/<name>     difference of a numeric counter of store.stats() over the batch
    /servers/<system>/      one row per server, at the end
        server node
        counters/<name>     its counter in store.server_stats()

A file that is still being written, or whose job was killed, opens with h5py and holds every batch
up to the last flush.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

SCHEMA_VERSION = 1
CHUNK_ROWS = 256
LEAST_FREE_BYTES = 1 << 20
TEXT = "text"

# name -> (type, units); the units "1" mark a number without dimension.
SOURCE_COLUMNS: dict[str, tuple[str, str]] = {
    "engine_tokens": ("i8", "tokens"),
    "owned_tokens": ("i8", "tokens"),
    "replica_tokens": ("i8", "tokens"),
    "remote_tokens": ("i8", "tokens"),
    "disk_tokens": ("i8", "tokens"),
    "recomputed_tokens": ("i8", "tokens"),
}
"""Where the tokens of a prompt came from."""
SAMPLE_COLUMNS: dict[str, tuple[str, str]] = {
    "request": ("i8", "1"),
    "client": ("i4", "1"),
    "node": ("i4", "1"),
    "batch": ("i4", "1"),
    "document": ("i8", "1"),
    "question": ("i8", "1"),
    "start_s": ("f8", "s"),
    "ttft_s": ("f8", "s"),
    "match_s": ("f8", "s"),
    "load_s": ("f8", "s"),
    "prefill_s": ("f8", "s"),
    "store_s": ("f8", "s"),
    "asked_tokens": ("i8", "tokens"),
    **SOURCE_COLUMNS,
    "first_token": ("i8", "1"),
    "same_token": ("i1", "1"),  # 1 as vanilla's, 0 another, -1 no vanilla to compare with
    "max_abs_logit_diff": ("f8", "1"),  # nan: no vanilla to compare with
    "stored_bytes": ("i8", "bytes"),
    "reason": (TEXT, "text"),
    "store_reason": (TEXT, "text"),
}
BATCH_COLUMNS: dict[str, tuple[str, str]] = {
    "batch": ("i4", "1"),
    "client": ("i4", "1"),
    "busy_s": ("f8", "s"),
}
SERVER_COLUMNS: dict[str, tuple[str, str]] = {
    "server": ("i4", "1"),
    "node": ("i4", "1"),
}


@dataclass(frozen=True, slots=True)
class Table:
    """One group of equally long datasets."""

    name: str
    columns: Mapping[str, tuple[str, str]]


def samples_of(system: str) -> Table:
    """Return the table of the samples of a system."""
    return Table(f"samples/{system}", SAMPLE_COLUMNS)


def batches_of(system: str) -> Table:
    """Return the table of the batches of a system."""
    return Table(f"batches/{system}", BATCH_COLUMNS)


def servers_of(system: str) -> Table:
    """Return the table of the servers of a system."""
    return Table(f"servers/{system}", SERVER_COLUMNS)


class RecordError(OSError):
    """Results cannot be written where they were asked for."""


def require_folder(folder: Path) -> None:
    """Raise RecordError where the folder of the results can be neither made nor written into."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise RecordError(f"--output: expected a folder, {existing} is a file")
    try:
        Path(tempfile.mkdtemp(prefix=".ptstore-", dir=existing)).rmdir()
    except OSError as error:
        raise RecordError(f"--output: {existing} is not writable: {error.strerror}") from None
    _require_room(existing)


def _require_room(folder: Path) -> None:
    """Raise RecordError on a full disk, before HDF5 meets it and damages the file."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < LEAST_FREE_BYTES:
        raise RecordError(
            f"{folder}: {free_bytes} bytes are free, results want {LEAST_FREE_BYTES} at least"
        )


class ResultFile:
    """A result file that grows; use it as a context manager, on one rank only.

    Leaving the ``with`` block after an error keeps the ``.part`` file, which stays readable.
    """

    def __init__(self, folder: Path, stem: str, attributes: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.part_path = _reserve(folder, stem)
        # The oldest format has no "open for writing" mark, so a killed job's file still opens.
        self._file = h5py.File(self.part_path, "w", libver="earliest")
        self._file.attrs["schema_version"] = SCHEMA_VERSION
        self._file.attrs["complete"] = False
        for name, value in attributes.items():
            self._file.attrs[name] = value
        self._file.flush()

    def append(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows, each with exactly the table's columns."""
        for row in rows:
            if set(row) != set(table.columns):
                odd = sorted(set(row) ^ set(table.columns))
                raise ValueError(f"table {table.name}: rows and columns differ in {odd}")
        _require_room(self.part_path.parent)
        group = self._file.require_group(table.name)
        start = _row_count(group)
        for name, (kind, units) in table.columns.items():
            dataset = _column(group, name, kind=kind, units=units)
            dataset.resize((start + len(rows),))
            dataset[start:] = np.array(
                [row[name] for row in rows], dtype=object if kind == TEXT else kind
            )

    def append_counted(
        self,
        table: Table,
        rows: Sequence[Mapping[str, Any]],
        counters: Sequence[Mapping[str, float]],
    ) -> None:
        """Append rows with their counters; a counter first seen now is nan before."""
        self.append(table, rows)
        group = self._file[table.name]
        count = _row_count(group)
        inner = group.require_group("counters")
        names = sorted({name for row in counters for name in row} | set(inner))
        for name in names:
            dataset = _column(inner, name, kind="f8", units=_units(name))
            dataset.resize((count,))
            dataset[count - len(rows) :] = [row.get(name, np.nan) for row in counters]

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes to the file."""
        for name, value in attributes.items():
            self._file.attrs[name] = value

    def flush(self) -> None:
        """Make everything appended so far readable by others."""
        self._file.flush()

    def finish(self) -> Path:
        """Mark the file complete, close it and give it its final name.

        Raises
        ------
        FileExistsError
            Somebody else took the final name meanwhile; the ``.part`` file stays.
        """
        self._file.attrs["complete"] = True
        self._file.close()
        _rename_without_overwriting(self.part_path, self.path)
        return self.path

    def close(self) -> None:
        """Close the file as it is; without `finish` it keeps the name ``.part``."""
        if self._file:
            self._file.close()

    def __enter__(self) -> ResultFile:
        """Return the file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


def flatten_counters(stats: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a nested mapping under dotted names; everything else is left out."""
    flat: dict[str, float] = {}
    for key, value in stats.items():
        name = f"{prefix}{key}".replace("/", "_")
        if isinstance(value, Mapping):
            flat.update(flatten_counters(value, f"{name}."))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return after - before; a counter that was not there before started at 0."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _row_count(group: h5py.Group) -> int:
    lengths = [len(value) for value in group.values() if isinstance(value, h5py.Dataset)]
    return max(lengths, default=0)


def _column(group: h5py.Group, name: str, *, kind: str, units: str) -> h5py.Dataset:
    if name in group:
        return group[name]
    dtype = h5py.string_dtype() if kind == TEXT else np.dtype(kind)
    fill = {"fillvalue": np.nan} if kind == "f8" else {}
    dataset = group.create_dataset(
        name, shape=(0,), maxshape=(None,), chunks=(CHUNK_ROWS,), dtype=dtype, **fill
    )
    dataset.attrs["units"] = units
    return dataset


def _units(name: str) -> str:
    first, _, _ = name.partition(".")
    if first in ("tokens", "seconds"):  # store.stats() groups counters by their unit
        return {"tokens": "tokens", "seconds": "s"}[first]
    for suffix, units in (("_bytes", "bytes"), ("_tokens", "tokens"), ("_us", "us"), ("_s", "s")):
        if name.endswith(suffix):
            return units
    return "1"


def _reserve(folder: Path, stem: str) -> tuple[Path, Path]:
    """Find a name that neither a finished nor an unfinished file has, and take it."""
    number = 1
    while True:
        name = stem if number == 1 else f"{stem}-{number}"
        final, part = folder / f"{name}.h5", folder / f"{name}.h5.part"
        number += 1
        if final.exists():
            continue
        with contextlib.suppress(FileExistsError):
            part.open("x").close()
            return final, part


def _rename_without_overwriting(source: Path, target: Path) -> None:
    # rename() would replace a file; link() refuses. Some file systems have no links.
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if target.exists():
            raise FileExistsError(f"will not overwrite {target}; kept {source}") from None
        source.rename(target)
        return
    source.unlink()
