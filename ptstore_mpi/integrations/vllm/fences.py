"""What has to have happened on the engine's device, as another thread can wait for it.

On the host everything has happened when a call returns. On a CUDA device work is under way on the
engine's stream: an event recorded there is waited for by the stream of the thread that copies.
The CUDA side was **not yet run on a device**.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Fence", "StepClock", "current_device"]


class Fence:
    """What was under way on this thread's stream."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    @classmethod
    def on(cls, device: torch.device) -> Fence | None:
        """Return a fence behind what is under way on a device; None: nothing ever is."""
        if device.type != "cuda":
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return cls(event, device)

    def wait(self) -> None:
        """Make the stream of the calling thread wait; copies of the store wait for that one."""
        import torch

        torch.cuda.current_stream(self._device).wait_event(self._event)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device this thread's own: another thread's choice does not hold here."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    chosen: AbstractContextManager[Any] = torch.cuda.device(device)
    return chosen


class StepClock:
    """Seconds that a device works on a step. Starts at once."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[Any, Any] | None = None
        self._started_s = self._seconds = time.perf_counter()
        if device.type == "cuda":
            import torch

            new: Any = torch.cuda.Event
            self._events = (new(enable_timing=True), new(enable_timing=True))
            self._events[0].record()

    def stop(self) -> None:
        """End the step."""
        self._seconds = time.perf_counter() - self._started_s
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float | None:
        """Return the time between start and stop; None while the device still works on it."""
        if self._events is None:
            return self._seconds
        if not self._events[1].query():
            return None
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
