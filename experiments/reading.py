"""Columns and attributes of result files, checked: whatever is wrong is a `ReportError`.

Owns how a file is opened and read, never what its numbers mean. A file may be truncated, of
another program, or lack what we look for; the error names the file and the place in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from experiments import record
from ptstore_mpi import SOURCES

Columns = dict[str, npt.NDArray[Any]]

# What h5py raises where a file is damaged or an object is of another kind than expected.
_DAMAGE = (OSError, KeyError, RuntimeError, TypeError, ValueError, AttributeError)


class ReportError(ValueError):
    """The file is no result file, is damaged, or contradicts itself."""


def open_results(path: Path) -> h5py.File:
    """Open a result file for reading.

    Raises
    ------
    ReportError
        Not HDF5, truncated, not ours, or of another schema version.
    """
    try:
        file = h5py.File(path, "r", locking=False)  # its run may still be writing
    except _DAMAGE as error:
        raise ReportError(f"{path}: not a readable HDF5 file (truncated?): {error}") from None
    try:
        version = attribute(file, "schema_version")
        if version is None or not any(is_group(file, n) for n in ("samples", "measurements")):
            raise ReportError(
                f"{path}: expected a result file with schema_version and samples; this is some "
                "other HDF5 file, or its run ended before the first batch"
            )
        if isinstance(version, str) or version != record.SCHEMA_VERSION:
            raise ReportError(
                f"{path}: expected schema_version {record.SCHEMA_VERSION}, found {version}"
            )
    except ReportError:
        file.close()
        raise
    return file


def attribute(file: h5py.File, name: str, default: Any = None) -> Any:
    """Return a single number or text among the attributes of a file, or the default."""
    try:
        value = file.attrs.get(name, default)
    except _DAMAGE as error:
        raise ReportError(f"{file.filename}: attribute {name!r}: {error}") from None
    if isinstance(value, h5py.Empty) or np.ndim(value):
        raise ReportError(
            f"{file.filename}: attribute {name!r}: expected one value, found {value!r:.80}"
        )
    return value


def holds(group: h5py.Group, name: str) -> bool:
    """Tell whether there is anything of this name."""
    try:
        return bool(name) and name in group
    except _DAMAGE:
        return False


def is_group(file: h5py.Group, name: str) -> bool:
    """Tell whether there is a group of this name."""
    try:
        return bool(name) and isinstance(file.get(name), h5py.Group)
    except _DAMAGE:
        return False


def read_columns(file: h5py.File, name: str, columns: Mapping[str, tuple[str, str]]) -> Columns:
    """Return the columns of a table, all of one length.

    Parameters
    ----------
    file
        An open result file.
    name
        Group of the table.
    columns
        Type and units by name, as in `record.Table`.

    Raises
    ------
    ReportError
        A column is missing, damaged, not of numbers (or texts), or longer than another.
    """
    where = f"{file.filename}: {name.replace('samples/', 'samples of ')}"
    if not is_group(file, name):
        raise ReportError(f"{where}: expected a group, found none")
    found = {key: _column(where, file[name], key, kind) for key, (kind, _) in columns.items()}
    lengths = {key: len(values) for key, values in found.items()}
    if len(set(lengths.values())) != 1:
        raise ReportError(f"{where}: expected equally long columns, found lengths {lengths}")
    return found


def _column(where: str, group: h5py.Group, name: str, kind: str) -> npt.NDArray[Any]:
    try:
        dataset = group[name]
        values = np.asarray(dataset.asstr()[:] if kind == record.TEXT else dataset[:])
    except _DAMAGE as error:
        raise ReportError(f"{where}: column {name!r}: {error}") from None
    wanted = "O" if kind == record.TEXT else "iuf" if kind.startswith("f") else "iu"
    if values.ndim != 1 or values.dtype.kind not in wanted:
        raise ReportError(
            f"{where}: column {name!r}: expected one axis of type {kind}, found shape "
            f"{values.shape}, type {values.dtype}"
        )
    return values


def check_conservation(where: str, columns: Columns) -> None:
    """Raise ReportError unless the tokens of every request by source add up to those asked for."""
    parts = np.sum([columns[f"{key}_tokens"] for key in (*SOURCES, "recomputed")], axis=0)
    wrong = np.flatnonzero(parts != columns["asked_tokens"])
    if wrong.size:
        row = int(wrong[0])
        raise ReportError(
            f"{where}, request {columns['request'][row]}: tokens by source add up to {parts[row]}, "
            f"asked were {columns['asked_tokens'][row]}"
        )
