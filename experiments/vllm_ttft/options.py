"""The command line of `exp_vllm_ttft`: every option with its unit, refused early and by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.common.datasets import DATA_VARIABLE, DATASETS
from experiments.common.options import (
    MOST,
    MOST_THREADS,
    Parser,
    add_groups,
    default_dataset,
    require_model,
    size_bytes,
    whole_number,
)
from experiments.common.workload import DISTINCT_HEAD_TOKENS
from experiments.vllm_ttft.tables import REFERENCES

MOST_REPEATS = 1_000
MOST_OUTPUT_TOKENS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run, as asked for."""

    dataset: str
    context_tokens: tuple[int, ...]
    repeats: int
    output_tokens: int
    seed: int
    model: str
    dtype: str
    threads: int
    memory_bytes_per_node: int
    engine_cache_bytes: int
    output: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the record."""
        return asdict(self)


def lengths(text: str) -> tuple[int, ...]:
    """Read numbers of tokens with commas, the shortest first: the type of an option."""
    read = whole_number(DISTINCT_HEAD_TOKENS, MOST)  # prompts differ within so many
    return tuple(sorted({read(part.strip()) for part in text.split(",")}))


WORKLOAD_OPTIONS: dict[str, dict[str, Any]] = {
    "--dataset": {
        "choices": tuple(DATASETS),
        "default": default_dataset(),
        "help": f"documents and questions; all but 'embedded' are read from ${DATA_VARIABLE}",
    },
    "--context-tokens": {
        "type": lengths,
        "default": "1024,2048,4096,8064",
        "metavar": "TOKENS,...",
        "help": "document tokens of the prompts, exactly; the question is added to them",
    },
    "--repeats": {
        "type": whole_number(1, MOST_REPEATS),
        "default": 3,
        "metavar": "COUNT",
        "help": "prompts of each length, none with another's beginning",
    },
    "--output-tokens": {
        "type": whole_number(1, MOST_OUTPUT_TOKENS),
        "default": 16,
        "metavar": "COUNT",
        "help": "greedy tokens of each answer, which must be the reference's",
    },
    "--seed": {
        "type": whole_number(0, 2**59),
        "default": 1,
        "help": "the only source of chance",
    },
}
RUN_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {
        "default": "",
        "metavar": "PATH",
        "help": "folder of a Hugging Face causal model with its tokenizer.json; "
        "if empty the embedded SmolLM2-135M-Instruct",
    },
    "--dtype": {"choices": tuple(REFERENCES), "default": "float32", "help": "of weights and KV"},
    "--threads": {
        "type": whole_number(1, MOST_THREADS),
        "default": 1,
        "metavar": "COUNT",
        "help": "compute threads of each engine",
    },
    "--memory-bytes-per-node": {
        "type": size_bytes,
        "default": "1GiB",
        "metavar": "SIZE",
        "help": "the store's memory on each node; it must hold the longest prompt",
    },
    "--engine-cache-bytes": {
        "type": size_bytes,
        "default": "1GiB",
        "metavar": "SIZE",
        "help": "vLLM's own KV memory on each client; it must hold the longest prompt",
    },
    "--output": {
        "default": "results",
        "metavar": "DIR",
        "help": "the file is DIR/exp_vllm_ttft/<UTC>_<job id>.h5",
    },
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        prog="python -m experiments.exp_vllm_ttft",
        description="Measure the time to the first token of vLLM over the length of the context: "
        "recomputed, from vLLM's own cache, from the own node's store, from another node's. "
        "Writes HDF5.",
        epilog="On n ranks: mpiexec -n 4 python -m mpi4py -m experiments.exp_vllm_ttft ... (one "
        "rank of each node serves). Two clients measure, on two nodes; others idle. With one node "
        "ptstore_remote is left out.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_groups(parser, {"workload": WORKLOAD_OPTIONS, "run": RUN_OPTIONS})
    return parser


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Parse a command line.

    Raises
    ------
    UsageError
        With the usage and what is wrong.
    SystemExit
        After ``--help``.
    """
    values = vars(build_parser().parse_args(argv))
    require_model(values["model"])
    return Options(**values)
