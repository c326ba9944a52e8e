"""Draw a result of `exp_vllm_ttft`: time to the first token over the length of the context.

    python plots/plot_vllm_ttft.py FILE_OR_FOLDER [-o FIGURE.png]

Reads HDF5 only; a folder means its newest ``*.h5``. Left: a line per system through its medians,
in a band from the least to the greatest. Right: the median of vanilla over each system's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

EXPERIMENT = "exp_vllm_ttft"
SYSTEMS = {  # system -> (label, colour, line, marker)
    "vanilla": ("vanilla (recompute)", "#666666", ":", "x"),
    "prefix": ("prefix (vLLM's own cache)", "#E69F00", "--", "s"),
    "ptstore_local": ("ptstore (own node)", "#0072B2", "-", "o"),
    "ptstore_remote": ("ptstore (other node)", "#D55E00", "-.", "^"),
}
MOST_TICKS = 12


@dataclass(frozen=True, slots=True)
class Line:
    """TTFT of one system: seconds by length, tokens of context."""

    system: str
    lengths: list[int]
    ttft_s: list[npt.NDArray[np.float64]]

    def medians(self) -> npt.NDArray[np.float64]:
        """Return the median at each length."""
        return np.array([np.median(values) for values in self.ttft_s])


def find_file(path: Path) -> Path:
    """Return the file itself, or the newest ``*.h5`` below a folder."""
    if not path.is_dir():
        return path
    files = sorted(path.rglob("*.h5"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    if not files:
        raise PlotError(f"{path}: expected a folder with *.h5 files, found none")
    return files[-1]


def read(path: Path) -> tuple[list[Line], dict[str, Any]]:
    """Read samples and attributes of a result file.

    Raises
    ------
    PlotError
        Not HDF5, not a result of this experiment, or one that cannot be drawn.
    """
    with results_file.open_results(path, "samples") as file:
        attributes = results_file.attributes(file)
        if str(attributes.get("experiment")) != EXPERIMENT:
            raise PlotError(f"{path}: expected results of {EXPERIMENT}")
        names = [name for name in SYSTEMS if results_file.is_group(file, f"samples/{name}")]
        lines = [_read_line(file, name) for name in names]
    lines = [line for line in lines if line.lengths]
    if not lines:
        raise PlotError(f"{path}: expected samples of {', '.join(SYSTEMS)}, found none")
    return lines, attributes


def _read_line(file: Any, name: str) -> Line:
    wanted, group = ("context_tokens", "ttft_s"), f"samples/{name}"
    columns = results_file.read_columns(file, group, numbers=wanted)
    results_file.require_positive(file, group, columns, wanted)
    lengths = np.unique(columns["context_tokens"])
    ttft_s = [columns["ttft_s"][columns["context_tokens"] == length] for length in lengths]
    return Line(name, [int(length) for length in lengths], ttft_s)


def draw(lines: Sequence[Line], attributes: dict[str, Any], output: Path) -> Path:
    """Write the figure to `output` and return its path; the ending decides the format."""
    style.apply()
    figure, (left, right) = plt.subplots(1, 2, figsize=style.FIGURE_INCHES, layout="constrained")
    _draw_times(left, lines)
    _draw_speedups(right, lines)
    for axes in (left, right):
        _label_lengths(axes, lines)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(lines))
    figure.suptitle(_title(attributes), x=0.01, ha="left", fontsize=9, color="#444444")
    try:
        return results_file.save(figure, output)
    finally:
        plt.close(figure)


def _draw_times(axes: Axes, lines: Sequence[Line]) -> None:
    for line in lines:
        label, colour, dashes, marker = SYSTEMS[line.system]
        low = [values.min() for values in line.ttft_s]
        high = [values.max() for values in line.ttft_s]
        axes.fill_between(line.lengths, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            line.lengths, line.medians(), color=colour, linestyle=dashes, linewidth=1.2,
            marker=marker, markersize=5, label=label,
        )  # fmt: skip
    _label_values(axes, "")
    axes.set_ylabel("time to first token (s, logarithmic)")
    axes.set_title("median of each length; band: least to greatest")


def _draw_speedups(axes: Axes, lines: Sequence[Line]) -> None:
    for line in lines:
        _, colour, dashes, marker = SYSTEMS[line.system]
        lengths, ratios = speedups(line, lines)
        axes.plot(
            lengths, ratios, color=colour, linestyle=dashes, linewidth=1.2, marker=marker,
            markersize=5,
        )  # fmt: skip
    _label_values(axes, "x")
    axes.set_ylabel("median of vanilla / median (logarithmic)")
    axes.set_title("how many times faster than vanilla")


def speedups(line: Line, lines: Sequence[Line]) -> tuple[list[int], list[float]]:
    """Return the lengths that vanilla has too, and vanilla's median over the line's at each."""
    vanilla = {
        length: median
        for other in lines
        if other.system == "vanilla"
        for length, median in zip(other.lengths, other.medians(), strict=True)
    }
    pairs = zip(line.lengths, line.medians(), strict=True)
    found = {length: float(vanilla[length] / own) for length, own in pairs if length in vanilla}
    return list(found), list(found.values())


def _label_values(axes: Axes, unit: str) -> None:
    """Label a logarithmic axis with plain numbers at 1, 2 and 5, where it holds two of them."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in exponents for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) > 1:
        axes.set_yticks(ticks, [f"{tick:g}{unit}" for tick in ticks])
        axes.minorticks_off()


def _label_lengths(axes: Axes, lines: Sequence[Line]) -> None:
    lengths = sorted({length for line in lines for length in line.lengths})
    axes.set_xscale("log")
    if len(lengths) <= MOST_TICKS:
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
    axes.grid(axis="both")
    axes.set_xlabel("context (tokens, logarithmic)")


def _title(attributes: dict[str, Any]) -> str:
    title = (
        f"{attributes.get('experiment', '')}  {attributes.get('start_utc', '')}  "
        f"{attributes.get('model', '?')}, {attributes.get('dtype', '?')}, "
        f"transport {attributes.get('transport', '?')}"
    )
    return title if np.all(attributes.get("complete", False)) else f"{title}  (run not complete)"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one file; 1 if it cannot be drawn."""
    parser = argparse.ArgumentParser(prog="plot_vllm_ttft.py", description=__doc__)
    parser.add_argument("path", type=Path, help="a result of exp_vllm_ttft, or a folder of them")
    parser.add_argument(
        "-o", "--output", type=Path, help="PNG, PDF or SVG; default: beside the file, as PNG"
    )
    options = parser.parse_args(argv)
    try:
        path = find_file(options.path)
        lines, attributes = read(path)
        output = draw(lines, attributes, options.output or path.with_suffix(".png"))
    except PlotError as error:
        print(error, file=sys.stderr)
        return 1
    for line in lines:
        ratios = dict(zip(*speedups(line, lines), strict=True))
        for length, median in zip(line.lengths, line.medians(), strict=True):
            times = f", {ratios[length]:.1f}x" if length in ratios else ""
            print(f"{line.system}, {length} tokens: TTFT median {median:.3f} s{times}")
    print(f"figure: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
