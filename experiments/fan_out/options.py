"""The command line of `exp_fan_out`: every option with its unit, refused early and by name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.common.model_presets import MODELS
from experiments.common.options import (
    Parser,
    UsageError,
    add_groups,
    popularity,
    positive,
    whole_number,
)
from experiments.fan_out.jobs import BLOCK_TOKENS

MODES = ("replicas", "fan_out")
ADMISSIONS = ("always", "second_hit")
MOST_NODES = 1 << 12
MOST_TOKENS = (1 << 16) - BLOCK_TOKENS  # of a document: its number is in a token's upper half
MOST_DOCUMENTS = 1 << 16
MOST_MEMORY_GB = 1e5
DOCUMENTS_SHARE = 0.98  # of a node's memory: the rest describes them


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The runs that were asked for: all combinations of nodes, popularity and modes."""

    nodes: list[int]
    popularity: list[str]
    modes: list[str]
    clients_per_node: int
    documents_per_node: int
    loads: int
    context_tokens: int
    segment_tokens: int
    model: str
    memory_gb: float
    link_gb_per_s: float
    latency_us: float
    admission: str
    redirect_mb: float
    seed: int
    output: str
    json: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the record."""
        return asdict(self)

    @property
    def document_bytes(self) -> int:
        """KV of one document."""
        return self.context_tokens * MODELS[self.model].bytes_per_token


def amount(least: float, most: float) -> Callable[[str], float]:
    """Return the type of an option that is a number in ``least .. most``."""

    def read(text: str) -> float:
        value = float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) else -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a number of {least:g} to {most:g}, given {text!r:.80}"
            )
        return value

    return read


def whole_blocks(text: str) -> int:
    """Read a number of tokens, a multiple of a block's: the type of an option."""
    value = whole_number(1, MOST_TOKENS)(text)
    if value % BLOCK_TOKENS:
        raise argparse.ArgumentTypeError(
            f"expected whole blocks of {BLOCK_TOKENS} tokens, given {text!r:.80}"
        )
    return value


WORKLOAD_OPTIONS: dict[str, dict[str, Any]] = {
    "--nodes": {
        "type": whole_number(2, MOST_NODES),
        "nargs": "+",
        "default": [8, 64],
        "metavar": "COUNT",
        "help": "nodes of each run (default: 8 64)",
    },
    "--popularity": {
        "type": popularity,
        "nargs": "+",
        "default": ["zipf:1.0", "power:6"],
        "help": "of documents: power:A, zipf:S or uniform (default: zipf:1.0 power:6)",
    },
    "--modes": {
        "choices": MODES,
        "nargs": "+",
        "default": list(MODES),
        "help": "replicas: nodes keep what they fetched; fan_out: owners send readers on to these "
        "copies too (default: both)",
    },
    "--clients-per-node": {
        "type": positive,
        "default": 1,
        "metavar": "COUNT",
        "help": "clients on each node (default: 1)",
    },
    "--documents-per-node": {
        "type": positive,
        "default": 16,
        "metavar": "COUNT",
        "help": "documents that each node owns (default: 16)",
    },
    "--loads": {
        "type": positive,
        "default": 48,
        "metavar": "COUNT",
        "help": "documents that each client loads, one after the other (default: 48)",
    },
    "--context-tokens": {
        "type": whole_blocks,
        "default": 4096,
        "metavar": "TOKENS",
        "help": f"of each document, whole blocks of {BLOCK_TOKENS} (default: 4096)",
    },
    "--seed": {
        "type": whole_number(0, 2**59),
        "default": 1,
        "help": "the only source of chance (default: 1)",
    },
}
STORE_OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {
        "choices": tuple(MODELS),
        "default": "mistral-7b",
        "help": "whose KV it is (default: mistral-7b)",
    },
    "--segment-tokens": {
        "type": whole_blocks,
        "default": 1024,
        "metavar": "TOKENS",
        "help": f"of a full segment, whole blocks of {BLOCK_TOKENS} (default: 1024)",
    },
    "--memory-gb": {
        "type": amount(0.001, MOST_MEMORY_GB),
        "default": 64.0,
        "metavar": "GB",
        "help": "KV memory of each node (default: 64)",
    },
    "--admission": {
        "choices": ADMISSIONS,
        "default": "always",
        "help": "which segments of other nodes are kept: all, or those asked for again "
        "(default: always)",
    },
    "--redirect-mb": {
        "type": amount(0.001, MOST_MEMORY_GB),
        "default": 64.0,
        "metavar": "MB",
        "help": "redirect_bytes of fan_out: bytes that a copy may have under way before further "
        "readers are sent to others (default: 64)",
    },
    "--link-gb-per-s": {
        "type": amount(0.001, 1e4),
        "default": 25.0,
        "metavar": "GB",
        "help": "speed of each node's link, out and in (default: 25)",
    },
    "--latency-us": {
        "type": amount(0, 1e6),
        "default": 5.0,
        "metavar": "US",
        "help": "mean time of a message on its way (default: 5)",
    },
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        prog="python -m experiments.exp_fan_out",
        usage="%(prog)s [OPTION ...]",  # all of them would bury what an error says
        description="Load few documents on many nodes at once, with fan-out and without, on a "
        "virtual clock where each node has a link out and a link in. No model runs, bytes are "
        "counted. Every combination of --nodes, --popularity and --modes is a run; writes HDF5.",
    )
    add_groups(parser, {"workload": WORKLOAD_OPTIONS, "store": STORE_OPTIONS})
    output = parser.add_argument_group("output").add_argument
    where = "the file is DIR/exp_fan_out/<UTC>_<job id>.h5 (default: results)"
    output("--output", default="results", metavar="DIR", help=where)
    output("--json", action="store_true", help="print one JSON object per run, not the table")
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
    options = Options(**vars(build_parser().parse_args(argv)))
    if "distinct" in options.popularity:
        raise UsageError("--popularity: expected documents that recur, given 'distinct'")
    own_bytes = options.documents_per_node * options.document_bytes
    room_bytes = DOCUMENTS_SHARE * options.memory_gb * 1e9
    if own_bytes > room_bytes:
        raise UsageError(
            f"--memory-gb: expected room for {options.documents_per_node} documents of "
            f"{options.document_bytes} bytes on each node, given {options.memory_gb:g}"
        )
    documents = options.documents_per_node * max(options.nodes)
    if documents > MOST_DOCUMENTS:
        raise UsageError(
            f"--documents-per-node: expected at most {MOST_DOCUMENTS} documents in all, "
            f"given {documents}"
        )
    return options
