"""File tiers of a simulated job: the store's own code over files in memory, on the schedule.

Reads, writes and the making of slabs are events: each takes its time, they overtake each other,
and the fault plan says what goes wrong in them. Where bytes are only counted none is moved, and
everything else is the same.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ptstore_mpi.arena import Memory
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.cache.tier import MoveEnded, TierRefusal
from ptstore_mpi.tiers.directory import Leftovers, TierDirectory
from ptstore_mpi.tiers.file_system import FileSystemFacts
from ptstore_mpi.tiers.files import Files
from ptstore_mpi.tiers.outcomes import Outcome
from ptstore_mpi.tiers.room import FileSlot, SlotState
from ptstore_mpi.tiers.segment_tier import SegmentTier
from ptstore_mpi.tiers.slab_store import SlabStore
from ptstore_mpi.tiers.transfers import ReadSlot, WriteSlot
from ptstore_mpi.tiers.workers import Scratch, Task, Workers
from ptstore_mpi.transport.server_parts import tier_settings
from ptstore_mpi.types import PAGE_BYTES, ServerIndex

if TYPE_CHECKING:
    from ptstore_mpi.sim.simulation import Simulation

__all__ = ["SimTier", "make_sim_tier"]

_PAUSE_S = 0.3
_PLENTY = 1 << 48

_READ_FAULTS: dict[str, Outcome] = {
    "tier_bend": "corrupt",
    "tier_short": "truncated",
    "tier_error": "io_error",
}
_WRITE_FAULTS: dict[str, Outcome] = {"tier_short": "short", "tier_error": "no_space"}


class _Folder(TierDirectory):
    """A folder that is nowhere."""

    def __init__(self) -> None:
        self.path = Path("simulated")

    def close(self) -> None:
        """Nothing is there."""


class _MemoryFiles(Files):
    """Files in memory; ``fault`` is what goes wrong in the task that is carried out now."""

    def __init__(self, *, counts_only: bool) -> None:
        super().__init__(direct=False)
        self._counts_only = counts_only
        self._next = 0
        self.files: dict[int, Memory] = {}
        self.fault = ""

    def create(self, path: Path, nbytes: int, *, go_on: Callable[[], bool]) -> int:
        """Make a file."""
        self._next += 1
        self.files[self._next] = np.zeros(0 if self._counts_only else nbytes, np.uint8)
        return self._next

    def free_bytes(self, directory: Path) -> int:
        """Return what is free: plenty, or nothing."""
        return 0 if self.fault else _PLENTY

    def close(self, descriptor: int) -> None:
        """Forget a file."""
        del self.files[descriptor]

    def remove(self, path: Path) -> None:
        """A file goes with its descriptor."""

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Write, or not."""
        if self.fault == "tier_error":
            raise OSError(errno.ENOSPC, "no space")
        if self.fault == "tier_short":
            return 0
        for view in views:
            self.files[descriptor][offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
            offset += view.nbytes
        return sum(view.nbytes for view in views)

    def read(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Read, or not."""
        if self.fault == "tier_error":
            raise OSError(errno.EIO, "input/output error")
        if self.fault == "tier_short":
            return 0
        for view in views:
            view[:] = self.files[descriptor][offset : offset + view.nbytes].data
            offset += view.nbytes
        return sum(view.nbytes for view in views)

    def size(self, descriptor: int) -> int:
        """Return the length of a file."""
        return 0 if self.fault else len(self.files[descriptor])

    def let_pages_go(self, descriptor: int, offset: int, nbytes: int, *, dirty: bool) -> None:
        """Memory has no page cache."""


class _EventWorkers(Workers):
    """Tasks are events of a simulation."""

    def __init__(self, sim: Simulation, server: ServerIndex, files: _MemoryFiles) -> None:
        super().__init__(thread_count=0)
        self._sim = sim
        self._server = server
        self._files = files
        self._scratch = Scratch()
        self.on_fault: Callable[[FileSlot], None] = lambda slot: None

    def submit(self, task: Task) -> None:
        """Carry a task out in a while."""
        dice = self._sim.dice
        delay_s = dice.delay_s()
        if dice.strikes("tier_slow", dice.plan.tier_slow):
            delay_s += dice.plan.tier_slow_s * dice.rng.random()
        self._sim.at(self._sim.now + delay_s, partial(self._run, task))

    def _run(self, task: Task) -> None:
        files, fault = self._files, self._fault_of(task)
        if isinstance(task, ReadSlot) and fault:
            self.on_fault(task.slot)
            if fault == "tier_bend" and not self._sim.counts_only:
                self._bend(task.slot)
        files.fault = "" if fault == "tier_bend" else fault
        if self._sim.counts_only and isinstance(task, ReadSlot | WriteSlot):
            outcomes = _READ_FAULTS if isinstance(task, ReadSlot) else _WRITE_FAULTS
            task.outcome = outcomes.get(fault, "done")
            task.checksums = bytes(4 * task.slot.content.block_count)
        else:
            task.run(self._scratch, self._stop)
        files.fault = ""
        self._sim.at(self._sim.now + self._sim.dice.delay_s(), partial(self._report, task))

    def _report(self, task: Task) -> None:
        self._ended.append(task)
        self._sim.tier_ended(self._server)

    def _fault_of(self, task: Task) -> str:
        dice = self._sim.dice
        names: Sequence[str] = ("tier_error",)
        if isinstance(task, ReadSlot | WriteSlot):
            names = tuple(_READ_FAULTS if isinstance(task, ReadSlot) else _WRITE_FAULTS)
        return next((name for name in names if dice.strikes(name, getattr(dice.plan, name))), "")

    def _bend(self, slot: FileSlot) -> None:
        rng, content = self._sim.dice.rng, slot.content
        used = content.header_bytes + content.block_count * sum(content.tensor_bytes)
        at = slot.place.offset + rng.randrange(used)
        self._files.files[slot.slab.descriptor][at] ^= 1 << rng.randrange(8)


class _QuietStore(SlabStore):
    """A store whose warnings belong to the trace."""

    def _warn(self, what: str, why: str) -> None:
        self._has_warned = True


class SimTier(SegmentTier):
    """The tier of a simulated server. It tells the simulation what comes about in it."""

    def __init__(
        self, name: str, store: SlabStore, memory: Memory, *, sim: Simulation, **parts: Any
    ) -> None:
        super().__init__(name, store, memory)
        self._sim = sim
        self._server: ServerIndex = parts["server"]
        self._files: _MemoryFiles = parts["files"]
        parts["workers"].on_fault = self._spoil

    def reserve(self, segment: Segment) -> FileSlot | TierRefusal:
        """Return a slot, or why there is none."""
        slot = super().reserve(segment)
        self._sim.dice.fired["tier_full"] += slot == "full"
        return slot

    def poll(self) -> tuple[MoveEnded, ...]:
        """Return what has ended."""
        ended = super().poll()
        for each in ended:
            verb = "has written" if each.kind == "write" else "has read"
            self._sim.note(
                f"server {self._server}",
                verb if each.is_done else f"{verb} in vain",
                f"{each.segment.id:#x}",
            )
            if each.kind == "read":
                self._sim.dice.fired["promoted" if each.is_done else "tier_read_failed"] += 1
                if not each.is_done:
                    for hear in self._sim.hearers["unread"]:
                        hear(self._server, each.segment)
        return ended

    def payload_of(self, segment: Segment) -> Memory | None:
        """Return what the file has of a segment; None: nothing that is whole."""
        slot: FileSlot | None = segment.slot
        if slot is None or slot.state is not SlotState.WRITTEN:
            return None
        start = slot.place.offset + slot.content.header_bytes
        return self._files.files[slot.slab.descriptor][start : start + segment.nbytes]

    def _spoil(self, slot: FileSlot) -> None:
        self._sim.bent.add(self._moving[slot])


def make_sim_tier(sim: Simulation, server: ServerIndex, memory: Memory) -> SimTier | None:
    """Return the tier of a simulated server, if the settings have one."""
    wanted = tier_settings(sim.config)
    if not wanted:
        return None
    ((name, settings),) = wanted.items()  # one tier: what lies below another is not simulated
    files = _MemoryFiles(counts_only=sim.counts_only)
    workers = _EventWorkers(sim, server, files)
    store = _QuietStore(
        settings,
        _Folder(),
        files=files,
        workers=workers,
        facts=FileSystemFacts("simulated", "memory", _PLENTY, _PLENTY, False, "simulated"),
        leftovers=Leftovers(),
        clock=lambda: sim.now,
        pause_s=_PAUSE_S,
    )
    if sim.counts_only:  # addresses without pages
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        nbytes = max(sim.config.arena_bytes, PAGE_BYTES)
        memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ), np.uint8)
    return SimTier(name, store, memory, sim=sim, server=server, files=files, workers=workers)
