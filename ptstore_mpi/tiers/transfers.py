"""What the threads do: write a slot, read one back and judge it, make a slab, remove one.

Each is a task with an outcome; whatever goes wrong is an outcome too. A task touches only what it
was given: never the room, never the store. Bytes of a read whose outcome is not ``done`` are
unspecified.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptstore_mpi import _native
from ptstore_mpi.tiers.files import Files
from ptstore_mpi.tiers.header import pack_header, parse_header
from ptstore_mpi.tiers.outcomes import Outcome
from ptstore_mpi.tiers.room import FileSlot, Slab
from ptstore_mpi.tiers.workers import Scratch
from ptstore_mpi.types import PAGE_BYTES

__all__ = ["MakeSlab", "ReadSlot", "RemoveSlab", "WriteSlot"]

_CALL_BYTES = 16 << 20  # of a system call, twice that of the last: what a close may wait for
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_Call = Callable[[int, Sequence[memoryview], int], int]


@dataclass(slots=True, eq=False)
class _Job(abc.ABC):
    """What every task has: files, an outcome, and in words what happened."""

    files: Files
    outcome: Outcome = "cancelled"
    detail: str = ""
    seconds: float = 0.0

    def run(self, scratch: Scratch, stop: threading.Event) -> None:
        if stop.is_set():
            return
        started_s = time.perf_counter()
        try:
            self.outcome = self._do(scratch, stop)
        except InterruptedError:
            self.outcome = "cancelled"
        except OSError as error:
            self.outcome = "no_space" if error.errno in _NO_SPACE else "io_error"
            self.detail = str(error)
        except Exception as error:  # a thread that ended would leave its slot busy for ever
            self.outcome, self.detail = "io_error", repr(error)
        self.seconds = time.perf_counter() - started_s

    @abc.abstractmethod
    def _do(self, scratch: Scratch, stop: threading.Event) -> Outcome:
        """Do it; return how it ended."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Transfer(_Job):
    slot: FileSlot
    memory: memoryview
    checksums: bytes = b""

    def _move(self, call: _Call, views: list[memoryview], stop: threading.Event) -> int:
        """Repeat ``call`` over ``views`` until all bytes have moved, or none do; return how many.

        Direct I/O goes on at a page: it takes no other offset.
        """
        descriptor, start = self.slot.slab.descriptor, self.slot.place.offset
        wanted, done = sum(view.nbytes for view in views), 0
        while done < wanted:
            if stop.is_set():
                raise InterruptedError
            rest = wanted - done  # no call for a header's worth alone
            most = rest if rest < 2 * _CALL_BYTES else _CALL_BYTES
            moved = call(descriptor, _part(views, done, most), start + done)
            if done + moved == wanted:
                return wanted
            if self.files.direct:
                moved -= (done + moved) % PAGE_BYTES
            if moved <= 0:
                break
            done += moved
        return done


@dataclass(slots=True, eq=False, kw_only=True)
class WriteSlot(_Transfer):
    """Write header and payload; ``checksums`` are then those of its blocks."""

    def _do(self, scratch: Scratch, stop: threading.Event) -> Outcome:
        slot, content = self.slot, self.slot.content
        self.checksums = content.checksums or _checksums(slot, self.memory)
        header = scratch.take(content.header_bytes)
        header[:] = pack_header(slot.place, content, self.checksums)
        done = self._move(self.files.write, [header, self.memory], stop)
        if done < slot.nbytes:
            self.detail = f"{done} of {slot.nbytes} bytes written"
            return "short"
        offset = slot.place.offset
        self.files.let_pages_go(slot.slab.descriptor, offset, slot.nbytes, dirty=True)
        return "done"


@dataclass(slots=True, eq=False, kw_only=True)
class ReadSlot(_Transfer):
    """Read the payload, and find out whether it is what was written."""

    def _do(self, scratch: Scratch, stop: threading.Event) -> Outcome:
        slot, content = self.slot, self.slot.content
        descriptor, offset = slot.slab.descriptor, slot.place.offset
        header = scratch.take(content.header_bytes)
        # The kernel reads ahead for one reader of a descriptor: two at once lose half the speed.
        with contextlib.nullcontext() if self.files.direct else slot.slab.reading:
            done = self._move(self.files.read, [header, self.memory], stop)
        if done < slot.nbytes:
            nbytes = self.files.size(descriptor)
            self.detail = f"{done} of {slot.nbytes} bytes read at {offset}, file of {nbytes}"
            return "truncated" if nbytes < offset + slot.nbytes else "short"
        self.files.let_pages_go(descriptor, offset, slot.nbytes, dirty=False)
        found = bytes(header)
        if found != pack_header(slot.place, content, slot.checksums):
            other = parse_header(found)
            self.detail = f"header of {other.place}" if other else "no whole header"
            return "foreign" if other else "corrupt"
        if _checksums(slot, self.memory) != slot.checksums:
            self.detail = "block checksums differ"
            return "corrupt"
        return "done"


@dataclass(slots=True, eq=False, kw_only=True)
class MakeSlab(_Job):
    """Make the file of a slab, and leave its descriptor in ``descriptor``."""

    slab: Slab
    path: Path
    nbytes: int
    descriptor: int = -1

    def _do(self, scratch: Scratch, stop: threading.Event) -> Outcome:
        # First asked, because an allocation that fails has filled the disk for everybody.
        free = self.files.free_bytes(self.path.parent)
        if free < self.nbytes:
            self.detail = f"{free} bytes are free, a slab has {self.nbytes}"
            return "no_space"
        self.descriptor = self.files.create(self.path, self.nbytes, go_on=lambda: not stop.is_set())
        return "done"


@dataclass(slots=True, eq=False, kw_only=True)
class RemoveSlab(_Job):
    """Close the file of a slab and take it away: on some file systems that takes its time."""

    slab: Slab
    path: Path

    def _do(self, scratch: Scratch, stop: threading.Event) -> Outcome:
        descriptor, self.slab.descriptor = self.slab.descriptor, -1
        self.files.close(descriptor)
        self.files.remove(self.path)
        return "done"


def _part(views: list[memoryview], skip: int, most: int) -> list[memoryview]:
    """Return up to ``most`` bytes of ``views`` from the ``skip``-th on."""
    part = []
    for view in views:
        piece = view[skip : skip + most]
        skip = max(skip - view.nbytes, 0)
        most -= piece.nbytes
        if piece.nbytes:
            part.append(piece)
    return part


def _checksums(slot: FileSlot, memory: memoryview) -> bytes:
    content = slot.content
    return _native.block_checksums(
        np.frombuffer(memory, dtype=np.uint8),
        offset=0,
        block_bytes=np.asarray(content.tensor_bytes, dtype=np.int64),
        segment_blocks=content.block_count,
        segment_block=0,
        block_count=content.block_count,
    ).tobytes()
