"""Result files with known numbers, for the tests of report and plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import record

ATTRIBUTES = {
    "experiment": "exp_qa_replay",
    "systems": "vanilla,prefix,ptstore",
    "start_utc": "20260102T030405Z",
    "bytes_per_token": 100,
    "requests_count": 4,
    "clients_count": 2,
    "servers_count": 2,
    "mpi_library": "MPI of nowhere",
    "transport": "mpi",
    "transport_reason": "asked for",
}


def sample(request: int, ttft_s: float, **changes: Any) -> dict[str, Any]:
    """One row of 100 tokens, recomputed but for what `changes` says of the sources."""
    row: dict[str, Any] = {
        name: "" if kind == record.TEXT else 0 for name, (kind, _) in record.SAMPLE_COLUMNS.items()
    }
    row |= {
        "request": request,
        "client": request % 2,
        "ttft_s": ttft_s,
        "prefill_s": ttft_s,
        "asked_tokens": 100,
        "same_token": 1,
        "max_abs_logit_diff": 0.0,
    }
    row |= changes
    reused = sum(row[f"{source}_tokens"] for source in ("engine", "owned", "remote"))
    row["recomputed_tokens"] = changes.get("recomputed_tokens", 100 - reused)
    return row


def write(
    folder: Path,
    samples: Mapping[str, list[dict[str, Any]]],
    *,
    counters: Mapping[str, float] | None = None,
    stem: str = "made",
) -> Path:
    """Write a file with one batch of two clients: busy 3 s and 4 s for every system."""
    with record.ResultFile(folder, stem, ATTRIBUTES) as file:
        for system, rows in samples.items():
            file.append(record.samples_of(system), rows)
            turns = [{"batch": 0, "client": c, "busy_s": 3.0 + c} for c in range(2)]
            mine = dict(counters or {}) if system == "ptstore" else {}
            file.append_counted(record.batches_of(system), turns, [mine, mine])
        file.flush()
        return file.finish()


def usual_samples() -> dict[str, list[dict[str, Any]]]:
    """Four requests: vanilla 8 s each; ptstore recomputes one, the rest from two sources."""
    return {
        "vanilla": [sample(i, 8.0) for i in range(4)],
        "prefix": [sample(i, t) for i, t in enumerate((8.0, 7.0))]
        + [sample(i, 1.0, engine_tokens=96, load_s=0.1, prefill_s=0.9) for i in (2, 3)],
        "ptstore": [
            sample(0, 8.0, match_s=0.01),
            sample(1, 1.0, owned_tokens=96, match_s=0.01, load_s=0.09, prefill_s=0.9),
            sample(2, 2.0, remote_tokens=80, owned_tokens=16, load_s=0.2, prefill_s=1.8),
            sample(3, 4.0, remote_tokens=48, load_s=0.1, prefill_s=3.9),
        ],
    }
