"""How much of its prompts would a pool have had? Every eviction policy on traces of real prompts.

    PTSTORE_DATA=... python -m experiments.policy_table
    python -m experiments.policy_table --trace mooncake --shares 0.05 0.2 --policies lru adaptive

One pool, metadata only, no server. A row is a capacity, as a share of all distinct tokens of the
trace; a column is a policy: the share of the prompt tokens that a load could have used, in
percent. Contents are closed under prefixes: as many were there, so that the hit ratio of blocks
is the same. With ``--unlinked`` they are not, and a cell says both: there / usable.

``belady`` is the most that any cache of this capacity finds in this order of requests
(`experiments.common.ceilings`); ``closed`` says how much of the way from LRU to there the best
policy of the row goes, in percent.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.common.ceilings import AskedBlocks, Ceilings
from experiments.common.datasets import DatasetError
from experiments.common.options import unit_share
from experiments.traces import HINT, Trace, load_trace
from ptstore_mpi.cache.policies.factory import POLICY_NAMES, make_policy
from ptstore_mpi.cache.shadow import Block, ShadowPool

SHARES = (0.01, 0.03, 0.1, 0.3)
SECONDS_PER_TOKEN = 1e-4  # any: all segments of a trace cost the same
DEFAULTS = {"mooncake": (512, 1), "claude_code": (2048, 2)}  # segment_tokens, every


@dataclass(frozen=True, slots=True)
class Cell:
    """What one pool had of a trace, in percent of the tokens asked for."""

    policy: str
    share: float
    block_hit_percent: float
    usable_prefix_percent: float
    counters: dict[str, float | str]


def chains_of(
    trace: Trace, segment_tokens: int, *, every: int = 1
) -> list[tuple[float, list[Block]]]:
    """Return (time_s, chain of whole segments) of the requests of one session of so many.

    A byte of the pool stands for a token.
    """
    units = segment_tokens // trace.unit_tokens
    blocks: dict[int, Block] = {}
    cost_s = segment_tokens * SECONDS_PER_TOKEN
    chains = []
    for request in trace.requests:
        if request.session % every:
            continue
        whole = request.prompt_tokens // segment_tokens
        parts = request.units[: whole * units].astype("<u4").reshape(whole, units)
        chain, above = [], b""
        for part in parts:
            above = hashlib.blake2b(above + part.tobytes(), digest_size=8).digest()
            key = int.from_bytes(above, "little")
            chain.append(blocks.setdefault(key, (key, segment_tokens, cost_s)))
        chains.append((request.time_s, chain))
    return chains


def measure(
    chains: Sequence[tuple[float, list[Block]]], *, policy: str, share: float, linked: bool = True
) -> Cell:
    """Return what a pool of a share of all distinct tokens has; infinite where share is 1."""
    capacity = capacity_tokens(chains, share)
    chosen = make_policy(policy, capacity)
    pool = ShadowPool(chosen, capacity, linked=linked)
    for time_s, chain in chains:
        pool.access(chain, time_s)
    counts, asked = pool.counts, max(1, pool.counts.nbytes)
    return Cell(
        policy,
        share,
        100 * counts.hit_bytes / asked,
        100 * counts.prefix_hit_bytes / asked,
        dict(chosen.counters()),
    )


def capacity_tokens(chains: Sequence[tuple[float, list[Block]]], share: float) -> int:
    """Return a share of all distinct tokens, at least 1."""
    distinct = {key: tokens for _, chain in chains for key, tokens, _ in chain}
    return max(1, int(sum(distinct.values()) * share))


def ceilings_of(chains: Sequence[tuple[float, list[Block]]], segment_tokens: int) -> Ceilings:
    """Return the bounds of the same requests: each asks for its whole chain, and leaves it."""
    asked = []
    for _, chain in chains:
        keys = np.array([key for key, _, _ in chain], dtype=np.uint64).view(np.int64)
        asked.append(AskedBlocks(keys, len(chain), len(chain) * segment_tokens))
    return Ceilings(asked, segment_tokens)


def closed_percent(found: Sequence[float], *, lru: float, belady: float) -> float | None:
    """Return how much of the gap from LRU to Belady the best one closes; None without a gap."""
    gap = belady - lru
    return 100 * (max(found) - lru) / gap if gap > 0 else None


def print_table(trace: Trace, options: argparse.Namespace) -> None:
    """Measure and print one trace, row by row."""
    segment_tokens, every = DEFAULTS[trace.name]
    segment_tokens = options.segment_tokens or segment_tokens
    chains = chains_of(trace, segment_tokens, every=options.every or every)
    distinct = {key for _, chain in chains for key, _, _ in chain}
    infinite = measure(chains, policy="lru", share=1.0)
    print(
        f"\n{trace.name}: {len(chains)} requests, {len(distinct) * segment_tokens:,} distinct"
        f" tokens in segments of {segment_tokens};"
        f" infinite capacity {infinite.usable_prefix_percent:.2f} %"
    )
    names = ("capacity", *options.policies, "belady", "closed")
    print("".join(f"{name:>14}" for name in names))
    ceilings = ceilings_of(chains, segment_tokens)
    for share in options.shares:
        capacity_blocks = capacity_tokens(chains, share) // segment_tokens
        belady = 100 * ceilings.belady(capacity_blocks).block
        _print_row(chains, share, belady=belady, options=options)


def _print_row(
    chains: Sequence[tuple[float, list[Block]]],
    share: float,
    *,
    belady: float,
    options: argparse.Namespace,
) -> None:
    print(f"{100 * share:12.1f} %", end="", flush=True)
    found: dict[str, Cell] = {}
    for policy in options.policies:
        cell = measure(chains, policy=policy, share=share, linked=not options.unlinked)
        found[policy] = cell
        text = f"{cell.usable_prefix_percent:.2f}"
        text = f"{cell.block_hit_percent:.2f}/{text}" if options.unlinked else text
        print(f"{text:>14}", end="", flush=True)
    lru = found.get("lru") or measure(
        chains, policy="lru", share=share, linked=not options.unlinked
    )
    closed = closed_percent(
        [cell.usable_prefix_percent for cell in found.values()],
        lru=lru.usable_prefix_percent,
        belady=belady,
    )
    text = "-" if closed is None else f"{closed:.0f} %"
    print(f"{belady:>14.2f}{text:>14}", end="")
    if "adaptive" in found:
        counters = found["adaptive"].counters
        print("   {switch_count} changes, at last {choice}".format(**counters), end="")
    print(flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of each trace; 2 where the data are not there."""
    parser = argparse.ArgumentParser(prog="python -m experiments.policy_table")
    parser.add_argument("--trace", choices=DEFAULTS, nargs="+", default=list(DEFAULTS))
    parser.add_argument("--policies", choices=POLICY_NAMES, nargs="+", default=POLICY_NAMES)
    parser.add_argument(
        "--shares",
        type=unit_share,
        nargs="+",
        default=SHARES,
        metavar="SHARE",
        help="capacities, as shares of all distinct tokens (default: 0.01 0.03 0.1 0.3)",
    )
    parser.add_argument("--segment-tokens", type=int, help="default 512 and 2048")
    parser.add_argument("--every", type=int, help="one of so many sessions; default 1 and 2")
    parser.add_argument("--unlinked", action="store_true", help="let blocks go on their own")
    options = parser.parse_args(argv)
    for name in options.trace:
        try:
            trace = load_trace(name)
        except DatasetError as error:
            print(str(error).removesuffix(HINT).rstrip("; "), file=sys.stderr)
            return 2
        print_table(trace, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
