"""Draw results of `exp_trace_replay`: hit ratio against capacity, under the ceilings.

    python plots/plot_trace_replay.py FILE_OR_FOLDER... [-o FIGURE.png]

Reads HDF5 only. Files of one trace belong together, one mark each: the newest file says which,
others are named and left out. A run has one capacity; the line of Belady's cache comes with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

if __package__:
    from plots import results_file, style
    from plots.results_file import PlotError
else:  # started by its path: its own folder is on the search path
    import results_file
    import style
    from results_file import PlotError

EXPERIMENT = "exp_trace_replay"
SAMPLES = "samples/replay"
WORKLOAD = ("workload_sha256", "block_tokens")
CONFIGURATION = (
    "transport", "placement", "policy", "routing", "nodes_count", "clients_count", "admission",
    "replica_max_share", "replica_min_share", "ssd_tokens_per_node",
)  # fmt: skip
DIFFERENCES = {
    "admission": "replicas",
    "replica_max_share": "share up to",
    "replica_min_share": "from",
    "ssd_tokens_per_node": "SSD tokens",
}
MARKERS = "osD^vPX*"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
CEILING_COLOUR = "#666666"


@dataclass(frozen=True, slots=True)
class Replay:
    """What the figure needs of one run.

    Attributes
    ----------
    workload, configuration
        What must be equal for two runs to be drawn together, and to be joined by a line.
    capacity_tokens
        Of all nodes.
    usable_prefix
        Share of the tokens asked for that were loaded.
    belady
        The same of Belady's cache, by capacity in tokens.
    infinite
        The same of a cache without limit; None of a run that has not ended.
    """

    path: Path
    trace: str
    workload: tuple[str, ...]
    configuration: tuple[str, ...]
    capacity_tokens: float
    usable_prefix: float
    belady: dict[float, float]
    infinite: float | None


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files themselves and all ``*.h5`` below folders, oldest first."""
    found: set[Path] = set()
    for path in paths:
        found |= set(path.rglob("*.h5")) if path.is_dir() else {path}
    if not found:
        raise PlotError(f"{paths[0]}: expected a folder with *.h5 files, found none")
    missing = sorted(path for path in found if not path.exists())
    if missing:
        raise PlotError(f"{missing[0]}: no such file or folder")
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def read(path: Path) -> Replay:
    """Read one run.

    Raises
    ------
    PlotError
        Not HDF5, not a result of this experiment, or one that cannot be drawn.
    """
    with results_file.open_results(path, "samples") as file:
        attributes = results_file.attributes(file)
        if str(attributes.get("experiment")) != EXPERIMENT:
            raise PlotError(f"{path}: expected results of {EXPERIMENT}")
        tokens = results_file.read_columns(
            file, SAMPLES, numbers=("asked_tokens", "recomputed_tokens")
        )
        results_file.require_positive(file, SAMPLES, tokens, ("asked_tokens",))
        ended = results_file.is_group(file, "ceilings")
        names = ("capacity_bytes", "usable_prefix")
        ceilings = results_file.read_columns(file, "ceilings", numbers=names) if ended else {}
    asked = float(tokens["asked_tokens"].sum())
    if not asked:
        raise PlotError(f"{path}: {SAMPLES}: expected at least one row")
    per_token = _number(path, attributes, "bytes_per_token")
    ssd_bytes = float(attributes.get("ssd_tokens_per_node", 0)) * per_token
    own_bytes = _number(path, attributes, "memory_bytes_per_node") + ssd_bytes
    belady, infinite = {}, None
    for capacity, ratio in zip(*ceilings.values(), strict=True) if ended else ():
        if not 0 <= ratio <= 1:
            raise PlotError(f"{path}: ceilings: expected ratios in 0 .. 1, found {ratio}")
        if capacity > 0:
            belady[float(capacity) / per_token] = float(ratio)
        else:
            infinite = float(ratio)
    return Replay(
        path,
        str(attributes.get("trace")),
        tuple(str(attributes.get(name)) for name in WORKLOAD),
        tuple(str(attributes.get(name)) for name in CONFIGURATION),
        own_bytes * _number(path, attributes, "nodes_count") / per_token,
        1 - float(tokens["recomputed_tokens"].sum()) / asked,
        belady,
        infinite,
    )


