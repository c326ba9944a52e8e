"""A store in one process, and a simulated one of two nodes; each case leaves it unharmed."""

from __future__ import annotations

import pytest
from refusals import Bench, sim_store

import ptstore_mpi as pt


@pytest.fixture(scope="module")
def benches():
    """Return both kinds of bench."""
    job = pt.launch(pt.Config(memory_bytes=1 << 20, segment_tokens=8, copy_threads=1))
    yield {"local": Bench(job.client), "sim": Bench(sim_store())}
    job.close()


@pytest.fixture(params=["local", "sim"])
def bench(request, benches):
    """Return a bench, and check after the test that it is unharmed."""
    found = benches[request.param]
    yield found
    found.check_unharmed()
