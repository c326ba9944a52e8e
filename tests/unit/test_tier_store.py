"""The file tier on a real disk: bytes come back, or a reason does; slots, pauses and the end."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from tier_hand import (
    PAGE,
    SLAB,
    GatedFiles,
    block_sums,
    content_of,
    finish,
    memory_of,
    payload_of,
    read,
    reserve,
    tier_settings,
    used,
    wait_until,
    write,
)

from ptstore_mpi.errors import ClosedError
from ptstore_mpi.testing.tier_faults import Fault, FaultyFiles, open_store
from ptstore_mpi.tiers.file_system import choose_direct
from ptstore_mpi.tiers.outcomes import Refusal
from ptstore_mpi.tiers.room import FileSlot, SlotState
from ptstore_mpi.tiers.slab_store import SlabStore

MODES = ["off", "auto"]


@pytest.fixture
def store(tmp_path):
    store = open_store(tier_settings(tmp_path), files=FaultyFiles())
    yield store
    store.close()
    assert list(tmp_path.iterdir()) == [], "everything is removed"


def slab_file(slot):
    return Path(f"/proc/self/fd/{slot.slab.descriptor}").readlink()


def change_file(slot, at, data):
    with slab_file(slot).open("r+b") as file:
        file.seek(slot.place.offset + at)
        file.write(data)


@pytest.mark.parametrize("direct", MODES)
@pytest.mark.parametrize(
    ("blocks", "tensor_bytes"),
    [(1, (1,)), (3, (PAGE, 1000)), (16, (33, 7000)), (300, (8192,) * 15)],
)
def test_what_was_written_is_read(tmp_path, direct, blocks, tensor_bytes):
    content = content_of(3, blocks=blocks, tensor_bytes=tensor_bytes)
    slab_bytes = content.header_bytes + content.payload_bytes
    settings = tier_settings(
        tmp_path, slab_bytes=slab_bytes, capacity_bytes=2 * slab_bytes, direct=direct
    )
    store = SlabStore.open(settings, owner="job/7 server 0")
    slot, ended = write(store, content)
    assert (ended.kind, ended.outcome, slot.state) == ("write", "done", SlotState.WRITTEN)
    assert slot.checksums == block_sums(content, payload_of(content))
    for _ in range(2):
        found, ended = read(store, slot)
        assert (ended.kind, ended.outcome) == ("read", "done")
        assert found == used(content, payload_of(content))
    assert slab_file(slot).stat().st_mode & 0o777 == 0o600
    store.release(slot)
    assert store.counters()["reserved_bytes"] == 0
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_checksums_of_the_caller_are_taken_and_believed(store):
    content = content_of()
    wrong = bytes(4 * content.block_count)
    slot, ended = write(store, content_of(checksums=wrong))
    assert (ended.outcome, slot.checksums) == ("done", wrong)
    assert read(store, slot)[1].outcome == "corrupt"


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Fault("error", errno.EIO), "io_error"),
        (Fault("error", errno.ENOSPC), "no_space"),
        (Fault("error", errno.EDQUOT), "no_space"),
        (Fault("error", errno.EFBIG), "no_space"),
        (Fault("stuck"), "short"),
        (Fault("short", 5000), "done"),
    ],
)
def test_how_a_write_ends(store, fault, outcome):
    store._files.planned["write"].append(fault)
    slot, ended = write(store, content_of())
    assert ended.outcome == outcome
    assert (slot.state is SlotState.WRITTEN) == (outcome == "done")
    assert store.counters()[f"write_{outcome}_count"] == 1
    if outcome == "done":
        assert read(store, slot)[1].outcome == "done"


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Fault("error", errno.EIO), "io_error"),
        (Fault("stuck"), "short"),
        (Fault("short", 5000), "done"),
        (Fault("bent", 20), "corrupt"),
        (Fault("bent", PAGE + 20), "corrupt"),
    ],
)
def test_how_a_read_ends(store, fault, outcome):
    slot, _ = write(store, content_of())
    store._files.planned["read"].append(fault)
    found, ended = read(store, slot)
    assert ended.outcome == outcome
    if outcome == "done":
        assert found == used(slot.content, payload_of(slot.content))
    assert store.counters()[f"read_{outcome}_count"] == 1
    assert read(store, slot)[1].outcome == "done", "the fault was the wire's, not the disk's"


@pytest.mark.parametrize("direct", MODES)
def test_a_transfer_goes_on_where_it_was_broken_off(tmp_path, direct):
    """Direct I/O from the last whole page on: it takes no other offset."""
    settings = tier_settings(tmp_path, direct=direct)
    direct = direct == "auto" and choose_direct(str(tmp_path), "auto")[0]
    store = open_store(settings, files=(files := FaultyFiles(direct=direct)))
    for method in ("write", "read"):
        files.planned[method].extend([Fault("short", PAGE + 100), Fault("short", 2 * PAGE)])
    slot, ended = write(store, content_of())
    assert ended.outcome == "done"
    found, ended = read(store, slot)
    assert (found, ended.outcome) == (used(slot.content, payload_of(slot.content)), "done")
    assert files.fired_count == 4
    store.close()


def test_a_thread_outlives_what_nobody_expected(store):
    slot = reserve(store, content_of())
    store._files.write = None
    assert store.start_write(slot, memory_of(slot.content.payload_bytes))
    ended = finish(store)
    assert ended.outcome == "io_error"
    assert "NoneType" in ended.detail


def test_a_flipped_byte_hurts_its_own_segment_alone(store):
    slots = [write(store, content_of(seed))[0] for seed in range(1, 4)]
    for at in (100, PAGE, slots[1].nbytes - PAGE):
        before = read_file(slots[1], at)
        change_file(slots[1], at, bytes([before ^ 4]))
        assert [read(store, slot)[1].outcome for slot in slots] == ["done", "corrupt", "done"]
        change_file(slots[1], at, bytes([before]))
    assert read(store, slots[1])[1].outcome == "done"


def read_file(slot, at):
    with slab_file(slot).open("rb") as file:
        file.seek(slot.place.offset + at)
        return file.read(1)[0]


def test_another_segment_in_the_place_is_foreign(store):
    """P4: all its checksums are right, but it is not what was asked for."""
    one, other = (write(store, content_of(seed))[0] for seed in (1, 2))
    with slab_file(one).open("rb") as file:
        file.seek(other.place.offset)
        image = file.read(other.nbytes)
    change_file(one, 0, image)
    assert read(store, one)[1].outcome == "foreign"
    assert read(store, other)[1].outcome == "done"


def test_a_lost_write_is_no_segment(store):
    store._files.planned["write"].append(Fault("lost"))
    slot, ended = write(store, content_of())
    assert ended.outcome == "done", "so the disk said"
    assert read(store, slot)[1].outcome == "corrupt"


@pytest.mark.parametrize("direct", MODES)
def test_a_truncated_slab_is_emptied_and_made_anew(tmp_path, direct):
    store = open_store(tier_settings(tmp_path, direct=direct, capacity_bytes=SLAB))
    contents = [content_of(seed, tensor_bytes=(PAGE,)) for seed in (1, 2, 3)]
    slots = [write(store, content)[0] for content in contents]
    os.truncate(slab_file(slots[0]), slots[1].place.offset + 5000)
    outcomes = [read(store, slot)[1].outcome for slot in slots]
    assert outcomes == ["done", "truncated", "truncated"]
    assert store.reserve(content_of(4)) is Refusal.FULL, "no new slot in a damaged file"
    assert read(store, slots[0])[1].outcome == "done"
    for slot in slots:
        store.release(slot)
    slot = wait_until(lambda: reserve_new(store))
    assert slot.slab.number == 1
    assert store.counters()["slab_count"] == store.counters()["retired_slab_count"] == 1
    store.close()


def reserve_new(store):
    store.poll()
    slot = store.reserve(content_of(5))
    return slot if isinstance(slot, FileSlot) else None


# -- room ------------------------------------------------------------------------------------


def test_the_capacity_is_used_and_never_exceeded(store):
    content = content_of(tensor_bytes=(2 * PAGE,))  # 5 pages: 3 in a slab
    slots = [reserve(store, content) for _ in range(12)]
    assert all(isinstance(slot, FileSlot) for slot in slots)
    assert len({(slot.slab.number, slot.place.offset) for slot in slots}) == 12
    assert store.reserve(content) is Refusal.FULL
    counters = store.counters()
    assert counters["file_bytes"] == counters["capacity_bytes"] == 4 * SLAB
    store.release(slots[5])
    again = store.reserve(content)
    assert (again.slab, again.place.offset) == (slots[5].slab, slots[5].place.offset)
    assert store.reserve(content_of(blocks=100)) is Refusal.LARGE
    assert store.counters()["refused_full_count"] == store.counters()["refused_large_count"] == 1


def test_a_failed_write_pauses_the_tier_and_warns_once(tmp_path, caplog):
    now = [100.0]
    store = open_store(tier_settings(tmp_path), files=FaultyFiles(), clock=lambda: now[0])
    first = [Fault("error", errno.ENOSPC), None, Fault("error", errno.ENOSPC)]
    store._files.planned["write"].extend(first)
    slot, ended = write(store, content_of(1))
    assert ended.outcome == "no_space"
    store.release(slot)
    assert store.reserve(content_of(2)) is Refusal.PAUSED
    now[0] += 30
    assert write(store, content_of(2))[1].outcome == "done"
    assert write(store, content_of(3))[1].outcome == "no_space"
    assert store.reserve(content_of(4)) is Refusal.PAUSED
    assert len(caplog.records) == 1
    assert "no_space" in caplog.text
    assert str(tmp_path) in caplog.text
    store.close()


def test_a_slab_that_cannot_be_made_leaves_no_file_and_is_tried_again(tmp_path, caplog):
    now = [0.0]
    files = FaultyFiles()
    files.planned["allocate"].append(Fault("error", errno.ENOSPC))
    store = open_store(tier_settings(tmp_path), files=files, clock=lambda: now[0])
    assert reserve(store, content_of()) is Refusal.FULL
    assert list(tmp_path.glob("*/slab*")) == []
    now[0] += 29
    assert store.reserve(content_of()) is Refusal.FULL
    now[0] += 1
    assert isinstance(reserve(store, content_of()), FileSlot)
    assert store.counters()["failed_slab_count"] == len(caplog.records) == 1
    store.close()


# -- what is under way -------------------------------------------------------------------------


def test_a_full_queue_is_busy_and_a_slow_disk_holds_nobody_up(tmp_path):
    store = open_store(tier_settings(tmp_path, queue_depth=3), files=(files := GatedFiles()))
    slots = [reserve(store, content_of(seed)) for seed in range(4)]
    memories = [memory_of(slot.content.payload_bytes) for slot in slots]
    begun = [store.start_write(slot, memory) for slot, memory in zip(slots, memories, strict=True)]
    assert begun == [True, True, True, False]
    assert (slots[3].state, store.counters()["busy_count"]) == (SlotState.RESERVED, 1)
    assert store.poll() == ()
    files.gate.set()
    wait_until(lambda: store.poll() or not store.counters()["in_flight_count"])
    assert store.start_write(slots[3], memories[3])
    store.close()


def test_a_slot_with_io_on_it_is_not_freed(tmp_path):
    """P14: what is written there late must not land in somebody else's slot."""
    settings = tier_settings(tmp_path, capacity_bytes=SLAB)
    store = open_store(settings, files=(files := GatedFiles()))
    content = content_of(tensor_bytes=(7 * PAGE,))  # with its header 15 pages of 16
    slot = reserve(store, content)
    assert store.start_write(slot, memory_of(content.payload_bytes))
    assert files.begun.acquire(timeout=20)
    store.release(slot)
    assert store.reserve(content) is Refusal.FULL
    assert store.counters()["reserved_bytes"] == slot.nbytes
    files.gate.set()
    assert finish(store).slot is slot
    assert store.counters()["reserved_bytes"] == 0
    assert write(store, content)[1].outcome == "done"
    store.close()


