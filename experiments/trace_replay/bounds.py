"""What the best cache finds of a trace: the rows of `tables.CEILINGS`."""

from __future__ import annotations

import numpy as np

from experiments.common.ceilings import AskedBlocks, Ceiling, Ceilings
from experiments.trace_replay.options import Options
from experiments.traces import Trace
from ptstore_mpi import Namespace

CURVE = tuple(2.0 ** (power / 2) for power in range(-8, 15))  # capacities, times the run's own


def ceilings_of(trace: Trace, namespace: Namespace) -> Ceilings:
    """Return the bounds of a trace, over the blocks that the store itself would see."""
    block_tokens = namespace.layout.block_tokens
    asked = []
    for request in trace.requests:
        hashes = namespace.block_hashes(trace.kept(request))
        keys = hashes[:, :8].copy().view(np.int64).ravel()
        asked_blocks = (request.prompt_tokens - 1) // block_tokens
        asked.append(AskedBlocks(keys, asked_blocks, request.prompt_tokens))
    return Ceilings(asked, block_tokens)


def ceiling_rows(
    trace: Trace, namespace: Namespace, options: Options, *, nodes: int
) -> list[dict[str, float]]:
    """Return rows of an infinite cache, of one as large as all nodes, smaller and larger.

    A node is its memory and its SSD.
    """
    ceilings = ceilings_of(trace, namespace)
    most = ceilings.infinite()
    rows = [_row(0, most)]
    for factor in CURVE:
        capacity_bytes = int((options.memory_bytes + options.ssd_bytes) * nodes * factor)
        found = ceilings.belady(capacity_bytes // namespace.layout.block_bytes)
        rows.append(_row(capacity_bytes, found))
        if factor >= 1 and found.found_blocks == most.found_blocks:
            break  # more room finds no more
    return rows


def _row(capacity_bytes: int, ceiling: Ceiling) -> dict[str, float]:
    return {
        "capacity_bytes": capacity_bytes,
        "block": ceiling.block,
        "usable_prefix": ceiling.usable_prefix,
    }
