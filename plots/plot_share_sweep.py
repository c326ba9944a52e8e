"""Draw results of `share_sweep`: modelled time to the first token against the replicas' share.

    python plots/plot_share_sweep.py FILE [-o FIGURE.png]

Reads HDF5 only. A panel is a workload: a line of the fixed shares, and a star where the adaptive
share ended, averaged over the servers. Below it, where the adaptive share went.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

if __package__:
    from plots import results_file, style
    from plots.results_file import Columns, PlotError
else:  # started by its path: its own folder is on the search path
    import results_file
    import style
    from results_file import Columns, PlotError

EXPERIMENT = "share_sweep"
FIXED_COLOUR = "#0072B2"
ADAPTIVE_COLOUR = "#D55E00"
SERVER_COLOUR = "#999999"


def read(path: Path) -> tuple[Columns, Columns]:
    """Return the runs and the decisions of one file.

    Raises
    ------
    PlotError
        Not HDF5, or not a result of this experiment.
    """
    with results_file.open_results(path, "runs") as file:
        if str(results_file.attributes(file).get("experiment")) != EXPERIMENT:
            raise PlotError(f"{path}: expected results of {EXPERIMENT}")
        runs = results_file.read_columns(
            file, "runs", numbers=("share", "ttft_s", "mean_share"), texts=("workload",)
        )
        results_file.require_positive(file, "runs", runs, ("ttft_s",))
        decisions = results_file.read_columns(
            file, "decisions", numbers=("server", "time_s", "share"), texts=("workload",)
        )
    if not len(runs["share"]):
        raise PlotError(f"{path}: runs: expected at least one row")
    return runs, decisions


def draw(runs: Columns, decisions: Columns, output: Path) -> Path:
    """Write the figure and return its path."""
    style.apply()
    workloads = list(dict.fromkeys(runs["workload"]))
    figure, panels = plt.subplots(
        2, len(workloads), figsize=(3.2 * len(workloads), 4.6), layout="constrained",
        squeeze=False, height_ratios=(3, 2),
    )  # fmt: skip
    for place, workload in enumerate(workloads):
        _draw_times(panels[0][place], _only(runs, workload))
        _draw_course(panels[1][place], _only(decisions, workload))
        panels[0][place].set_title(workload)
    panels[0][0].set_ylabel("modelled TTFT (ms)")
    panels[0][0].legend()
    panels[1][0].set_ylabel("adaptive share (%)")
    path = results_file.save(figure, output)
    plt.close(figure)
    return path


def _only(columns: Columns, workload: str) -> Columns:
    chosen = columns["workload"] == workload
    return {name: values[chosen] for name, values in columns.items()}


def _draw_times(axes: Axes, runs: Columns) -> None:
    is_fixed = runs["share"] >= 0
    order = np.argsort(runs["share"][is_fixed])
    axes.plot(
        100 * runs["share"][is_fixed][order], 1e3 * runs["ttft_s"][is_fixed][order],
        marker="o", markersize=4, linewidth=1.2, color=FIXED_COLOUR, label="fixed",
    )  # fmt: skip
    axes.plot(
        100 * runs["mean_share"][~is_fixed], 1e3 * runs["ttft_s"][~is_fixed],
        marker="*", markersize=11, linestyle="", color=ADAPTIVE_COLOUR, label="adaptive",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share for replicas (%)")


def _draw_course(axes: Axes, decisions: Columns) -> None:
    for server in np.unique(decisions["server"]):
        own = decisions["server"] == server
        axes.step(
            decisions["time_s"][own] - decisions["time_s"].min(), 100 * decisions["share"][own],
            where="post", linewidth=0.8, color=SERVER_COLOUR,
        )  # fmt: skip
    axes.set_ylim(0, 100)
    axes.set_xlabel("time of the trace (s), a line per server")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one figure; 1 if it cannot be drawn."""
    parser = argparse.ArgumentParser(prog="plot_share_sweep.py", description=__doc__)
    parser.add_argument("path", type=Path, help="result of share_sweep")
    parser.add_argument("-o", "--output", type=Path, help="default: the same name, .png")
    options = parser.parse_args(argv)
    try:
        path = draw(*read(options.path), options.output or options.path.with_suffix(".png"))
    except PlotError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"figure: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
