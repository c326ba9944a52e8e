"""The groups of a result of `exp_trace_replay`, and what its columns are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from experiments.record import SOURCE_COLUMNS, TEXT, Table
from ptstore_mpi import BalanceDecision

EXPERIMENT = "exp_trace_replay"

REQUESTS = Table(
    "samples/replay",
    {
        "request": ("i8", "1"),
        "client": ("i4", "1"),
        "node": ("i4", "1"),
        "session": ("i8", "1"),
        "time_s": ("f8", "s"),
        "asked_tokens": ("i8", "tokens"),
        "asked_blocks": ("i8", "1"),
        "matched_blocks": ("i8", "1"),
        **SOURCE_COLUMNS,
        "stored_tokens": ("i8", "tokens"),
        "reason": (TEXT, "text"),
        "store_reason": (TEXT, "text"),
        "match_s": ("f8", "s"),  # nan over `sim`: nothing took time
        "load_s": ("f8", "s"),
        "store_s": ("f8", "s"),
    },
)
OWNERS = Table(
    "owners",
    {
        "client": ("i4", "1"),
        "server": ("i4", "1"),
        "near_bytes": ("i8", "bytes"),
        "sent_bytes": ("i8", "bytes"),
    },
)
SERVERS = Table(
    "servers",
    {
        "server": ("i4", "1"),
        "capacity_bytes": ("i8", "bytes"),
        "owned_bytes": ("i8", "bytes"),
        "metadata_bytes": ("i8", "bytes"),
        "free_bytes": ("i8", "bytes"),
        "segment_count": ("i8", "1"),
        "evicted_count": ("i8", "1"),
        "lent_bytes": ("i8", "bytes"),
        "redirect_count": ("i8", "1"),
        "replica_bytes": ("i8", "bytes"),
        "replica_filled_count": ("i8", "1"),
        "replica_hit_count": ("i8", "1"),
        "ssd_file_bytes": ("i8", "bytes"),  # 0 without a tier, as all that follow
        "ssd_write_bytes": ("i8", "bytes"),
        "ssd_read_bytes": ("i8", "bytes"),
        "ssd_useful_bytes": ("i8", "bytes"),
        "ssd_demoted_count": ("i8", "1"),
        "ssd_promoted_count": ("i8", "1"),
    },
)
CEILINGS = Table(
    "ceilings",
    {
        "capacity_bytes": ("i8", "bytes"),  # of all nodes; 0: infinite
        "block": ("f8", "1"),
        "usable_prefix": ("f8", "1"),
    },
)
DECISIONS = Table(
    "decisions",  # about the share for replicas; none where it is fixed
    {
        "server": ("i4", "1"),
        "time_s": ("f8", "s"),
        "share": ("f8", "1"),
        "moved_bytes": ("i8", "bytes"),
        "replica_more_s": ("f8", "s"),
        "replica_less_s": ("f8", "s"),
        "owned_more_s": ("f8", "s"),
        "owned_less_s": ("f8", "s"),
        "local_s": ("f8", "s"),  # these four for 1 GB of KV
        "remote_s": ("f8", "s"),
        "disk_s": ("f8", "s"),
        "recompute_s": ("f8", "s"),
    },
)


def decision_rows(
    decisions: Mapping[int, Sequence[BalanceDecision]],
) -> list[dict[str, int | float]]:
    """Return the rows of `DECISIONS`."""
    return [
        {"server": server, **msgspec.structs.asdict(decision)}
        for server, taken in sorted(decisions.items())
        for decision in taken
    ]