def _number(path: Path, attributes: dict[str, Any], name: str) -> float:
    value = attributes.get(name)
    if not isinstance(value, int | float | np.number) or not 0 < value < float("inf"):
        raise PlotError(f"{path}: {name}: expected a number above 0, found {value!r:.80}")
    return float(value)


def choose(files: Sequence[Path]) -> list[Replay]:
    """Return the runs of the newest workload; what is left out is named on standard error.

    Raises
    ------
    PlotError
        There is none. A file that was the only one is refused with its own error.
    """
    runs = []
    for path in files:
        try:
            runs.append(read(path))
        except PlotError as error:
            if len(files) == 1:
                raise
            print(f"not drawn: {error}", file=sys.stderr)
    if not runs:
        raise PlotError(f"expected results of {EXPERIMENT}, found none among {len(files)} files")
    for run in runs:
        if run.workload != runs[-1].workload:
            print(f"not drawn: {run.path}: another trace or block size", file=sys.stderr)
    return [run for run in runs if run.workload == runs[-1].workload]


def draw(runs: Sequence[Replay], output: Path) -> None:
    """Write the figure to `output`; the ending decides the format."""
    style.apply()
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    _draw_ceilings(axes, runs)
    groups: dict[tuple[str, ...], list[Replay]] = {}
    for run in runs:
        groups.setdefault(run.configuration, []).append(run)
    for place, (configuration, members) in enumerate(groups.items()):
        members.sort(key=lambda run: run.capacity_tokens)
        axes.plot(
            [run.capacity_tokens for run in members],
            [run.usable_prefix for run in members],
            marker=MARKERS[place % len(MARKERS)], color=COLOURS[place % len(COLOURS)],
            linewidth=1.2, markersize=6,
            label=_label(configuration, list(groups)),
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.grid(axis="both")
    axes.set_xlabel("memory of all nodes (tokens, logarithmic)")
    axes.set_ylabel("usable-prefix hit ratio (tokens loaded / asked)")
    axes.set_title(f"{EXPERIMENT}: {runs[-1].trace}, blocks of {runs[-1].workload[1]} tokens")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2)
    figure.savefig(output)
    plt.close(figure)


def _label(configuration: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> str:
    """Name a configuration; replicas and tiers only where runs of the figure differ in them."""
    of = dict(zip(CONFIGURATION, configuration, strict=True))
    label = (
        f"{of['policy']}, {of['placement']}, {of['routing']}: {of['nodes_count']} nodes, "
        f"{of['clients_count']} clients {of['transport']}"
    )
    for place, name in enumerate(CONFIGURATION):
        if name in DIFFERENCES and len({other[place] for other in others}) > 1:
            label += f", {DIFFERENCES[name]} {of[name]}"
    return label


def _draw_ceilings(axes: Axes, runs: Sequence[Replay]) -> None:
    belady: dict[float, float] = {}
    for run in runs:
        belady |= run.belady
    infinite = next((run.infinite for run in runs if run.infinite is not None), None)
    if belady:
        x = sorted(belady)
        axes.plot(
            x, [belady[capacity] for capacity in x], color=CEILING_COLOUR, linewidth=1.2,
            label="ceiling: Belady, same capacity",
        )  # fmt: skip
    if infinite is not None:
        axes.axhline(
            infinite, color=CEILING_COLOUR, linewidth=1.0, linestyle="--",
            label="ceiling: infinite cache",
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one figure; 1 if it cannot be drawn."""
    parser = argparse.ArgumentParser(prog="plot_trace_replay.py", description=__doc__)
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="path",
        help="results of exp_trace_replay, or folders of them",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, help="default: trace_replay.png beside them")
    options = parser.parse_args(argv)
    try:
        runs = choose(find_files(options.paths))
    except PlotError as error:
        print(error, file=sys.stderr)
        return 1
    output = options.output or runs[-1].path.parent / "trace_replay.png"
    draw(runs, output)
    for run in runs:
        print(f"{run.capacity_tokens:,.0f} tokens: {run.usable_prefix:.4f} ({run.path.name})")
    print(f"figure: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
