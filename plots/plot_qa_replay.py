"""Draw a result of `exp_qa_replay`: time to the first token by system, and what it is spent on.

    python plots/plot_qa_replay.py FILE_OR_FOLDER [-o FIGURE.png]

Reads HDF5 only; a folder means its newest ``*.h5``. Left: every request, by where most of its
tokens came from, with the quartiles of its system. Right: the mean split into match, load and
prefill.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

if __package__:
    from plots import results_file, style
    from plots.results_file import PlotError
else:  # started by its path: its own folder is on the search path
    import results_file
    import style
    from results_file import PlotError

MARKS_HALF_HEIGHT = 0.22


@dataclass(frozen=True, slots=True)
class SystemSamples:
    """The columns of one system that the figure needs; seconds."""

    name: str
    ttft_s: npt.NDArray[np.float64]
    parts_s: dict[str, npt.NDArray[np.float64]]
    sources: list[str]


def find_file(path: Path) -> Path:
    """Return the file itself, or the newest ``*.h5`` below a folder."""
    if not path.is_dir():
        return path
    files = sorted(path.rglob("*.h5"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    if not files:
        raise PlotError(f"{path}: expected a folder with *.h5 files, found none")
    return files[-1]


def read(path: Path) -> tuple[list[SystemSamples], dict[str, Any]]:
    """Read the samples of all systems and the attributes of a result file.

    Raises
    ------
    PlotError
        Not HDF5, not a result of this experiment, or of another schema version.
    """
    with results_file.open_results(path, "samples") as file:
        names = [name for name in style.SYSTEM_LABELS if name in file["samples"]]
        systems = [_read_system(file, name) for name in names]
        attributes = results_file.attributes(file)
    systems = [system for system in systems if system.ttft_s.size]
    if not systems:
        raise PlotError(f"{path}: expected samples of {', '.join(style.SYSTEM_LABELS)}, found none")
    return systems, attributes


def _read_system(file: h5py.File, name: str) -> SystemSamples:
    names, group = list(style.SOURCES), f"samples/{name}"
    wanted = ("ttft_s", *style.PARTS, *(f"{source}_tokens" for source in names))
    columns = results_file.read_columns(file, group, numbers=wanted)
    results_file.require_positive(file, group, columns, ("ttft_s",))
    for part in style.PARTS:
        if not (np.isfinite(columns[part]) & (columns[part] >= 0)).all():
            raise PlotError(f"{file.filename}: {group}: expected {part} of 0 or more everywhere")
    tokens = np.stack([columns[f"{source}_tokens"] for source in names])
    sources = [names[place] for place in np.argmax(tokens, axis=0).tolist()]
    parts = {part: columns[part] for part in style.PARTS}
    return SystemSamples(name, columns["ttft_s"], parts, sources)


def draw(systems: Sequence[SystemSamples], attributes: dict[str, Any], output: Path) -> Path:
    """Write the figure and return its path; the ending of `output` decides the format."""
    style.apply()
    width, height = style.FIGURE_INCHES
    height += max(len(systems) - 3, 0) * style.ROW_INCHES
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(width, height), sharey=True, width_ratios=(1.5, 1), layout="constrained"
    )
    draw_distribution(left, systems)
    draw_split(right, systems)
    figure.suptitle(_title(attributes), x=0.01, ha="left", fontsize=9, color="#444444")
    path = results_file.save(figure, output)
    plt.close(figure)
    return path


def draw_distribution(axes: Axes, systems: Sequence[SystemSamples]) -> None:
    """Draw each request as a mark, with median and quartiles of each system above."""
    shift = np.random.default_rng(0)  # of the marks, upwards and downwards only
    for row, system in enumerate(systems):
        heights = row + shift.uniform(-MARKS_HALF_HEIGHT, MARKS_HALF_HEIGHT, system.ttft_s.size)
        for source, (_, colour, marker) in style.SOURCES.items():
            mine = np.array([found == source for found in system.sources])
            faces = colour if marker == "x" else "none"
            axes.scatter(
                system.ttft_s[mine], heights[mine], s=24, marker=marker, linewidths=1.1,
                color=colour, facecolors=faces, zorder=3,
            )  # fmt: skip
        low, middle, high = np.percentile(system.ttft_s, (25, 50, 75))
        above = row - 0.36
        axes.plot([low, high], [above, above], color="black", linewidth=1.4, zorder=4)
        axes.plot([middle], [above], marker="|", color="black", markersize=9, mew=2, zorder=4)
        mean = float(system.ttft_s.mean())
        axes.plot([mean], [above], marker="D", color="black", markersize=5, mfc="white", zorder=5)
        axes.annotate(
            f"median {middle:.2f} s", (middle, above), xytext=(0, 5), textcoords="offset points",
            ha="center", va="bottom", fontsize=8,
        )  # fmt: skip
    labels = [f"{style.SYSTEM_LABELS[system.name]}\nn = {system.ttft_s.size}" for system in systems]
    axes.set_yticks(range(len(systems)), labels)
    axes.set_ylim(len(systems) - 0.5, -0.7)
    axes.set_xscale("log")
    _plain_log_ticks(axes, np.concatenate([system.ttft_s for system in systems]))
    axes.set_xlabel("time to first token (s, logarithmic)")
    axes.set_title("each request; line: quartiles, bar: median, diamond: mean")
    _legend_of_sources(axes, systems)


def draw_split(axes: Axes, systems: Sequence[SystemSamples]) -> None:
    """Draw the mean time of match, load and prefill as one bar per system."""
    longest = 0.0
    for row, system in enumerate(systems):
        start = 0.0
        for part, (label, colour, hatch) in style.PARTS.items():
            mean = float(system.parts_s[part].mean())
            axes.barh(
                row, mean, left=start, height=0.5, color=colour, hatch=hatch, edgecolor="black",
                linewidth=0.6, label=label if row == 0 else None,
            )  # fmt: skip
            start += mean
        longest = max(longest, start)
        axes.annotate(
            f"{start:.2f} s", (start, row), xytext=(4, 0), textcoords="offset points", va="center"
        )
        spent = "  ".join(
            f"{style.PARTS[part][0]} {_short(float(values.mean()))}"
            for part, values in system.parts_s.items()
            if values.mean() > 0
        )
        axes.annotate(
            spent, (0, row + 0.27), xytext=(3, -2), textcoords="offset points", va="top",
            fontsize=7.5, color="#444444",
        )  # fmt: skip
    axes.set_xlim(0, longest * 1.24)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("mean time to first token (s)")
    axes.set_title("what it is spent on")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(style.PARTS))


def _legend_of_sources(axes: Axes, systems: Sequence[SystemSamples]) -> None:
    present = {source for system in systems for source in system.sources}
    marks = [
        Line2D([], [], linestyle="none", marker=marker, color=colour, label=label,
               markerfacecolor=colour if marker == "x" else "none")
        for source, (label, colour, marker) in style.SOURCES.items()
        if source in present
    ]  # fmt: skip
    axes.legend(
        handles=marks, loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=len(marks),
        columnspacing=1.2, handletextpad=0.3,
    )  # fmt: skip


def _plain_log_ticks(axes: Axes, values: npt.NDArray[np.float64]) -> None:
    """Label a logarithmic axis of seconds with plain numbers at 1, 2 and 5."""
    low, high = float(values.min()) / 1.3, float(values.max()) * 1.3
    exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [digit * 10.0**power for power in exponents for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _title(attributes: dict[str, Any]) -> str:
    tokens = attributes.get("context_tokens")
    context = f"{tokens:,}" if isinstance(tokens, int | np.integer) else f"{tokens}"
    workload = (
        f"{attributes['dataset']}, {context} context tokens, {attributes['dtype']}, "
        if {"dataset", "context_tokens", "dtype"} <= set(attributes)
        else ""
    )
    title = (
        f"{attributes.get('experiment', '')}  {attributes.get('start_utc', '')}  {workload}"
        f"{attributes.get('clients_count', '?')} clients, "
        f"{attributes.get('servers_count', '?')} servers, {attributes.get('mpi_library', '')}"
    )
    return title if np.all(attributes.get("complete", False)) else f"{title}  (run not complete)"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one file; 1 if it cannot be drawn."""
    parser = argparse.ArgumentParser(prog="plot_qa_replay.py", description=__doc__)
    parser.add_argument("path", type=Path, help="a result of exp_qa_replay, or a folder of them")
    parser.add_argument(
        "-o", "--output", type=Path, help="PNG, PDF or SVG; default: beside the file, as PNG"
    )
    options = parser.parse_args(argv)
    try:
        path = find_file(options.path)
        systems, attributes = read(path)
        output = draw(systems, attributes, options.output or path.with_suffix(".png"))
    except PlotError as error:
        print(error, file=sys.stderr)
        return 1
    for system in systems:
        low, middle, high = np.percentile(system.ttft_s, (25, 50, 75))
        print(
            f"{system.name}: n = {system.ttft_s.size}, TTFT median {middle:.3f} s "
            f"(quartiles {low:.3f} to {high:.3f} s)"
        )
    print(f"figure: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
