"""The command line of `exp_trace_replay`: every option with its unit, refused early and by name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.common.model_presets import MODELS
from experiments.common.options import (
    PLACEMENTS,
    POLICIES,
    Parser,
    UsageError,
    add_groups,
    popularity,
    positive,
    size_bytes,
    whole_number,
)
from experiments.traces import FILES, QUESTIONS, TRACES

ROUTINGS = ("random", "round_robin", "affinity")
ADMISSIONS = ("second_hit", "always", "never")
TRANSPORTS = ("sim", "mpi")
MOST_BYTES_PER_TOKEN = 1 << 30
MOST_PLACES = 1 << 16  # a segment's name has 16 bits for its owner
MOST_MEMORY_BYTES = (1 << 48) - 1

QUESTION_DEFAULTS = {"popularity": "power:6", "documents": 12, "context_tokens": 2000}
SIM_DEFAULTS = {"nodes": 8, "clients_per_node": 4}
DEFAULT_MODEL = "mistral-7b"
DEFAULT_MEMORY_TOKENS = 2_000_000
DEFAULT_REPLICA_SHARE = 50.0
SIM_FOLDER = "sim"  # over ``sim`` no file is made: any name will do
LEAST_SEGMENT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run, as asked for.

    Attributes
    ----------
    nodes, clients_per_node
        Of ``sim``; 0 over MPI, where the job decides.
    memory_bytes
        KV memory of each node.
    replica_share, replica_floor
        Most and least of it that replicas may take, percent.
    ssd_dir, ssd_bytes
        Folder and size of each node's SSD tier; empty and 0: none.
    block_tokens, segment_tokens
        0: what fits the trace.
    model
        Key of `MODELS`; empty where ``bytes_per_token`` was given.
    """

    trace: str
    path: str
    requests: int
    popularity: str
    documents: int
    context_tokens: int
    transport: str
    nodes: int
    clients_per_node: int
    memory_bytes: int
    placement: str
    policy: str
    admission: str
    replica_share: float
    replica_floor: float
    ssd_tokens: int
    ssd_bytes: int
    ssd_dir: str
    routing: str
    model: str
    bytes_per_token: int
    block_tokens: int
    segment_tokens: int
    seed: int
    output: str
    json: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the record."""
        return asdict(self)


def percent(text: str) -> float:
    """Read a share in percent: the type of an option."""
    value = float(text) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", text) else -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(
            f"expected a share of 0 to 100 percent, given {text!r:.80}"
        )
    return value


WORKLOAD_OPTIONS: dict[str, dict[str, Any]] = {
    "--trace": {
        "choices": TRACES,
        "default": "generated",
        "help": "what is replayed; 'generated' needs no files; "
        f"{', '.join(QUESTIONS)} are questions over documents (default: generated)",
    },
    "--path": {
        "default": "",
        "metavar": "FILE",
        "help": f"file of {', '.join(FILES)}, .jsonl or .jsonl.gz (default: in $PTSTORE_DATA)",
    },
    "--requests": {
        "type": positive,
        "default": 0,
        "metavar": "COUNT",
        "help": "the first requests only (default: all; 400 of what is made or asked)",
    },
    "--popularity": {
        "type": popularity,
        "help": "of documents: power:A, zipf:S, uniform or distinct (default: power:6)",
    },
    "--documents": {
        "type": positive,
        "metavar": "COUNT",
        "help": "documents that are asked about (default: 12)",
    },
    "--context-tokens": {
        "type": positive,
        "metavar": "TOKENS",
        "help": "document tokens in each prompt (default: 2000)",
    },
    "--routing": {
        "choices": ROUTINGS,
        "default": "random",
        "help": "how requests are dealt to clients; affinity: a session, or document, always to "
        "the same client (default: random)",
    },
    "--seed": {
        "type": whole_number(0, 2**59),
        "default": 1,
        "help": "the only source of chance (default: 1)",
    },
}
STORE_OPTIONS: dict[str, dict[str, Any]] = {
    "--transport": {
        "choices": TRANSPORTS,
        "default": "sim",
        "help": "sim: the store's own code on a clock that stands still, bytes counted, not moved; "
        "mpi: under mpiexec, bytes moved and checked (default: sim)",
    },
    "--nodes": {
        "type": whole_number(1, MOST_PLACES),
        "metavar": "COUNT",
        "help": "nodes of sim (default: 8)",
    },
    "--clients-per-node": {
        "type": whole_number(1, MOST_PLACES),
        "metavar": "COUNT",
        "help": "clients on each node of sim (default: 4)",
    },
    "--placement": {
        "choices": PLACEMENTS,
        "default": "local",
        "help": "which server owns what is stored (default: local)",
    },
    "--policy": {
        "choices": POLICIES,
        "default": "lru",
        "help": "what a full server evicts; none: it refuses stores (default: lru)",
    },
    "--admission": {
        "choices": ADMISSIONS,
        "default": "second_hit",
        "help": "which segments of other nodes are kept on this one once they were fetched: those "
        "asked for again, all, or none (default: second_hit)",
    },
    "--replica-share": {
        "type": percent,
        "default": DEFAULT_REPLICA_SHARE,
        "metavar": "PERCENT",
        "help": "most of the memory that such replicas may take (default: 50)",
    },
    "--replica-floor": {
        "type": percent,
        "default": 0.0,
        "metavar": "PERCENT",
        "help": "up to this share they stay though owned segments want room (default: 0)",
    },
    "--ssd-tokens": {
        "type": whole_number(0, 10**12),
        "default": 0,
        "metavar": "TOKENS",
        "help": "SSD of each node in tokens of the model, below its memory (default: 0, none)",
    },
    "--ssd-dir": {
        "metavar": "DIR",
        "help": "folder of that SSD on every node; over sim none is needed",
    },
    "--block-tokens": {
        "type": positive,
        "default": 0,
        "metavar": "TOKENS",
        "help": "tokens of a block, the unit of matching (default: 512 where the trace has ids of "
        "blocks, else 16)",
    },
    "--segment-tokens": {
        "type": positive,
        "default": 0,
        "metavar": "TOKENS",
        "help": "tokens of a full segment, whole blocks (default: 512, or one block)",
    },
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        prog="python -m experiments.exp_trace_replay",
        usage="%(prog)s [OPTION ...]",  # all of them would bury what an error says
        description="Replay a trace of requests on the store, without a model: match, load, store "
        "the increment. Counts hits by source, bytes and refused stores beside what the best cache "
        "could find; writes HDF5.",
        epilog="Over real MPI: mpiexec -n 4 python -m mpi4py -m experiments.exp_trace_replay "
        "--transport mpi --bytes-per-token 64 ... (one rank of each node serves).",
    )
    add_groups(parser, {"workload": WORKLOAD_OPTIONS, "store": STORE_OPTIONS})
    size = parser.add_argument_group("sizes").add_mutually_exclusive_group()
    size.add_argument(
        "--model", choices=tuple(MODELS), help=f"whose KV it is (default: {DEFAULT_MODEL})"
    )
    size.add_argument(
        "--bytes-per-token", type=whole_number(1, MOST_BYTES_PER_TOKEN), metavar="BYTES",
        help="in place of a model's: small ones let a small machine move a trace's bytes",
    )  # fmt: skip
    memory = parser.add_argument_group(
        "memory", "of each node, its metadata included; all nodes together have nodes times as much"
    ).add_mutually_exclusive_group()
    memory.add_argument(
        "--memory-tokens", type=whole_number(1, 10**12), metavar="TOKENS",
        help=f"KV memory of each node in tokens of the model (default: {DEFAULT_MEMORY_TOKENS})",
    )  # fmt: skip
    memory.add_argument(
        "--memory-bytes", type=size_bytes, metavar="SIZE",
        help="the same in bytes: 512MiB, 1TB",
    )  # fmt: skip
    output = parser.add_argument_group("output").add_argument
    where = "the file is DIR/exp_trace_replay/<UTC>_<job id>.h5 (default: results)"
    output("--output", default="results", metavar="DIR", help=where)
    output("--json", action="store_true", help="print one JSON object in place of the table")
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
    trace = values["trace"]
    _only_where(values, QUESTION_DEFAULTS, f"--trace {'|'.join(QUESTIONS)}", trace in QUESTIONS)
    _only_where(values, SIM_DEFAULTS, "--transport sim", values["transport"] == "sim")
    if values["path"] and trace not in FILES:
        raise UsageError(f"--path is for --trace {'|'.join(FILES)}, given with {trace!r}")
    if values["bytes_per_token"] is None:
        values["model"] = values["model"] or DEFAULT_MODEL
        values["bytes_per_token"] = MODELS[values["model"]].bytes_per_token
    else:
        values["model"] = ""
    tokens = values.pop("memory_tokens") or DEFAULT_MEMORY_TOKENS
    if values["memory_bytes"] is None:
        values["memory_bytes"] = tokens * values["bytes_per_token"]
        if values["memory_bytes"] > MOST_MEMORY_BYTES:
            raise UsageError(
                f"--memory-tokens: expected at most {MOST_MEMORY_BYTES} bytes on a node, given "
                f"{tokens} tokens of {values['bytes_per_token']} bytes"
            )
    _check_replicas(values)
    _fit_ssd(values)
    return Options(**values)


def _check_replicas(values: dict[str, Any]) -> None:
    if values["replica_floor"] > values["replica_share"]:
        raise UsageError(
            f"--replica-floor: expected at most --replica-share ({values['replica_share']:g}), "
            f"given {values['replica_floor']:g}"
        )


def _fit_ssd(values: dict[str, Any]) -> None:
    """Set bytes and folder of the SSD; both or neither."""
    tokens, folder = values["ssd_tokens"], values["ssd_dir"]
    values["ssd_bytes"] = tokens * values["bytes_per_token"]
    if values["ssd_bytes"] > MOST_MEMORY_BYTES:
        raise UsageError(
            f"--ssd-tokens: expected at most {MOST_MEMORY_BYTES} bytes on a node, given "
            f"{tokens} tokens of {values['bytes_per_token']} bytes"
        )
    if folder is not None and values["transport"] == "sim":
        raise UsageError("--ssd-dir is for --transport mpi only")
    if values["transport"] == "mpi" and bool(tokens) != bool(folder):
        raise UsageError(
            f"--ssd-tokens and --ssd-dir go together, given {tokens} and {folder!r:.80}"
        )
    if tokens and not folder:
        folder = SIM_FOLDER
    values["ssd_dir"] = folder or ""


def _only_where(
    values: dict[str, Any], defaults: dict[str, Any], where: str, applies: bool
) -> None:
    """Fill in defaults where options apply; refuse them where they would do nothing."""
    for name, default in defaults.items():
        if values[name] is None:
            values[name] = default if applies else type(default)()
        elif not applies:
            raise UsageError(f"--{name.replace('_', '-')} is for {where} only")