def test_close_cancels_what_waits_and_awaits_what_is_under_way(tmp_path):
    settings = tier_settings(tmp_path, io_threads=1)
    store = open_store(settings, files=(files := GatedFiles()))
    slots = [reserve(store, content_of(seed)) for seed in range(3)]
    arena = mmap.mmap(-1, 3 * SLAB)
    for i, slot in enumerate(slots):
        memory = memoryview(arena)[i * SLAB : i * SLAB + slot.content.payload_bytes]
        assert store.start_write(slot, memory)
    del memory
    assert files.begun.acquire(timeout=20)
    threading.Thread(target=lambda: (store._workers._stop.wait(20), files.gate.set())).start()
    assert [ended.outcome for ended in store.close()] == ["done", "cancelled", "cancelled"]
    assert store.close() == store.poll() == ()
    arena.close()  # refused while anybody holds a part of it
    assert list(tmp_path.iterdir()) == []
    store.release(slots[0])
    with pytest.raises(ClosedError, match="closed"):
        store.reserve(content_of())
    with pytest.raises(ClosedError, match="closed"):
        store.start_write(slots[1], memory_of(slots[1].content.payload_bytes))


@pytest.mark.parametrize("direct", MODES)
def test_memory_is_reused_as_soon_as_a_transfer_has_ended(tmp_path, direct):
    """Four threads, an arena of six places, sixty segments: no byte too early or too late."""
    if direct == "auto" and not choose_direct(str(tmp_path), "auto")[0]:
        pytest.skip("no O_DIRECT here")
    settings = tier_settings(
        tmp_path, capacity_bytes=60 * SLAB, io_threads=4, queue_depth=5, direct=direct
    )
    store = open_store(settings)
    rng = np.random.default_rng(5)
    contents = [
        content_of(seed, blocks=int(rng.integers(1, 8)), tensor_bytes=(5000,)) for seed in range(60)
    ]
    arena = memory_of(6 * SLAB, bytes([0xEE]) * 6 * SLAB)
    free, lent = [arena[at : at + SLAB] for at in range(0, 6 * SLAB, SLAB)], {}
    todo = [(reserve(store, content), store.start_write) for content in contents]
    done_count = 0
    while todo or lent:
        if todo and free:
            slot, start = todo[0]
            memory = free[-1][: slot.content.payload_bytes]
            if start == store.start_write:
                memory[:] = payload_of(slot.content)
            if start(slot, memory):
                todo.pop(0)
                lent[slot] = free.pop()
            else:
                memory[:] = bytes([0xEE]) * len(memory)
        for ended in store.poll():
            assert ended.outcome == "done", ended
            place = lent.pop(ended.slot)
            if ended.kind == "write":
                todo.append((ended.slot, store.start_read))
            else:
                expected = used(ended.slot.content, payload_of(ended.slot.content))
                assert used(ended.slot.content, place) == expected
                done_count += 1
                store.release(ended.slot)
            place[:] = bytes([0xEE]) * SLAB
            free.append(place)
    assert done_count == 60
    assert all(place == bytes([0xEE]) * SLAB for place in free)
    assert store.counters()["reserved_bytes"] == 0
    store.close()


def test_memory_must_be_whole_pages_on_pages(store):
    slot = reserve(store, content_of())
    nbytes = slot.content.payload_bytes
    with pytest.raises(AssertionError, match=f"expected {nbytes} bytes"):
        store.start_write(slot, memory_of(nbytes + PAGE))
    with pytest.raises(AssertionError, match="not aligned"):
        store.start_write(slot, memory_of(nbytes + PAGE)[8 : nbytes + 8])
    assert store.counters()["in_flight_count"] == 0
