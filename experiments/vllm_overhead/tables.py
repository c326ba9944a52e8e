"""The systems of `exp_vllm_overhead`, and its tables in result files."""

from __future__ import annotations

from experiments.record import SOURCE_COLUMNS, TEXT, Table

EXPERIMENT = "exp_vllm_overhead"
PLAIN, CONNECTOR = SYSTEMS = ("plain", "connector")
SAMPLE_COLUMNS: dict[str, tuple[str, str]] = {
    "request": ("i8", "1"),
    "client": ("i4", "1"),
    "batch": ("i4", "1"),
    "ttft_s": ("f8", "s"),
    "match_s": ("f8", "s"),
    "prompt_tokens": ("i8", "tokens"),
    "asked_tokens": ("i8", "tokens"),
    **SOURCE_COLUMNS,
    "output_tokens": ("i8", "tokens"),
    "same_tokens": ("i8", "tokens"),
    "stored_bytes": ("i8", "bytes"),
    "reason": (TEXT, "text"),
    "store_reason": (TEXT, "text"),
}
BATCH_COLUMNS: dict[str, tuple[str, str]] = {
    "batch": ("i4", "1"),
    "client": ("i4", "1"),
    "turn": ("i4", "1"),
    "start_s": ("f8", "s"),
    "wall_s": ("f8", "s"),
    "cpu_s": ("f8", "s"),
    "settled_s": ("f8", "s"),
    "settled_cpu_s": ("f8", "s"),
}


def samples_of(system: str) -> Table:
    """Return the table of the samples of a system."""
    return Table(f"samples/{system}", SAMPLE_COLUMNS)


def batches_of(system: str) -> Table:
    """Return the table of the batches of a system."""
    return Table(f"batches/{system}", BATCH_COLUMNS)
