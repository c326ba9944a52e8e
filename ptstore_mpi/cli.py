"""The command ``ptstore``. Owns its arguments; starts MPI only once they are understood."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

__all__ = ["main"]

_DOCTOR = """\
Open a real job with your settings (PTSTORE_CONFIG, PTSTORE_<NAME>) and say what it runs on.

Run it as you run your jobs:
  mpiexec -n 4 python -m mpi4py -m ptstore_mpi doctor
"""
_EXPERIMENT = Path("experiments") / "exp_trace_replay.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of this process."""
    parser = argparse.ArgumentParser(prog="ptstore", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="is this machine fit?",
        description=_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit code: 0 when a job can be opened, 1 when not",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of text")
    stats = commands.add_parser(
        "stats",
        help="what the stores of a run counted",
        description="Print what the stores of a run counted: tokens by source, bytes by path, "
        "reasons, counters of the servers, transport. Reads a results file of any experiment.",
        epilog="exit code: 0; 1 where the file cannot be read; 2 where h5py is missing",
    )
    stats.add_argument("file", type=Path, metavar="FILE.h5", help="a results file, or a *.h5.part")
    stats.add_argument("--json", action="store_true", help="one JSON object instead of text")
    # The experiment knows its options, and says them after --help.
    commands.add_parser("replay", help="replay a trace, without a model", add_help=False)
    options, rest = parser.parse_known_args(argv)
    if options.command == "replay":
        return _replay(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "stats":
        counted: int = import_module("ptstore_mpi.file_stats").run(
            options.file, as_json=options.json
        )
        return counted
    code: int = import_module("ptstore_mpi.doctor").run(as_json=options.json)
    return code


def _replay(arguments: Sequence[str]) -> int:
    """Run the trace replay of the repository that this package is a part of."""
    repository = Path(__file__).resolve().parents[1]
    if not (repository / _EXPERIMENT).is_file():
        print(
            f"ptstore replay: expected {_EXPERIMENT} beside the package, in {repository}; the "
            "experiments are a part of the repository, not of the installed package. Clone it "
            "and install it with: pip install -e '.[experiments]'",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(repository))
    code: int = import_module("experiments.exp_trace_replay").main(arguments)
    return code
