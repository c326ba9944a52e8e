"""What the figures read: HDF5 alone, checked, so that a file that cannot be drawn is named.

The plots share nothing with the drivers but the schema of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

SCHEMA_VERSION = 1

Columns = dict[str, npt.NDArray[Any]]

# What h5py raises where a file is damaged or an object is of another kind than expected.
_DAMAGE = (OSError, KeyError, RuntimeError, TypeError, ValueError, AttributeError)


class PlotError(ValueError):
    """The file cannot be drawn; says why."""


def open_results(path: Path, group: str) -> h5py.File:
    """Open a result file that holds ``group``.

    Raises
    ------
    PlotError
        Not HDF5, truncated, of another program or of another schema version.
    """
    try:
        file = h5py.File(path, "r", locking=False)  # its run may still be writing
    except _DAMAGE as error:
        raise PlotError(f"{path}: not a readable HDF5 file: {error}") from None
    try:
        version = attributes(file).get("schema_version")
        if np.ndim(version) or version != SCHEMA_VERSION or not is_group(file, group):
            raise PlotError(
                f"{path}: expected {group} with schema_version {SCHEMA_VERSION}, found {version}"
            )
    except PlotError:
        file.close()
        raise
    return file


def save(figure: Any, output: Path) -> Path:
    """Write a figure; the ending decides the format, PNG where there is none. Return its path.

    Raises
    ------
    PlotError
        There is no such folder, it is not writable, or no such format.
    """
    path = output if output.suffix else output.with_suffix(".png")
    if output.is_dir():
        raise PlotError(f"expected the name of a figure, {output} is a folder")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"{path}: {error}") from None
    return path


def attributes(file: h5py.File) -> dict[str, Any]:
    """Return the attributes of a file."""
    try:
        return dict(file.attrs)
    except _DAMAGE as error:
        raise PlotError(f"{file.filename}: attributes: {error}") from None


def is_group(file: h5py.Group, name: str) -> bool:
    """Tell whether there is a group of this name."""
    try:
        return isinstance(file.get(name), h5py.Group)
    except _DAMAGE:
        return False


def read_columns(
    file: h5py.File, group: str, *, numbers: tuple[str, ...], texts: tuple[str, ...] = ()
) -> Columns:
    """Return columns of a group, all of one length.

    Raises
    ------
    PlotError
        A column is missing, damaged, of another type, or longer than another.
    """
    columns = {}
    for name in (*numbers, *texts):
        where = f"{file.filename}: {group}: column {name!r}"
        try:
            dataset = file[group][name]
            values = np.asarray(dataset.asstr()[:] if name in texts else dataset[:])
        except _DAMAGE as error:
            raise PlotError(f"{where}: {error}") from None
        if values.ndim != 1 or values.dtype.kind not in ("O" if name in texts else "iuf"):
            raise PlotError(
                f"{where}: expected one axis of {'texts' if name in texts else 'numbers'}, found "
                f"shape {values.shape}, type {values.dtype}"
            )
        columns[name] = values
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise PlotError(
            f"{file.filename}: {group}: expected equally long columns, found lengths {lengths}"
        )
    return columns


def require_positive(file: h5py.File, group: str, columns: Columns, names: Sequence[str]) -> None:
    """Raise PlotError unless these columns are finite and above 0: they go on log axes."""
    for name in names:
        wrong = columns[name][~(np.isfinite(columns[name]) & (columns[name] > 0))]
        if len(wrong):
            raise PlotError(
                f"{file.filename}: {group}: expected {name} above 0 everywhere, found {wrong[0]}"
            )
