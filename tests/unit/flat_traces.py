"""Block traces for comparing policies with another simulator: (key, nbytes), no prefixes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

Trace = list[tuple[int, int]]


def generated_trace(count=20_000):
    """Return skewed requests, every fifth of something that never comes again; sizes 1 to 7."""
    word, trace = 1, []
    for i in range(count):
        word = (word * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        key = 1 + (2000 * (word >> 33) ** 4 >> 124)  # whole numbers: the same everywhere
        key = 100_000 + i if i % 5 == 0 else key
        trace.append((key, 1 + (key * 2654435761 >> 7) % 7))
    return trace


def mooncake_trace(folder, count=40_000):
    """Return the first block requests of the Mooncake conversation trace, each of size 1."""
    trace = []
    path = Path(folder) / "mooncake" / "conversation_trace.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            trace.extend((key + 1, 1) for key in json.loads(line)["hash_ids"])
            if len(trace) >= count:
                break
    return trace[:count]
