"""A minute of hard work over two virtual nodes, in memory far too small for it: nothing wears out.

`make soak MINUTES=10` is the same for longer.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi, run_ranks

SOAK = ["-m", "ptstore_mpi.testing.soak"]
SHARED_MEMORY = Path("/dev/shm")

pytestmark = [
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(is_openmpi(), reason="MPICH's virtual nodes are needed"),
]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Other jobs' names are there for moments."""
    before = set(SHARED_MEMORY.glob("*"))
    yield
    until = time.monotonic() + 10
    while left := set(SHARED_MEMORY.glob("*")) - before:
        assert time.monotonic() < until, left
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_minute(monkeypatch):
    monkeypatch.setenv("PTSTORE_VERIFY", "always")
    done = run_ranks([*SOAK, "--minutes", "1", "--json"], ranks=5, nodes=2, timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["servers"], found["clients"], found["wrong"]) == (2, 3, [])
    tokens = found["tokens"]
    assert tokens["asked"] == sum(count for name, count in tokens.items() if name != "asked")
    # It is no soak unless all of this happens, many times.
    assert found["requests"] > 1000
    assert min(tokens[name] for name in ("owned", "remote", "recomputed")) > 100_000
    assert found["evicted_count"] > 1000
    assert found["clears"] >= 4
    assert found["looks"] > 60
    assert found["leased_bytes"] == 0
    assert None not in (found["server_growth_bytes"], found["client_growth_bytes"])
    assert "soak: 10 of 60 s" in done.stderr


def test_a_wrong_setting_is_said_once(monkeypatch):
    monkeypatch.setenv("PTSTORE_PLACEMENT", "nowhere")
    done = run_ranks(SOAK, ranks=4, nodes=2)
    assert done.returncode == 2
    assert done.stderr.count("environment variable PTSTORE_PLACEMENT") == 1
    assert "Traceback" not in done.stderr
