"""Run simulated jobs from seeds: ``python -m ptstore_mpi.sim``.

Exit status 0: every invariant held in every run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec

from ptstore_mpi.sim.faults import FAULTS, SITUATIONS, FaultPlan
from ptstore_mpi.sim.run import Report, SeedFailed, run_seed, run_seeds
from ptstore_mpi.sim.trace import START_S
from ptstore_mpi.sim.workloads import WORKLOADS

_CHUNK_SEEDS = 25
_TELLING_SEEDS = 500  # from so many seeds on, everything must have come about


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        plan = None if options.plan is None else msgspec.json.decode(options.plan, type=FaultPlan)
    except msgspec.MsgspecError as error:
        parser.error(f"--plan: {error}, got {options.plan!r}")
    workloads = list(dict.fromkeys(options.workload or WORKLOADS))
    if options.trace:
        return _trace(workloads, options.first_seed, options.seeds, plan)
    started = time.perf_counter()
    total = Report()
    for report in _reports(workloads, options, plan):
        total.add(report)
        for failure in report.failures:
            print(failure, end="\n\n")
        if sys.stderr.isatty():
            print(f"\r{total.seed_count} of {options.seeds} seeds", end="", file=sys.stderr)
    seconds = time.perf_counter() - started
    processes = min(options.processes, -(-options.seeds // _chunk_seeds(options)))
    print(
        f"seeds {options.first_seed} .. {options.first_seed + options.seeds - 1} of "
        f"{', '.join(workloads)}: {total.run_count} runs, {total.event_count} events, "
        f"{len(total.failures)} failed; {total.seed_count / seconds:.1f} seeds/s "
        f"on {processes} process(es)"
    )
    print(_table(total.fired))
    never = [name for name in (*FAULTS, *SITUATIONS) if not total.fired[name]]
    if never and plan is None and not options.workload and options.seeds >= _TELLING_SEEDS:
        print(f"failed: {', '.join(never)} never came about")
        return 1
    return 1 if total.failures else 0


def _chunk_seeds(options: argparse.Namespace) -> int:
    """Return how many seeds a process takes at a time."""
    size: int = max(1, min(_CHUNK_SEEDS, options.seeds // options.processes))
    return size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ptstore_mpi.sim",
        description="Run jobs of several servers and clients on a virtual clock, with faults drawn "
        "from each seed, and check every invariant of the store in every run.",
    )
    parser.add_argument("--seeds", type=_positive, default=100, metavar="N", help="default 100")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K", help="default 0")
    parser.add_argument(
        "--workload",
        action="append",
        choices=list(WORKLOADS),
        help="default: all; may be given more than once",
    )
    parser.add_argument(
        "--processes",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="default: one per core",
    )
    parser.add_argument(
        "--plan",
        metavar="JSON",
        help='faults instead of those of the seed, such as \'{"lose": 0.1, "stall": 0.01}\'; '
        f"fields: {', '.join(FaultPlan.__struct_fields__)}",
    )
    parser.add_argument("--trace", action="store_true", help="print what happened, step by step")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _reports(
    workloads: Sequence[str], options: argparse.Namespace, plan: FaultPlan | None
) -> Iterator[Report]:
    first, end, size = options.first_seed, options.first_seed + options.seeds, _chunk_seeds(options)
    chunks = [range(start, min(start + size, end)) for start in range(first, end, size)]
    if options.processes == 1 or len(chunks) == 1:
        for chunk in chunks:
            yield run_seeds(workloads, chunk, plan)
        return
    with ProcessPoolExecutor(options.processes) as pool:
        yield from pool.map(run_seeds, [workloads] * len(chunks), chunks, [plan] * len(chunks))


def _trace(workloads: Sequence[str], first: int, count: int, plan: FaultPlan | None) -> int:
    status = 0
    for seed in range(first, first + count):
        for workload in workloads:
            print(f"== workload {workload}, seed {seed}")
            try:
                outcome = run_seed(workload, seed, plan=plan, on_line=print)
                seconds = outcome.now_s - START_S
                print(f"every invariant held: {outcome.event_count} events in {seconds:.1f} s")
            except SeedFailed as error:
                print(str(error).splitlines()[0])
                status = 1
    return status


def _table(fired: Counter[str]) -> str:
    names = (*FAULTS, *SITUATIONS)
    width = max(map(len, names))
    return "\n".join(f"  {name:<{width}} {fired[name]:>9}" for name in names)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the trace has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
