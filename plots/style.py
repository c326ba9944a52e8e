"""Colours, marks and sizes of all figures: readable in print, in grey and by the colour blind.

The colours are those of Okabe and Ito (2008), "Color Universal Design"; every distinction made by
colour is made by a mark or a hatch too.
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")  # figures are files: no display is needed

import matplotlib.pyplot as plt

SYSTEM_LABELS = {
    "vanilla": "vanilla\n(recompute)",
    "prefix": "prefix\n(own cache)",
    "prefix_node": "prefix_node\n(own node)",
    "evostore": "evostore\n(pooled, no replicas)",
    "ptstore": "ptstore\n(pooled)",
}
# source of most of a prompt's tokens -> (label, colour, marker)
SOURCES = {
    "recomputed": ("recomputed", "#666666", "x"),
    "engine": ("engine: own cache", "#E69F00", "s"),
    "owned": ("owned: own node's store", "#0072B2", "o"),
    "replica": ("replica: own node's copy", "#56B4E9", "P"),
    "remote": ("remote: other node's store", "#D55E00", "^"),
    "disk": ("disk", "#CC79A7", "D"),
}
# part of the first token's time -> (label, colour, hatch)
PARTS = {
    "match_s": ("match", "#009E73", "////"),
    "load_s": ("load", "#F0E442", "...."),
    "prefill_s": ("prefill", "#56B4E9", ""),
}
FIGURE_INCHES = (9.0, 4.2)
ROW_INCHES = 1.0  # of each system beyond the third
DOTS_PER_INCH = 200


def apply() -> None:
    """Set the look of all figures."""
    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "x",
            "axes.axisbelow": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "hatch.linewidth": 0.5,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "savefig.dpi": DOTS_PER_INCH,
        }
    )
