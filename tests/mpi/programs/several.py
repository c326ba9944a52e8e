"""Clients that take part in two jobs at once, each with servers of its own.

usage: several.py MODE      MODE: works | fails (one client raises) | memory (the second job cannot
                            be opened)

Needs 2 nodes of 3 ranks: a server of each job and a client.
"""

from __future__ import annotations

import sys
import time

from mpi4py import MPI

import ptstore_mpi
from ptstore_mpi import ClosedError, Config, Store
from ptstore_mpi.testing.bench import Bench

MODE = sys.argv[1]
IDLE_S = 2.0
SETTINGS = {"segment_tokens": 24, "copy_threads": 1, "close_timeout_s": 20.0}
FIRST = Config(memory_bytes=4 << 20, **SETTINGS)
SECOND = Config(
    memory_bytes=(1 << 47) if MODE == "memory" else 2 << 20, transport="p2p", **SETTINGS
)

world = MPI.COMM_WORLD
rank = world.Get_rank()
role = rank % 3  # server of the first job, of the second, client
comms = [world.Split(0 if role in (job, 2) else MPI.UNDEFINED, rank) for job in range(2)]


def work(first: Store, second: Store) -> None:
    """What one job keeps the other does not know; each moves bytes in its own way."""
    benches = [Bench(store) for store in (first, second)]
    spaces = [bench.space(shared=True) for bench in benches]
    prompts = [benches[0].tokens(161, seed=seed) for seed in range(2)]
    mine = prompts[first.client_rank]
    assert spaces[0].put(mine).reason == "stored"
    benches[0].everyone()
    for prompt in prompts:
        spaces[0].expect(prompt, 160)
        spaces[1].expect(prompt, 0, "cold")
    for _ in range(20):  # in turns, so that either is idle while the other works
        for space in spaces:
            space.put(benches[0].tokens(100))
    benches[0].everyone()
    assert spaces[1].put(mine).reason == "stored"
    benches[1].everyone()
    for prompt in prompts:
        spaces[1].expect(prompt, 160)
    for bench in benches:
        bench.check_settled()
        bench.check_conservation()
    assert first.transport_name == "mpi"
    assert second.transport_name == "p2p"


def client() -> None:
    jobs = [ptstore_mpi.launch(config, comm=comm) for config, comm in zip(
        (FIRST, SECOND), comms, strict=True
    )]  # fmt: skip
    first, second = (job.client for job in jobs)
    work(first, second)
    time.sleep(IDLE_S)
    jobs[0].close()  # the one opened first: any order will do
    Bench(second).space().expect(range(40), 0, "cold")
    try:
        first.server_stats()
    except ClosedError:
        print("closed by itself", flush=True)
    jobs[1].close()


def server(job_number: int) -> None:
    job = ptstore_mpi.launch((FIRST, SECOND)[job_number], comm=comms[job_number])
    started, used = time.monotonic(), time.process_time()
    job.serve()
    share = (time.process_time() - used) / (time.monotonic() - started)
    assert share < 0.5, f"a server that is mostly idle used {share:.0%} of a core"
    job.close()


def failing(first: Store) -> None:
    def within(second: Store) -> None:
        work(first, second)
        if second.client_rank:
            raise RuntimeError("the engine fell over")
        time.sleep(60)

    ptstore_mpi.run(within, SECOND, comm=comms[1])


if MODE == "works":
    client() if role == 2 else server(role)
    for comm in comms:
        if comm != MPI.COMM_NULL:
            comm.Free()
    MPI.Finalize()
    print("finalized", flush=True)
else:
    number = 1 if role == 1 else 0
    ptstore_mpi.run(failing, (FIRST, SECOND)[number], comm=comms[number])
