"""The watchdog ends the process whatever MPI does."""

from __future__ import annotations

import subprocess
import sys
import time

# An MPI_Abort that never returns, as where a stuck call holds the lock of the library.
PROGRAM = """
import time
from ptstore_mpi.transport import watchdog
from ptstore_mpi.transport.leftovers import unlink_mpi_names

unlink_mpi_names()  # this process never gets to MPI_Finalize

class World:
    def Get_rank(self):
        return 7
    def Abort(self, code):
        time.sleep(60)

class MPI:
    COMM_WORLD = World()

watchdog.MPI = MPI
with watchdog.abort_after(0.1, "probe", "some advice"):
    time.sleep(60)
"""


def test_an_abort_that_blocks_does_not_keep_the_process():
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=False
    )
    assert time.monotonic() - started < 20
    assert done.returncode == 1
    assert done.stderr.startswith("ptstore: rank 7: phase 'probe' did not end within 0.1 s")
    assert "some advice" in done.stderr
