"""The command ``ptstore``. Owns its arguments; starts MPI only once they are understood."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

__all__ = ["main"]

_DOCTOR = """\
Open a real job with your settings (PTSTORE_CONFIG, PTSTORE_<NAME>) and say what it runs on.

Run it as you run your jobs:
  mpiexec -n 4 python -m mpi4py -m ptstore_mpi doctor
"""


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
    options = parser.parse_args(argv)
    code: int = import_module("ptstore_mpi.doctor").run(as_json=options.json)
    return code
