"""The file tier under arbitrary interleavings and faults, against a dict of what was written.

Threads are cranked by hand; memory is lent and scribbled over, as a server's arena would be.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from ptstore_mpi.testing.tier_faults import Fault, FaultyFiles, HandWorkers, open_store
from ptstore_mpi.tiers.file_system import choose_direct
from ptstore_mpi.tiers.header import SegmentContent
from ptstore_mpi.tiers.outcomes import Refusal
from ptstore_mpi.tiers.room import FileSlot, SlotState
from ptstore_mpi.tiers.settings import TierSettings
from ptstore_mpi.tiers.transfers import MakeSlab, ReadSlot, WriteSlot

PAGE = 4096
SLAB, MOST_SLABS, DEPTH = 12 * PAGE, 3, 2
REGION = 3 * PAGE
PAUSE_S = 30.0
SCRIBBLE = bytes([0xEE]) * REGION

picks = st.integers(0, 30)
sizes = st.integers(0, 5 * PAGE)
FAULTS = {
    "allocate": st.builds(Fault, st.just("error"), st.sampled_from([errno.EIO, errno.ENOSPC])),
    "write": st.one_of(
        st.builds(Fault, st.just("error"), st.sampled_from([errno.EIO, errno.EDQUOT])),
        st.builds(Fault, st.sampled_from(["short", "bent", "stuck", "lost"]), sizes),
    ),
    "read": st.one_of(
        st.builds(Fault, st.just("error"), st.just(errno.EIO)),
        st.builds(Fault, st.sampled_from(["short", "bent", "stuck"]), sizes),
    ),
}
faults = st.sampled_from(sorted(FAULTS)).flatmap(
    lambda method: st.tuples(st.just(method), FAULTS[method])
)


class SlabStoreMachine(RuleBasedStateMachine):
    @initialize(direct=st.booleans())
    def open(self, direct):
        self.directory = Path(tempfile.mkdtemp(prefix="slab-machine-"))
        self.now = 0.0
        self.direct = direct and choose_direct(str(self.directory), "auto")[0]
        self.open_store()

    def open_store(self):
        self.settings = TierSettings(
            directory=str(self.directory),
            capacity_bytes=MOST_SLABS * SLAB + PAGE,
            slab_bytes=SLAB,
            queue_depth=DEPTH,
            direct="on" if self.direct else "off",
        )
        self.files, self.workers = FaultyFiles(direct=self.direct), HandWorkers()
        self.store = open_store(
            self.settings, files=self.files, workers=self.workers, clock=lambda: self.now
        )
        arena = memoryview(mmap.mmap(-1, (DEPTH + 1) * REGION))
        self.regions = [arena[at : at + REGION] for at in range(0, len(arena), REGION)]
        for region in self.regions:
            region[:] = SCRIBBLE
        self.slots = {}  # not freed yet -> its bytes
        self.lent = {}  # slot under way -> kind, region
        self.on_disk, self.damaged, self.hurt = set(), set(), set()
        self.making = True  # a slab: the first is begun at once
        self.failed_slab_count = 0
        self.no_slab_before_s = self.no_slot_before_s = -1.0

    def pick_slot(self, pick, *states):
        slots = [
            slot
            for slot in self.slots
            if slot.state in states and slot not in self.lent and not slot.is_released
        ]
        return slots[pick % len(slots)] if slots else None

    # -- what a server does ------------------------------------------------------------------

    @rule(count=st.integers(1, 6), seed=st.integers(0, 255), wait=st.booleans())
    def demote(self, count, seed, wait):
        for i in range(count):
            self.reserve(1 + (seed + i) % 3, (4096,), seed)
            self.write(0)
            if wait:
                self.settle()

    @rule(count=st.integers(1, 6), wait=st.booleans())
    def promote(self, count, wait):
        for i in range(count):
            self.read(i)
            if wait:
                self.settle()

    @rule(
        blocks=st.integers(1, 3),
        tensor_bytes=st.sampled_from([(1000,), (4096,), (700, 2900), (50_000,)]),
        seed=st.integers(0, 255),
    )
    def reserve(self, blocks, tensor_bytes, seed):
        content = SegmentContent(
            namespace=bytes([seed]) * 16,
            segment=seed,
            hashes=np.full((blocks, 16), seed, dtype=np.uint8),
            tensor_bytes=tensor_bytes,
        )
        nbytes = PAGE + content.payload_bytes
        file_count = self.store.counters()["slab_count"]
        could_grow = file_count < MOST_SLABS and self.now >= self.no_slab_before_s
        waiting_count = len(self.workers.waiting)
        slot = self.store.reserve(content)
        match slot:
            case FileSlot():
                assert self.now >= self.no_slot_before_s
                self.slots[slot] = np.random.default_rng(seed).bytes(content.payload_bytes)
            case Refusal.LARGE:
                assert nbytes > SLAB
            case Refusal.PAUSED:
                assert self.now < self.no_slot_before_s
            case Refusal.GROWING:
                assert self.making or could_grow
            case Refusal.FULL:
                assert not self.making
                assert not could_grow
        if len(self.workers.waiting) > waiting_count:
            assert could_grow
            assert not self.making
            self.making = True

    @rule(pick=picks)
    def write(self, pick):
        slot = self.pick_slot(pick, SlotState.RESERVED)
        if slot is not None:
            memory = self.regions[0][: slot.content.payload_bytes]
            memory[:] = self.slots[slot]
            self.begin(slot, "write", started=self.store.start_write(slot, memory))

    @rule(pick=picks)
    def read(self, pick):
        slot = self.pick_slot(pick, SlotState.WRITTEN)
        if slot is not None:
            memory = self.regions[0][: slot.content.payload_bytes]
            self.begin(slot, "read", started=self.store.start_read(slot, memory))

    def begin(self, slot, kind, *, started):
        assert started == (len(self.lent) < DEPTH), "busy exactly when the queue is full"
        if started:
            self.lent[slot] = kind, self.regions.pop(0)
        else:
            self.regions[0][:] = SCRIBBLE

    @rule(pick=picks)
    def release(self, pick):
        slots = [slot for slot in self.slots if not slot.is_released]
        if slots:
            slot = slots[pick % len(slots)]
            self.store.release(slot)
            if slot not in self.lent:
                del self.slots[slot]

    @rule()
    def poll(self):
        self.take(self.store.poll())

    @rule(pick=picks)
    def crank(self, pick):
        if self.workers.waiting:
            before = self.files.fired_count
            task = self.workers.run_one(pick % len(self.workers.waiting))
            if isinstance(task, WriteSlot):
                self.on_disk.add(task.slot)
            if isinstance(task, WriteSlot | ReadSlot) and self.files.fired_count > before:
                self.hurt.add(task.slot)

    @rule()
    def settle(self):
        while self.workers.waiting:
            self.crank(0)
        self.poll()
        for slot in [slot for slot in self.slots if slot.state is SlotState.FAILED]:
            if not slot.is_released:
                self.store.release(slot)
                del self.slots[slot]

    def take(self, all_ended):
        waiting = [task for task in self.workers.waiting if isinstance(task, MakeSlab)]
        self.making = bool(waiting)
        failed = self.store.counters()["failed_slab_count"]
        if failed > self.failed_slab_count:
            self.failed_slab_count, self.no_slab_before_s = failed, self.now + PAUSE_S
        for ended in all_ended:
            slot = ended.slot
            kind, region = self.lent.pop(slot)
            assert ended.kind == kind
            if ended.outcome == "done":
                self.check_bytes(slot, region)
            elif ended.outcome != "cancelled":
                assert slot in self.hurt or (kind == "read" and slot in self.damaged), ended
                if kind == "write":
                    self.no_slot_before_s = self.now + PAUSE_S
            if kind == "write" and slot in self.hurt:
                self.damaged.add(slot)
            self.hurt.discard(slot)
            region[:] = SCRIBBLE
            self.regions.append(region)
            if slot.is_released:
                del self.slots[slot]

    def check_bytes(self, slot, region):
        used = slot.content.block_count * sum(slot.content.tensor_bytes)
        assert region[:used] == self.slots[slot][:used], "wrong bytes"

    # -- what goes wrong ---------------------------------------------------------------------

    @rule(fault=faults, after=st.integers(0, 2))
    def plan(self, fault, after):
        method, what = fault
        self.files.planned[method].extend([None] * after + [what])

    @rule(
        what=st.sampled_from(["flip", "cut", "wait", "wait long", "close"]),
        pick=picks,
        at=st.integers(0, SLAB),
    )
    def rare(self, what, pick, at):
        slots = [slot for slot in self.slots if slot in self.on_disk]
        match what:
            case "flip" if slots:
                self.flip(slots[pick % len(slots)], at)
            case "cut" if slots:
                self.cut(slots[pick % len(slots)].slab, at)
            case "wait":
                self.now += 1.0
            case "wait long":
                self.now += PAUSE_S
            case "close" if at % 3 == 0:
                self.close()
                self.open_store()

    def flip(self, slot, at):
        with self.slab_file(slot.slab).open("r+b") as file:
            file.seek(slot.place.offset + at % slot.nbytes)
            byte = file.read(1) or b"\0"
            file.seek(slot.place.offset + at % slot.nbytes)
            file.write(bytes([byte[0] ^ 1]))
        self.damaged.add(slot)

    def cut(self, slab, at):
        file = self.slab_file(slab)
        os.truncate(file, min(at, file.stat().st_size))
        self.damaged |= {slot for slot in self.slots if slot.slab is slab and slot in self.on_disk}

    def slab_file(self, slab):
        return Path(f"/proc/self/fd/{slab.descriptor}").readlink()

    def close(self):
        self.take(self.store.close())
        assert not self.lent, "what was under way has ended"
        assert list(self.directory.iterdir()) == []
        held = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        assert not [file for file in held if file.is_relative_to(self.directory)]

    def teardown(self):
        if hasattr(self, "store"):
            self.close()
            shutil.rmtree(self.directory)

    # -- at every step -----------------------------------------------------------------------

    @invariant()
    def slots_are_apart(self):
        extents = sorted(
            (slot.slab.number, slot.place.offset, slot.place.offset + slot.nbytes)
            for slot in self.slots
        )
        for (slab, _, end), (other, start, _) in itertools.pairwise(extents):
            assert slab != other or end <= start
        assert all(start >= 0 and end <= SLAB for _, start, end in extents)

    @invariant()
    def nothing_exceeds_the_capacity(self):
        counters = self.store.counters()
        files = list(self.directory.glob("*/*"))
        assert sum(f.stat().st_size for f in files) <= counters["file_bytes"]
        assert counters["file_bytes"] <= counters["capacity_bytes"]
        assert len(files) <= MOST_SLABS + 1, "slabs and a lock"
        assert counters["reserved_bytes"] == sum(slot.nbytes for slot in self.slots)
        assert counters["reserved_bytes"] + counters["free_bytes"] <= counters["file_bytes"]
        assert counters["in_flight_count"] == len(self.lent)

    @invariant()
    def memory_that_is_not_lent_is_left_alone(self):
        assert all(region == SCRIBBLE for region in self.regions)


def test_the_file_tier_under_faults():
    run_state_machine_as_test(SlabStoreMachine, settings=settings(stateful_step_count=60))
