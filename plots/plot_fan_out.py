"""Draw a result of `exp_fan_out`: what each node sent, and how long loads took.

    python plots/plot_fan_out.py FILE_OR_FOLDER [-o FIGURE.png]

Reads HDF5 only; a folder means its newest ``*.h5``. A row for each number of nodes and popularity,
a line for each mode. Left: bytes sent by each node, most first. Right: percentiles of load times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

if __package__:
    from plots import results_file, style
    from plots.results_file import PlotError
else:  # started by its path: its own folder is on the search path
    import results_file
    import style
    from results_file import PlotError

EXPERIMENT = "exp_fan_out"
MODES = {  # mode -> (label, colour, line, marker)
    "replicas": ("without fan-out", "#D55E00", "--", "^"),
    "fan_out": ("with fan-out", "#0072B2", "-", "o"),
}
PERCENTILES = np.array([1, 5, 10, 25, 50, 75, 90, 95, 99, 100])
MOST_ROWS = 12
ROW_INCHES = 2.6


@dataclass(frozen=True, slots=True)
class Run:
    """The columns of one run that the figure needs; bytes and seconds."""

    nodes: int
    popularity: str
    mode: str
    sent_bytes: npt.NDArray[np.int64]
    load_s: npt.NDArray[np.float64]


def find_file(path: Path) -> Path:
    """Return the file itself, or the newest ``*.h5`` below a folder."""
    if not path.is_dir():
        return path
    files = sorted(path.rglob("*.h5"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    if not files:
        raise PlotError(f"{path}: expected a folder with *.h5 files, found none")
    return files[-1]


def read(path: Path) -> list[Run]:
    """Read the runs of a result file.

    Raises
    ------
    PlotError
        Not HDF5, not a result of this experiment, or one that cannot be drawn.
    """
    with results_file.open_results(path, "samples") as file:
        if str(results_file.attributes(file).get("experiment")) != EXPERIMENT:
            raise PlotError(f"{path}: expected results of {EXPERIMENT}")
        texts = ("popularity", "mode")
        runs = results_file.read_columns(file, "runs", numbers=("run", "nodes_count"), texts=texts)
        nodes = results_file.read_columns(file, "nodes", numbers=("run", "sent_bytes"))
        loads = results_file.read_columns(file, "samples/loads", numbers=("run", "load_s"))
    if not np.isfinite(loads["load_s"]).all():
        raise PlotError(f"{path}: samples/loads: expected load_s to be finite everywhere")
    found = []
    for number, count, name, mode in zip(*runs.values(), strict=True):
        sent = nodes["sent_bytes"][nodes["run"] == number]
        load_s = loads["load_s"][loads["run"] == number]
        if not len(sent) or not len(load_s) or mode not in MODES:
            raise PlotError(
                f"{path}: run {number}: expected nodes, loads and a mode of {', '.join(MODES)}, "
                f"found {len(sent)}, {len(load_s)} and {mode!r:.80}"
            )
        found.append(Run(int(count), name, mode, np.sort(sent)[::-1], load_s))
    if not found:
        raise PlotError(f"{path}: runs: expected at least one row")
    return found


def draw(runs: Sequence[Run], output: Path) -> Path:
    """Write the figure to `output` and return its path; the ending decides the format."""
    rows = list(dict.fromkeys((run.nodes, run.popularity) for run in runs))
    for nodes, name in rows[MOST_ROWS:]:
        print(f"not drawn: {nodes} nodes, {name}: more than {MOST_ROWS} rows", file=sys.stderr)
    rows = rows[:MOST_ROWS]
    style.apply()
    size = (style.FIGURE_INCHES[0], 0.6 + ROW_INCHES * len(rows))
    figure, axes = plt.subplots(len(rows), 2, figsize=size, squeeze=False, layout="constrained")
    for row, (left, right) in zip(rows, axes, strict=True):
        members = [run for run in runs if (run.nodes, run.popularity) == row]
        _draw_bytes(left, members)
        _draw_times(right, members)
        left.set_title(f"{row[0]} nodes, {row[1]}")
    axes[-1, 0].set_xlabel("nodes, the one that sent most first (percent of all)")
    axes[-1, 1].set_xlabel("loads, the fastest first (percentile)")
    axes[0, 1].legend(loc="upper left")
    try:
        return results_file.save(figure, output)
    finally:
        plt.close(figure)


def _draw_bytes(axes: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        label, colour, line, marker = MODES[run.mode]
        count = len(run.sent_bytes)
        place = 100 * np.arange(count) / max(count - 1, 1)
        axes.plot(
            place, run.sent_bytes / 1e9, color=colour, linestyle=line, linewidth=1.2,
            marker=marker if count <= 64 else None, markersize=3, label=label,
        )  # fmt: skip
    axes.axhline(
        float(np.mean([run.sent_bytes.mean() for run in runs])) / 1e9,
        color="#666666", linewidth=0.8, linestyle=":",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.grid(axis="both")
    axes.set_ylabel("sent (GB); dotted: mean")


def _draw_times(axes: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        label, colour, line, marker = MODES[run.mode]
        axes.plot(
            PERCENTILES, 1e3 * np.percentile(run.load_s, PERCENTILES), color=colour,
            linestyle=line, linewidth=1.2, marker=marker, markersize=4, label=label,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.grid(axis="both")
    axes.set_ylabel("load (ms, logarithmic)")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one file; 1 if it cannot be drawn."""
    parser = argparse.ArgumentParser(prog="plot_fan_out.py", description=__doc__)
    parser.add_argument("path", type=Path, help="a result of exp_fan_out, or a folder of them")
    parser.add_argument(
        "-o", "--output", type=Path, help="PNG, PDF or SVG; default: beside the file, as PNG"
    )
    options = parser.parse_args(argv)
    try:
        path = find_file(options.path)
        runs = read(path)
        output = draw(runs, options.output or path.with_suffix(".png"))
    except PlotError as error:
        print(error, file=sys.stderr)
        return 1
    for run in runs:
        mean = run.sent_bytes.mean()
        ratio = run.sent_bytes[0] / mean if mean > 0 else 1.0
        print(f"{run.nodes} nodes, {run.popularity}, {run.mode}: sent max / mean {ratio:.2f}")
    print(f"figure: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
