"""The stand-in driver in place of the real one."""

from __future__ import annotations

import gc
import shutil

import pytest
from stand_in import COMPILER, NAME, StandIn, compile_into

from ptstore_mpi import cuda


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Return the path of the compiled stand-in."""
    if COMPILER is None:
        pytest.skip("needs a C compiler (cc), to build the stand-in driver")
    return compile_into(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def stand_in(library, tmp_path, monkeypatch):
    """Put a fresh stand-in in the driver's place; see that nothing is left behind in it."""
    path = tmp_path / NAME
    shutil.copy(library, path)  # another file, so another library with a state of its own
    monkeypatch.setattr(cuda, "LIBRARY", str(path))
    cuda.device.cache_clear()
    behind = StandIn(path)
    yield behind
    cuda.device.cache_clear()
    gc.collect()
    left = (behind.pending_count(), behind.registered_count(), behind.context_depth())
    assert left == (0, 0, 0), "copies, page-locks, contexts"
    assert (behind.live_export_count(), behind.capture_mode()) == (0, 0)
