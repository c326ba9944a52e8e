"""Real disks: full ones, limits of file sizes, the page cache, what is found out about them."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tier_hand import (
    PAGE,
    SLAB,
    content_of,
    payload_of,
    read,
    reserve,
    tier_settings,
    used,
    write,
)

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.testing.tier_faults import open_store
from ptstore_mpi.tiers import file_system
from ptstore_mpi.tiers.file_system import choose_direct, examine, file_system_type, measure_speed
from ptstore_mpi.tiers.outcomes import Refusal
from ptstore_mpi.tiers.room import FileSlot
from ptstore_mpi.tiers.settings import TierSettings
from ptstore_mpi.tiers.throughput import main

LIMITED = """
import resource, sys
sys.path.insert(0, {unit!r})
from tier_hand import tier_settings, content_of, reserve
from ptstore_mpi.testing.tier_faults import open_store
from ptstore_mpi.tiers.outcomes import Refusal
resource.setrlimit(resource.RLIMIT_FSIZE, (10 * 4096, resource.RLIM_INFINITY))
store = open_store(tier_settings({directory!r}))
assert reserve(store, content_of()) is Refusal.FULL
assert store.counters()["failed_slab_count"] == 1
store.close()
"""


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for two and a half slabs."""
    path = tmp_path / "small disk ä"
    path.mkdir()
    size = 5 * SLAB // 2
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs a mount")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_a_value_a_warning_once_and_no_partial_file(small_disk, caplog):
    now = [0.0]
    store = open_store(tier_settings(small_disk), clock=lambda: now[0])
    content = content_of(tensor_bytes=(7 * PAGE,))  # a slab each
    slots = [write(store, content)[0] for _ in range(2)]
    assert reserve(store, content) is Refusal.FULL
    assert len(list(small_disk.glob("*/slab-*"))) == 2
    assert os.statvfs(small_disk).f_bavail * PAGE >= SLAB // 2 - PAGE, "others keep the rest"
    store.release(slots[0])
    assert write(store, content)[1].outcome == "done", "what is there can be used"
    now[0] += 30
    assert reserve(store, content) is Refusal.FULL
    assert store.counters()["failed_slab_count"] == 2
    assert len(caplog.records) == 1
    assert "no further slab" in caplog.text
    assert f"bytes are free, a slab has {SLAB}" in caplog.text, "asked before it was tried"
    store.close()


def test_what_others_write_does_not_take_what_was_reserved(small_disk):
    store = open_store(tier_settings(small_disk))
    slot = reserve(store, content_of())
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "others").write_bytes(bytes(3 * SLAB))
    other, ended = write(store, content_of(2))
    assert (ended.outcome, other.slab) == ("done", slot.slab)
    assert read(store, other)[0] == used(other.content, payload_of(other.content))
    store.close()


def test_a_limit_of_file_sizes_is_a_full_disk(tmp_path):
    unit = str(Path(__file__).parent)
    script = LIMITED.format(unit=unit, directory=str(tmp_path))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_room_that_comes_back_is_used_after_the_pause(small_disk):
    now = [0.0]
    (small_disk / "others").write_bytes(bytes(2 * SLAB))
    store = open_store(tier_settings(small_disk), clock=lambda: now[0])
    assert reserve(store, content_of()) is Refusal.FULL
    (small_disk / "others").unlink()
    assert store.reserve(content_of()) is Refusal.FULL
    now[0] += 30
    assert isinstance(reserve(store, content_of()), FileSlot)
    store.close()


def test_the_page_cache_does_not_keep_a_second_copy(tmp_path):
    if file_system_type(str(tmp_path)) not in ("ext4", "xfs"):
        pytest.skip("needs a disk")
    slab = 256 * PAGE
    store = open_store(tier_settings(tmp_path, slab_bytes=slab, capacity_bytes=slab, io_threads=1))
    slot, _ = write(store, content_of(tensor_bytes=(100 * PAGE,)))
    assert cached_pages(slot) == 0, "written"
    assert read(store, slot)[1].outcome == "done"
    assert cached_pages(slot) < 50, "read; what was read ahead may stay"
    store.close()


def cached_pages(slot):
    mapped = mmap.mmap(slot.slab.descriptor, slot.nbytes, offset=slot.place.offset)
    resident = (ctypes.c_ubyte * (slot.nbytes // PAGE))()
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(slot.nbytes), resident) == 0
    return sum(page & 1 for page in resident)


# -- what is found out -------------------------------------------------------------------------


def test_the_facts_of_a_folder(tmp_path):
    facts = examine(str(tmp_path))
    assert facts.directory == str(tmp_path)
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert facts.file_system == file_system_type("/proc/self/../../" + str(tmp_path)[1:])
    assert file_system_type("/proc/self") == "proc"
    assert examine(str(tmp_path), "off").direct is False
    assert list(tmp_path.iterdir()) == []


def test_memory_is_never_read_past_its_cache(small_disk):
    assert file_system_type(str(small_disk)) == "tmpfs"
    assert choose_direct(str(small_disk), "auto") == (False, "tmpfs is memory")


def test_direct_that_is_asked_for_and_refused_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", refuse)
    assert choose_direct(str(tmp_path), "on")[1].startswith("O_DIRECT is refused (Invalid")
    with pytest.raises(ConfigError, match=r"direct = on, but O_DIRECT is refused"):
        examine(str(tmp_path), "on")
    if file_system_type(str(tmp_path)) not in file_system._MEMORY_TYPES:
        assert examine(str(tmp_path), "auto").direct is False
    assert list(tmp_path.iterdir()) == []


def refuse(*arguments):
    raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_measured_speed_is_bounded_and_leaves_nothing(tmp_path, mode):
    direct = mode == "on" and choose_direct(str(tmp_path), "auto")[0]
    speed = measure_speed(str(tmp_path), direct=direct, most_bytes=16 << 20)
    assert speed.nbytes <= 16 << 20
    assert min(speed.nbytes, speed.write_bytes_per_s, speed.read_bytes_per_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_speeds(tmp_path, capsys):
    main([str(tmp_path), "--total-mib", "8", "--rounds", "1", "--segment-mib", "1", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["1", "4"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"directory": ""}, "directory must be"),
        ({"slab_bytes": PAGE + 1}, "slab_bytes must be a multiple of 4096"),
        ({"slab_bytes": 2 << 20}, "1 to 256 slabs"),
        ({"capacity_bytes": 257 * PAGE, "slab_bytes": PAGE}, "1 to 256 slabs"),
        ({"io_threads": 0}, "io_threads must be 1 to 64, got 0"),
        ({"queue_depth": 0}, "queue_depth must be 1"),
        ({"direct": "maybe"}, "expected one of auto, on, off, got 'maybe'"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    given = {"directory": "/tmp", "capacity_bytes": 1 << 20, "slab_bytes": PAGE * 64, **changes}
    with pytest.raises(ConfigError, match=message):
        TierSettings(**given)
