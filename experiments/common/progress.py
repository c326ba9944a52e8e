"""Progress of a run, on standard error of client 0: a bar on a terminal, else a line now and then.

Never prints on other clients, never writes to standard output.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 15.0


class RunProgress:
    """Counts this client's answers, or whatever ``counted`` says; a context manager."""

    def __init__(
        self, total: int, *, label: str, shown: bool, counted: str = "answers of client 0"
    ) -> None:
        self._total = total
        self._counted = counted
        self._label = label
        self._shown = shown
        self._done = 0
        self._start_s = time.monotonic()
        self._line_s = self._start_s
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        if shown and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(), TimeRemainingColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task(label, total=total)

    def advance(self, note: str) -> None:
        """Count one answer; `note` says of which system."""
        self._done += 1
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"{self._label} {note}")
            return
        now = time.monotonic()
        if now - self._line_s >= LINE_EVERY_S or self._done == self._total:
            self._line_s = now
            elapsed_s = now - self._start_s
            self._console.print(
                f"{self._label}: {self._done}/{self._total} {self._counted} "
                f"after {elapsed_s:.0f} s ({note})",
                highlight=False,
            )

    def __enter__(self) -> RunProgress:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
