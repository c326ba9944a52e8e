"""Draw a run of `exp_microbench`: ratio of ours to its reference against size, in panels.

    python plots/plot_microbench.py FILE_OR_FOLDER [-o FIGURE.png]

Reads HDF5 only; a folder means its newest run. Every mark is a median, the bar behind it the
quartiles over repeats; 1 is as good as the reference, more is better.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

if __package__:
    from plots import results_file, style
    from plots.results_file import PlotError
else:  # started by its path: its own folder is on the search path
    import results_file
    import style
    from results_file import PlotError

EXPERIMENT = "exp_microbench"
RATES = ("bytes/s", "tokens/s")
TITLES = {"local": "on the node, against memcpy", "remote": "another node, against one MPI_Rget"}
MARKERS = "osD^vPX*"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#000000")


def read(path: Path) -> dict[str, dict[int, list[float]]]:
    """Return the ratios of a run by name and size in bytes, one per repeat.

    Raises
    ------
    PlotError
        Nothing of this experiment is there.
    """
    files = sorted(path.rglob("*.h5")) if path.is_dir() else [path]
    parts: list[tuple[str, Path]] = []
    for each in files:
        try:
            with results_file.open_results(each, "measurements") as file:
                attributes = results_file.attributes(file)
        except PlotError as error:
            if each == path:
                raise
            print(f"not drawn: {error}", file=sys.stderr)
            continue
        if str(attributes.get("experiment")) == EXPERIMENT:
            parts.append((str(attributes.get("run", "")), each))
    if not parts:
        raise PlotError(f"{path}: expected results of {EXPERIMENT}, found none")
    run = max(parts)[0]
    series: dict[str, dict[int, list[float]]] = {}
    for found, each in parts:
        if found == run:
            _read_part(each, series)
    if not series:
        raise PlotError(f"{path}: expected loads or stores of some size in run {run}, found none")
    return series


def _read_part(path: Path, series: dict[str, dict[int, list[float]]]) -> None:
    texts, numbers = ("name", "parameter", "unit"), ("value", "ours", "reference")
    with results_file.open_results(path, "measurements") as file:
        wire = str(results_file.attributes(file).get("wire", ""))
        columns = results_file.read_columns(file, "measurements", numbers=numbers, texts=texts)
        results_file.require_positive(file, "measurements", columns, ("ours", "reference"))
    rows = zip(*(columns[name] for name in (*texts, *numbers)), strict=True)
    for name, parameter, unit, value, ours, reference in rows:
        if parameter == "size_bytes" and value:
            ratio = ours / reference if unit in RATES else reference / ours
            label = f"{name} ({wire})" if wire else name
            series.setdefault(label, {}).setdefault(int(value), []).append(float(ratio))


def draw(series: dict[str, dict[int, list[float]]], output: Path) -> Path:
    """Write the figure, a panel per group, and return its path; the ending decides the format."""
    style.apply()
    groups: dict[str, list[str]] = {}
    for name in sorted(series):
        if len(series[name]) > 1:  # one size is no curve
            groups.setdefault(name.partition("_")[0], []).append(name)
    if not groups:  # of a first try: one size of everything
        groups = {"": sorted(series)}
    width, height = style.FIGURE_INCHES
    figure, panels = plt.subplots(
        1, len(groups), figsize=(width, height), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (group, names) in zip(panels[0], groups.items(), strict=True):
        axes.axhline(1.0, color="#444444", linewidth=0.8, linestyle="--")
        for place, name in enumerate(names):
            _draw_one(axes, name, series[name], place=place)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(axis="both")
        axes.set_xlabel("size (MiB)")
        axes.set_title(TITLES.get(group, group))
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.13), ncols=2)
    panels[0][0].set_ylabel("ours / reference (1: as good; bars: quartiles)")
    path = results_file.save(figure, output)
    plt.close(figure)
    return path


def _draw_one(axes: Any, name: str, sizes: dict[int, list[float]], *, place: int) -> None:
    x = np.array(sorted(sizes)) / (1 << 20)
    low, middle, high = np.transpose(
        [np.percentile(sizes[size], (25, 50, 75)) for size in sorted(sizes)]
    )
    colour = COLOURS[place % len(COLOURS)]
    axes.vlines(x, low, high, color=colour, linewidth=3, alpha=0.3)
    axes.plot(
        x, middle, marker=MARKERS[place % len(MARKERS)], color=colour, label=name,
        linewidth=1.2, markersize=5,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one run; 1 if it cannot be drawn."""
    parser = argparse.ArgumentParser(prog="plot_microbench.py", description=__doc__)
    parser.add_argument("path", type=Path, help="a result of exp_microbench, or a folder of them")
    parser.add_argument("-o", "--output", type=Path, help="default: microbench.png beside it")
    options = parser.parse_args(argv)
    try:
        series: dict[str, Any] = read(options.path)
        folder = options.path if options.path.is_dir() else options.path.parent
        output = draw(series, options.output or folder / "microbench.png")
    except PlotError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"figure: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
