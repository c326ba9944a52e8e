"""How a rank waits without burning a core that its neighbours compute on.

Spin while something may come at once, then nap, doubling. Naps of some tens of microseconds need
the kernel's timer slack lowered: by default it adds 50 us to each.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from ptstore_mpi.config import Config

__all__ = ["Idle", "lower_timer_slack", "timer_slack_ns"]

_PR_SET_TIMERSLACK = 29
_PR_GET_TIMERSLACK = 30


def lower_timer_slack(slack_ns: int = 1000) -> None:
    """Let this thread's sleeps end within ``slack_ns`` of their time (Linux; else no effect)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(slack_ns))


def timer_slack_ns() -> int | None:
    """Return by how much this thread's sleeps may last too long, ns; None where unknown."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    slack_ns = -1 if prctl is None else int(prctl(_PR_GET_TIMERSLACK))
    return slack_ns if slack_ns >= 0 else None


class Idle:
    """One waiting loop's patience; see `Config.idle`.

    Parameters
    ----------
    config
        Settings of the job.
    spin_s
        Time to spin after the last activity; default ``config.idle_spin_s``.
    """

    def __init__(self, config: Config, *, spin_s: float | None = None) -> None:
        self._spins = config.idle == "spin"
        self._spin_s = config.idle_spin_s if spin_s is None else spin_s
        self._first_s = config.nap_first_s
        self._cap_s = config.nap_cap_s
        self.reset()

    def reset(self) -> None:
        """Take note of activity: spin again before napping."""
        self._quiet_since = time.monotonic()
        self._nap_s = self._first_s

    def wait(self) -> None:
        """Let a little time pass."""
        if self._spins or time.monotonic() - self._quiet_since < self._spin_s:
            os.sched_yield()
            return
        time.sleep(self._nap_s)
        self._nap_s = min(2 * self._nap_s, self._cap_s)

    def until(self, done: Callable[[], bool]) -> None:
        """Wait until ``done()``; it is called again and again and makes the progress."""
        self.reset()
        while not done():
            self.wait()
