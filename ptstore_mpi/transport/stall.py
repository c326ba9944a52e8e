"""Evidence of a hang: the Python stacks of every rank in one file, then the end of the job.

Never calls MPI but to abort: a rank that hangs inside MPI could not. Each rank has a thread that
looks whether its rank still gets on. One that does not writes its stacks into a file whose name
all ranks share; the others see that file, add theirs, and the first one ends the job. Where nodes
share no file system, every node has a file of its own.
"""

from __future__ import annotations

import faulthandler
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ptstore_mpi.transport.watchdog import abort

__all__ = ["StallWatch"]

_LONGEST_LOOK_S = 5.0  # a shared file system is asked this seldom by each of many ranks


class StallWatch:
    """Watches one rank, or, with ``timeout_s = 0``, nothing.

    Parameters
    ----------
    rank
        Its number in the job.
    path
        The file, equal on every rank.
    timeout_s
        How long a rank may be busy without getting on.
    """

    def __init__(self, rank: int, path: Path, timeout_s: float) -> None:
        self._rank = rank
        self._path = path
        self._timeout_s = timeout_s
        self._look_s = min(timeout_s / 4, _LONGEST_LOOK_S)
        self._reported = False
        self._busy_with: str | None = None
        self._last_beat_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ptstore-stall", daemon=True)
        if timeout_s:
            self._thread.start()

    def beat(self) -> None:
        """Say that this rank gets on."""
        self._last_beat_s = time.monotonic()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Expect beats while the body runs; outside of it, a rank may be silent."""
        self.beat()
        self._busy_with = what
        try:
            yield
        finally:
            self._busy_with = None

    def report(self, why: str) -> None:
        """Write this rank's stacks down, and give the others time to add theirs."""
        if self._timeout_s:
            self._dump(why)
            time.sleep(3 * self._look_s)

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._timeout_s:
            self._thread.join()

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._stop.wait(self._look_s):
            now = time.monotonic()
            if now - looked_s > 2 * self._look_s:
                self.beat()  # the whole process stood still, this thread too: a rank was stopped
            looked_s = now
            what = self._busy_with
            if what is not None and now - self._last_beat_s > self._timeout_s:
                self.report(f"has not got on with {what} for {now - self._last_beat_s:.0f} s")
                abort(
                    f"stalled in {what} for more than stall_timeout_s = {self._timeout_s:g} s; "
                    f"the stacks of all ranks are in {self._path}"
                )
            if self._path.exists() and not self._reported:
                self._dump(f"saw another rank stall; it is {what or 'not in the store'}")
                return

    def _dump(self, why: str) -> None:
        self._reported = True
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks, all_threads=True)
            stacks.seek(0)
            text = f"== rank {self._rank} on {socket.gethostname()} {why}\n{stacks.read()}\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(text.encode())  # in one piece: others write at the same time
