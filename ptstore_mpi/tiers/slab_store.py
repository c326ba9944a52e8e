"""The file tier of one server: slots reserved before they are written, I/O that is never awaited.

One thread, the server's, calls everything here; other threads move the bytes. Between a ``start``
and the `poll` that returns its end, the memory belongs to the tier; before and after, to the
caller. No call waits for the disk but `open` and `close`. What fails is a value with a reason.

::

    reserve -> start_write -> poll: done -> start_read -> poll: done -> ... -> release
                                 `- else, only release
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

import numpy as np

from ptstore_mpi.errors import ClosedError, TransportError
from ptstore_mpi.tiers.directory import Leftovers, TierDirectory, reclaim
from ptstore_mpi.tiers.file_system import FileSystemFacts, examine
from ptstore_mpi.tiers.files import Files
from ptstore_mpi.tiers.header import SegmentContent
from ptstore_mpi.tiers.outcomes import OUTCOMES, Ended, Refusal
from ptstore_mpi.tiers.room import FileSlot, Slab, SlabRoom, SlotState
from ptstore_mpi.tiers.settings import TierSettings
from ptstore_mpi.tiers.transfers import MakeSlab, ReadSlot, RemoveSlab, WriteSlot
from ptstore_mpi.tiers.workers import Workers
from ptstore_mpi.types import PAGE_BYTES

__all__ = ["SlabStore"]

_LOG = logging.getLogger(__name__)

_PAUSE_S = 30.0
_DAMAGE = ("io_error", "short", "truncated")


class SlabStore:
    """Slabs of one server in one directory.

    Parameters
    ----------
    settings
        Where and how much.
    directory
        The server's own folder there.
    files, workers
        The system calls, and who makes them.
    facts, leftovers
        What was found at the start.
    clock
        Seconds, for pauses.
    pause_s
        How long nothing is tried after a failed write, or a slab that could not be made.
    """

    def __init__(
        self,
        settings: TierSettings,
        directory: TierDirectory,
        *,
        files: Files,
        workers: Workers,
        facts: FileSystemFacts,
        leftovers: Leftovers,
        clock: Callable[[], float] = time.monotonic,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self.settings = settings
        self.facts = facts
        self.leftovers = leftovers
        self._directory = directory
        self._files = files
        self._workers = workers
        self._clock = clock
        self._pause_s = pause_s
        self._room = SlabRoom(settings, os.urandom(16))
        self._making: Slab | None = None
        self._in_flight_count = 0
        self._no_slab_before_s = self._no_slot_before_s = -float("inf")
        self._has_warned = False
        self._is_closed = False
        self._counts: Counter[str] = Counter()
        self._grow()

    @classmethod
    def open(cls, settings: TierSettings, *, owner: str) -> SlabStore:
        """Reclaim what dead jobs left, and open the tier of ``owner``. Collective: no.

        Parameters
        ----------
        settings
            Where and how much.
        owner
            Names job and server in the name of the folder, for whoever looks at it.

        Raises
        ------
        ConfigError
            The directory does not exist or does not do what ``direct`` asks.
        TransportError
            No folder can be made in it.
        """
        facts = examine(settings.directory, settings.direct)
        try:
            leftovers = reclaim(settings.directory)
        except OSError as error:
            raise TransportError(f"tier directory {settings.directory!r}: {error}") from error
        return cls(
            settings,
            TierDirectory.create(settings.directory, owner),
            files=Files(direct=facts.direct),
            workers=Workers(settings.io_threads),
            facts=facts,
            leftovers=leftovers,
        )

    # -- slots -----------------------------------------------------------------------------

    def reserve(self, content: SegmentContent) -> FileSlot | Refusal:
        """Reserve room for a segment, or say why there is none.

        Raises
        ------
        ClosedError
            The tier was closed.
        """
        self._check_open()
        result = self._reserve(content)
        if isinstance(result, Refusal):
            self._counts[f"refused_{result.value}_count"] += 1
        return result

    def release(self, slot: FileSlot) -> None:
        """Let a slot go; it is freed when no I/O is on it (P14), and the I/O still ends."""
        self._room.release(slot)
        self._remove_if_empty(slot.slab)

    # -- I/O -------------------------------------------------------------------------------

    def start_write(self, slot: FileSlot, memory: memoryview) -> bool:
        """Begin to write ``memory`` into a reserved slot, once.

        Parameters
        ----------
        slot
            Reserved, and never written before.
        memory
            The segment's bytes, whole pages, page-aligned; unchanged until the write has ended.

        Returns
        -------
        Whether it was begun; False: busy, and nothing has changed.
        """
        if not self._may_start(slot, memory, SlotState.RESERVED):
            return False
        slot.state = SlotState.WRITING
        self._workers.submit(WriteSlot(self._files, slot=slot, memory=memory))
        return True

    def start_read(self, slot: FileSlot, memory: memoryview) -> bool:
        """Begin to read a written slot into ``memory``.

        Parameters
        ----------
        slot
            Written, and not busy.
        memory
            Room for the segment's bytes, whole pages, page-aligned, the tier's until the read has
            ended. Whatever the outcome, it may have been written to; only ``done`` means that it
            holds the segment.

        Returns
        -------
        Whether it was begun; False: busy, and nothing has changed.
        """
        if not self._may_start(slot, memory, SlotState.WRITTEN):
            return False
        self._workers.submit(ReadSlot(self._files, slot=slot, memory=memory))
        return True

    def poll(self) -> tuple[Ended, ...]:
        """Return the reads and writes that have ended since the last call; never waits."""
        ended = []
        for task in self._workers.ended():
            match task:
                case WriteSlot() | ReadSlot():
                    ended.append(self._end(task))
                case MakeSlab():
                    self._end_making(task)
                case RemoveSlab() if task.outcome == "done":
                    self._room.forget_slab(task.slab)
        return tuple(ended)

    def close(self) -> tuple[Ended, ...]:
        """Cancel what waits, await what is under way, remove every file.

        Returns
        -------
        The reads and writes that `poll` has not returned yet.
        """
        if self._is_closed:
            return ()
        self._is_closed = True
        self._workers.close()
        ended = self.poll()
        for slab in self._room.slabs:
            if slab.descriptor >= 0:
                self._files.close(slab.descriptor)
                slab.descriptor = -1
        self._directory.close()
        return ended

    @property
    def spare_bytes(self) -> int:
        """Bytes of the capacity that no slot has, in files or not."""
        settings = self.settings
        return settings.most_slabs * settings.slab_bytes - self._room.reserved_bytes

    @property
    def is_growing(self) -> bool:
        """Whether a slab is being made."""
        return self._making is not None

    def counters(self) -> dict[str, int]:
        """Return sizes and events by name, in bytes and counts."""
        room = self._room
        return {
            "capacity_bytes": self.settings.capacity_bytes,
            "file_bytes": room.file_bytes,
            "free_bytes": room.free_bytes,
            "reserved_bytes": room.reserved_bytes,
            "slab_count": len(room.slabs),
            "slot_count": room.slot_count,
            "in_flight_count": self._in_flight_count,
            "reclaimed_bytes": self.leftovers.reclaimed_bytes,
            "busy_count": self._counts["busy_count"],
            "failed_slab_count": self._counts["failed_slab_count"],
            "retired_slab_count": self._counts["retired_slab_count"],
            "write_bytes": self._counts["write_bytes"],
            "read_bytes": self._counts["read_bytes"],
            **{name: self._counts[name] for name in _REASONS},
        }

    # -- internals -------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the file tier is closed")

    def _reserve(self, content: SegmentContent) -> FileSlot | Refusal:
        nbytes = content.header_bytes + content.payload_bytes
        if nbytes > self.settings.slab_bytes:
            return Refusal.LARGE
        if self._clock() < self._no_slot_before_s:
            return Refusal.PAUSED
        slot = self._room.reserve(content)
        # A slab is begun when the next segment of this size will need it, not when it does.
        if slot is None or not self._room.fits(nbytes):
            self._grow()
        if slot is None:
            return Refusal.FULL if self._making is None else Refusal.GROWING
        return slot

    def _grow(self) -> None:
        """Begin a slab, where there is none under way, and capacity and disk have room."""
        if self._making is not None or self._clock() < self._no_slab_before_s:
            return
        self._making = slab = self._room.begin_slab()
        if slab is not None:
            path = self._directory.slab_path(slab.number)
            task = MakeSlab(self._files, slab=slab, path=path, nbytes=self.settings.slab_bytes)
            self._workers.submit(task)

    def _end_making(self, task: MakeSlab) -> None:
        self._making = None
        if task.outcome == "done":
            task.slab.descriptor = task.descriptor
            return
        self._room.forget_slab(task.slab)
        if task.outcome != "cancelled":
            self._counts["failed_slab_count"] += 1
            self._no_slab_before_s = self._clock() + self._pause_s
            self._warn("no further slab", task.detail)

    def _may_start(self, slot: FileSlot, memory: memoryview, state: SlotState) -> bool:
        self._check_open()
        assert slot.state is state, f"expected a slot that is {state}, got {slot.state}"
        assert not slot.is_released, "I/O on a released slot"
        assert not slot.is_busy, "one read or write of a slot at a time"
        assert memory.nbytes == slot.content.payload_bytes, (
            f"expected {slot.content.payload_bytes} bytes of memory, got {memory.nbytes}"
        )
        assert np.frombuffer(memory, dtype=np.uint8).ctypes.data % PAGE_BYTES == 0, "not aligned"
        if self._in_flight_count == self.settings.queue_depth:
            self._counts["busy_count"] += 1
            return False
        self._in_flight_count += 1
        slot.is_busy = True
        return True

    def _end(self, task: WriteSlot | ReadSlot) -> Ended:
        slot, outcome = task.slot, task.outcome
        kind: Literal["write", "read"] = "write" if isinstance(task, WriteSlot) else "read"
        self._in_flight_count -= 1
        slot.is_busy = False
        self._counts[f"{kind}_{outcome}_count"] += 1
        if outcome == "done":
            self._counts[f"{kind}_bytes"] += slot.content.payload_bytes
        if outcome in _DAMAGE and not slot.slab.is_retired:
            slot.slab.is_retired = True
            self._counts["retired_slab_count"] += 1
        if kind == "write":
            slot.checksums = task.checksums
            slot.state = SlotState.WRITTEN if outcome == "done" else SlotState.FAILED
            if outcome not in ("done", "cancelled"):
                self._no_slot_before_s = self._clock() + self._pause_s
                self._warn("a write failed", f"{outcome}: {task.detail}")
        self._room.free_if_idle(slot)
        self._remove_if_empty(slot.slab)
        return Ended(slot, kind, outcome, task.detail, task.seconds)

    def _remove_if_empty(self, slab: Slab) -> None:
        if slab.is_retired and not slab.slots and slab.descriptor >= 0 and not self._is_closed:
            path = self._directory.slab_path(slab.number)
            self._workers.submit(RemoveSlab(self._files, slab=slab, path=path))

    def _warn(self, what: str, why: str) -> None:
        """Warn once; afterwards the counters tell."""
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("file tier %s: %s (%s)", self._directory.path, what, why)


_REASONS = (
    *(f"refused_{refusal.value}_count" for refusal in Refusal),
    *(f"{kind}_{outcome}_count" for kind in ("write", "read") for outcome in OUTCOMES),
)
