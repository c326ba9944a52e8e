"""The systems of `exp_vllm_ttft`, and its tables in result files."""

from __future__ import annotations

from experiments.record import SOURCE_COLUMNS, TEXT, Table

EXPERIMENT = "exp_vllm_ttft"
SYSTEMS = {  # name -> source that it reuses from
    "vanilla": "",
    "prefix": "engine",
    "ptstore_local": "owned",
    "ptstore_remote": "remote",
}
# Below float32 a prompt computed in two parts differs from one computed whole, whoever kept the
# first part; vLLM's own cache computes it in the same parts as the store.
REFERENCES = {"float32": "vanilla", "bfloat16": "prefix"}
SAMPLE_COLUMNS: dict[str, tuple[str, str]] = {
    "request": ("i8", "1"),
    "client": ("i4", "1"),
    "node": ("i4", "1"),
    "repeat": ("i4", "1"),
    "context_tokens": ("i8", "tokens"),
    "prompt_tokens": ("i8", "tokens"),
    "start_s": ("f8", "s"),
    "ttft_s": ("f8", "s"),
    "ttft_cpu_s": ("f8", "s"),
    "total_s": ("f8", "s"),
    "cpu_s": ("f8", "s"),
    "match_s": ("f8", "s"),
    "load_s": ("f8", "s"),
    "asked_tokens": ("i8", "tokens"),
    **SOURCE_COLUMNS,
    "output_tokens": ("i8", "tokens"),
    "same_tokens": ("i8", "tokens"),
    "reason": (TEXT, "text"),
}


def samples_of(system: str) -> Table:
    """Return the table of the samples of a system."""
    return Table(f"samples/{system}", SAMPLE_COLUMNS)
