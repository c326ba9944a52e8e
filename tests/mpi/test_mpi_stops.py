"""Real MPI jobs in which somebody naps long, stands still or falls over in mid-operation.

No operation outlives its deadline, no wrong byte is ever trusted, and nothing stays leased,
reserved or lost. The programs check all of this by themselves; here it is checked that they came
to every step.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi, run_ranks

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(is_openmpi(), reason="MPICH's virtual nodes are needed"),
]
carried = pytest.mark.parametrize(
    ("transport", "netmod"), [("mpi", "ucx"), ("mpi", "ofi"), ("p2p", "ucx")]
)


def run(program: str, *arguments: object, netmod: str, ranks: int = 4) -> str:
    done = run_ranks(
        [PROGRAMS / program, *map(str, arguments)], ranks=ranks, nodes=2, netmod=netmod
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everybody_naps_long():
    assert run("naps.py", netmod="ucx").count("slowest match") == 2


@carried
def test_a_server_stops_at_every_step(transport, netmod):
    out = run("stops.py", transport, netmod=netmod)
    assert out.count("settled") == 2
    for node, loads in ((0, 4), (1, 5)):
        assert out.count(f"node {node}, load, ") == 2 * loads  # match and load
        assert out.count(f"node {node}, store, ") == 4


@pytest.mark.parametrize(
    ("transport", "netmod", "verify"),
    [("mpi", "ucx", "off"), ("mpi", "ofi", "remote"), ("p2p", "ucx", "off")],
)
def test_a_client_stands_still_past_its_time(transport, netmod, verify):
    out = run("overrun.py", transport, verify, netmod=netmod)
    assert out.count("settled") == 2
    assert out.count("late load on node 0") == 1
    assert out.count("late load on node 1") == 2
    assert out.count("late write on node") == 4


@carried
def test_aborts_by_the_thousand(transport, netmod):
    out = run("aborts.py", transport, 800, netmod=netmod)
    assert out.count("closed") == 4
    ends = re.findall(r"count (\d+) (load|store) (\w+)", out)
    assert sum(int(count) for count, _, where in ends if where != "completed") >= 1600
    for operation, steps in {
        "load": ["AcquireRequest", "Receive", "StartGet", "AwaitTokens", "Unpack", "Now",
                 "FilledRequest", "ReleaseRequest", "completed"],
        "store": ["MatchRequest", "Receive", "ReserveRequest", "Pack", "StartWrite", "AwaitTokens",
                  "PublishRequest", "AbandonRequest", "Now", "completed"],
    }.items():  # fmt: skip
        assert {where for _, name, where in ends if name == operation} == set(steps)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_the_server_of_a_hot_prefix_stops(tmp_path):
    out = run("hot_prefix.py", tmp_path, netmod="ucx", ranks=5)
    assert out.count("slowest") == 3
