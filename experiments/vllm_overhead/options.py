"""The command line of `exp_vllm_overhead`: every option with its unit, refused early and by name.

What it has in common with `exp_vllm_ttft` is taken from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.common.options import (
    MOST,
    Parser,
    add_groups,
    require_model,
    size_bytes,
    whole_number,
)
from experiments.common.workload import DISTINCT_HEAD_TOKENS
from experiments.vllm_ttft import options as vllm_ttft

MOST_REQUESTS = 100_000
MOST_BATCH = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run, as asked for."""

    dataset: str
    context_tokens: int
    requests: int
    batch: int
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

    def for_prompts(self, count: int) -> vllm_ttft.Options:
        """Return the options with which `exp_vllm_ttft` builds ``count`` prompts of this run."""
        values = self.as_dict()
        del values["requests"], values["batch"]
        return vllm_ttft.Options(
            **{**values, "context_tokens": (self.context_tokens,), "repeats": count}
        )


WORKLOAD_OPTIONS: dict[str, dict[str, Any]] = {
    "--dataset": vllm_ttft.WORKLOAD_OPTIONS["--dataset"],
    "--context-tokens": {
        "type": whole_number(DISTINCT_HEAD_TOKENS, MOST),
        "default": 1024,
        "metavar": "TOKENS",
        "help": "document tokens in each prompt, exactly; the question is added to them",
    },
    "--requests": {
        "type": whole_number(2, MOST_REQUESTS),
        "default": 16,
        "metavar": "COUNT",
        "help": "prompts, which each system answers; none has another's beginning; a multiple of "
        "twice --batch, for the systems change places after half of the batches",
    },
    "--batch": {
        "type": whole_number(1, MOST_BATCH),
        "default": 2,
        "metavar": "COUNT",
        "help": "requests that are submitted to vLLM at once, before the other system's turn",
    },
    "--output-tokens": {
        **vllm_ttft.WORKLOAD_OPTIONS["--output-tokens"],
        "help": "greedy tokens of each answer, which must be the same from both systems",
    },
    "--seed": vllm_ttft.WORKLOAD_OPTIONS["--seed"],
}
RUN_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: vllm_ttft.RUN_OPTIONS[name] for name in ("--model", "--dtype", "--threads")},
    "--memory-bytes-per-node": {
        "type": size_bytes,
        "default": "1GiB",
        "metavar": "SIZE",
        "help": "the store's memory on the node; it must hold the longest prompt, and where it "
        "holds less than all of them, making room is measured too",
    },
    "--engine-cache-bytes": {
        **vllm_ttft.RUN_OPTIONS["--engine-cache-bytes"],
        "help": "vLLM's own KV memory, of each engine; it must hold the longest prompt, and "
        "requests of a batch wait where it does not hold them all",
    },
    "--output": {
        "default": "results",
        "metavar": "DIR",
        "help": "the file is DIR/exp_vllm_overhead/<UTC>_<job id>.h5",
    },
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        prog="python -m experiments.exp_vllm_overhead",
        description="Measure what the connector costs vLLM where nothing is ever reused: "
        "throughput, time to the first token and CPU time with it and without. Writes HDF5.",
        epilog="On three ranks: mpiexec -n 3 python -m mpi4py -m experiments.exp_vllm_overhead "
        "... (one serves). Two clients of one node measure; others idle.",
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
    parser = build_parser()
    options = Options(**vars(parser.parse_args(argv)))
    if options.requests % (2 * options.batch):
        parser.error(
            f"argument --requests: expected a multiple of twice --batch, {2 * options.batch}, "
            f"given {options.requests}"
        )
    require_model(options.model)
    return options
