"""The command line of `exp_qa_replay`: every option with its unit, refused early and by name."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from experiments.baselines import DEFAULT_SYSTEMS, SYSTEMS
from experiments.common.datasets import DATA_VARIABLE, DATASETS
from experiments.common.workload import ROUTINGS, Popularity, WorkloadError
from experiments.engines import ENGINES
from ptstore_mpi.cache.policies.factory import POLICY_NAMES

PLACEMENTS = ("local", "random", "least_loaded")
POLICIES = (*POLICY_NAMES, "none")
FETCHES = ("cost", "always")
DTYPES = ("float32", "bfloat16", "float16")
MOST = 10_000_000  # of whatever is counted: a slip of the finger, not a run
MOST_THREADS = 256


class UsageError(ValueError):
    """The command line asks for something impossible; the message is for its author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run, as asked for."""

    dataset: str
    context_tokens: int
    documents: int
    requests: int
    popularity: str
    routing: str
    systems: tuple[str, ...]
    memory_bytes_per_node: int
    batch: int
    engine: str
    model: str
    dtype: str
    threads: int
    seed: int
    output: str
    placement: str
    fetch: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the record."""
        return asdict(self)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are raised, as `UsageError`."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving: only one rank shall print."""
        raise UsageError(f"{self.format_usage()}{self.prog}: {message}")


def size_bytes(text: str) -> int:
    """Read a size above 0, such as 512MiB: the type of an option."""
    from ptstore_mpi import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected a size above 0, given {text!r}")
    return size


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number in ``least .. most``."""

    def read(text: str) -> int:
        value = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least} and at most {most}, "
                f"given {text!r:.80}"
            )
        return value

    return read


positive = whole_number(1, MOST)


def _systems(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"expected names among {','.join(SYSTEMS)}, given {text!r}"
        )
    # Vanilla first: its logits are what the others are compared with.
    return tuple(name for name in SYSTEMS if name in names)


def unit_share(text: str) -> float:
    """Check a share, 0 to 1: the type of an option."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, given {text!r:.80}")
    return value


def popularity(text: str) -> str:
    """Check a popularity: the type of an option."""
    try:
        Popularity.parse(text)
    except WorkloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def default_dataset() -> str:
    """Return "squad" where a data folder is named, else "embedded"."""
    folder = os.environ.get(DATA_VARIABLE, "")
    return "squad" if folder and Path(folder).is_dir() else "embedded"


WORKLOAD_OPTIONS: dict[str, dict[str, Any]] = {
    "--dataset": {
        "choices": tuple(DATASETS),
        "default": default_dataset(),
        "help": f"documents and questions; all but 'embedded' are read from ${DATA_VARIABLE}",
    },
    "--context-tokens": {
        "type": positive,
        "default": 2000,
        "metavar": "TOKENS",
        "help": "document tokens in each prompt, exactly; the question is added to them",
    },
    "--documents": {
        "type": positive,
        "default": 12,
        "metavar": "COUNT",
        "help": "documents that are asked about (not used by --popularity distinct)",
    },
    "--requests": {
        "type": positive,
        "default": 24,
        "metavar": "COUNT",
        "help": "requests of all clients together",
    },
    "--popularity": {
        "type": popularity,
        "default": "power:6",
        "help": "power:A (the paper's, A = 6), zipf:S, uniform, or distinct (nothing recurs)",
    },
    "--routing": {
        "choices": ROUTINGS,
        "default": "random",
        "help": "how requests are dealt to clients; affinity: a document always to the same "
        "client; sorted: the whole trace by prefix, in contiguous shares",
    },
    "--seed": {
        "type": whole_number(0, 2**59),
        "default": 1,
        "help": "the only source of chance",
    },
}
RUN_OPTIONS: dict[str, dict[str, Any]] = {
    "--systems": {
        "type": _systems,
        "default": ",".join(DEFAULT_SYSTEMS),
        "metavar": "NAME,...",
        "help": f"which systems answer the same requests, of {','.join(SYSTEMS)}; each of the last "
        "three has servers of its own, so every node needs a rank for each, and one for a client",
    },
    "--memory-bytes-per-node": {
        "type": size_bytes,
        "default": "320MiB",
        "metavar": "SIZE",
        "help": "KV memory of each node, for each system as much: 'prefix' shares it out among the "
        "node's clients, the others' servers have it to themselves; 512MiB, 1GiB, or bytes",
    },
    "--placement": {
        "choices": PLACEMENTS,
        "default": "local",
        "help": "which server owns what is stored",
    },
    "--fetch": {
        "choices": FETCHES,
        "default": "cost",
        "help": "cost: what would take longer to load than to compute, as measured in the run, is "
        "computed; always: what is found is loaded",
    },
    "--batch": {
        "type": positive,
        "default": 3,
        "metavar": "COUNT",
        "help": "requests per client before the next system has its turn, with --engine vllm "
        "before they are recorded",
    },
    "--engine": {
        "choices": ENGINES,
        "default": "transformers",
        "help": "what computes: transformers, on the CPU, systems in turn; or vllm, an engine for "
        "each system, one after the other",
    },
    "--model": {
        "default": "",
        "metavar": "PATH",
        "help": "folder of a Hugging Face causal model with its tokenizer.json; "
        "if empty the embedded SmolLM2-135M-Instruct",
    },
    "--dtype": {"choices": DTYPES, "default": "float32", "help": "of weights and KV"},
    "--threads": {
        "type": whole_number(0, MOST_THREADS),
        "default": 0,
        "metavar": "COUNT",
        "help": "compute threads per client; 0 shares the machine's cores among its clients",
    },
    "--output": {
        "default": "results",
        "metavar": "DIR",
        "help": "the file is DIR/exp_qa_replay/<UTC>_<job id>.h5",
    },
}


def add_groups(
    parser: argparse.ArgumentParser, groups: Mapping[str, Mapping[str, dict[str, Any]]]
) -> None:
    """Add groups of options: by their title, names with the settings of `add_argument`."""
    for title, options in groups.items():
        add = parser.add_argument_group(title).add_argument
        for name, settings in options.items():
            add(name, **settings)


def require_model(folder: str) -> None:
    """Raise UsageError where a model's folder lacks its files; empty: the embedded model."""
    for name in ("config.json", "tokenizer.json") if folder else ():
        if not (Path(folder) / name).is_file():
            raise UsageError(f"--model: expected a folder with {name}, given {folder!r}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, with the defaults of the main job."""
    parser = Parser(
        prog="python -m experiments.exp_qa_replay",
        description="Replay extractive question answering over documents on several systems, "
        "measure TTFT, write HDF5.",
        epilog="On n ranks: mpiexec -n 4 python -m mpi4py -m experiments.exp_qa_replay ... "
        "(one rank of each node serves, or one for each pooled system). With plain python one rank "
        "is client and server.",
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
