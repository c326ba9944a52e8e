"""Run every case of the conformance suite over MPI, one job after the other in one process.

usage: conformance.py [TRANSPORT] [FIELD=VALUE ...]

The transport is `mpi` (found by the probe) where none is named; the fields are those of Config
that differ from the suite's own.
"""

from __future__ import annotations

import sys
import time

from mpi4py import MPI

from ptstore_mpi.testing.conformance import CASES, run_case


def main() -> None:
    given = dict(argument.split("=") for argument in sys.argv[1:] if "=" in argument)
    settings = {name: int(value) for name, value in given.items()}
    named = [argument for argument in sys.argv[1:] if "=" not in argument]
    transport = (*named, "mpi")[0] if MPI.COMM_WORLD.Get_size() > 1 else "local"
    for case in CASES.values():
        started = time.perf_counter()
        run_case(case, transport, **settings)
        if MPI.COMM_WORLD.Get_rank() == 0:
            print(f"passed {case.name} {time.perf_counter() - started:.2f} s", flush=True)


main()
