"""The tables of `exp_fan_out` in its result files."""

from __future__ import annotations

from experiments.record import TEXT, Table

EXPERIMENT = "exp_fan_out"

RUNS = Table(
    "runs",
    {
        "run": ("i4", "1"),
        "nodes_count": ("i4", "1"),
        "clients_count": ("i4", "1"),
        "documents_count": ("i4", "1"),
        "popularity": (TEXT, "text"),
        "mode": (TEXT, "text"),
        "document_bytes": ("i8", "bytes"),
        "sent_bytes": ("i8", "bytes"),
        "virtual_s": ("f8", "s"),
        "redirect_count": ("i8", "1"),
        "stale_hint_count": ("i8", "1"),
        "deferred_count": ("i8", "1"),
        "wall_s": ("f8", "s"),
    },
)
NODES = Table(
    "nodes",
    {
        "run": ("i4", "1"),
        "node": ("i4", "1"),
        "sent_bytes": ("i8", "bytes"),
        "replica_bytes": ("i8", "bytes"),
    },
)
LOADS = Table(
    "samples/loads",
    {
        "run": ("i4", "1"),
        "client": ("i4", "1"),
        "document": ("i4", "1"),
        "load_s": ("f8", "s"),
        "asked_tokens": ("i8", "tokens"),
        "owned_tokens": ("i8", "tokens"),
        "replica_tokens": ("i8", "tokens"),
        "remote_tokens": ("i8", "tokens"),
    },
)
