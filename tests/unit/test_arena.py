"""The arena file: mapped by several, unlinked early, populated in the background."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ptstore_mpi.arena import Arena, anonymous_memory
from ptstore_mpi.errors import TransportError

PAGE = 4096
OPEN = Path("/proc/self/fd")


def wait_populated(arena, nbytes):
    deadline = time.monotonic() + 20
    while arena.populated_bytes < nbytes:
        assert time.monotonic() < deadline, f"only {arena.populated_bytes} of {nbytes} bytes"
        time.sleep(1e-3)


def test_two_mappings_of_one_file_that_has_no_name_any_more(tmp_path):
    arena = Arena.create(str(tmp_path), 8 * PAGE)
    assert arena.path.stat().st_mode & 0o777 == 0o600
    other = Arena.attach(str(arena.path), 8 * PAGE)
    arena.unlink()
    arena.unlink()
    assert list(tmp_path.iterdir()) == []
    arena.memory[5 * PAGE] = 77
    assert other.memory[5 * PAGE] == 77
    assert (len(arena.memory), len(other.memory)) == (8 * PAGE, 8 * PAGE)
    arena.close()
    assert other.memory[5 * PAGE] == 77, "a mapping outlives its maker"
    other.close()


@pytest.mark.parametrize("nbytes", [PAGE, (16 << 20) + PAGE])
def test_population_covers_the_whole_arena(tmp_path, nbytes):
    arena = Arena.create(str(tmp_path), nbytes)
    arena.start_populating()
    wait_populated(arena, nbytes)
    assert arena.path.stat().st_blocks * 512 >= nbytes
    arena.close()
    assert list(tmp_path.iterdir()) == [], "close takes the name away if nobody did"


def test_close_in_the_middle_of_population(tmp_path):
    arena = Arena.create(str(tmp_path), 256 << 20)
    arena.start_populating()
    arena.close()
    assert arena.populated_bytes <= 256 << 20
    assert list(tmp_path.iterdir()) == []


def test_close_closes_the_descriptor(tmp_path):
    before = set(OPEN.iterdir())
    for _ in range(3):
        arena = Arena.create(str(tmp_path), PAGE)
        arena.start_populating()
        arena.close()
        arena.close()
    del arena
    assert set(OPEN.iterdir()) == before


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    with pytest.raises(TransportError, match="none"):
        Arena.create(str(tmp_path / "none"), PAGE)


def test_a_failed_create_leaves_no_file_behind(tmp_path):
    with pytest.raises((TransportError, ValueError)):
        Arena.create(str(tmp_path), 0)
    assert list(tmp_path.iterdir()) == []


def test_anonymous_memory_is_aligned_and_zero():
    memory = anonymous_memory(3 * PAGE)
    assert memory.ctypes.data % PAGE == 0
    assert memory.flags.writeable
    assert not memory.any()


FULL = """
import ptstore_mpi as pt
layout = pt.KVLayout((pt.TensorSpec("a", 64),), 4)
def main(store):
    namespace = store.namespace("m", layout)
    import time
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        namespace.match([1, 2, 3, 4, 5])
        time.sleep(0.01)
pt.run(main, pt.Config(memory_bytes=64 << 20, segment_tokens=16))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small tmpfs")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_too_little_shared_memory_is_a_clear_error_before_it_is_used():
    """One process, 8 MiB of shared memory, an arena of 64 MiB: no bus error, no slow surprise."""
    mount = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" -c "$1"'
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, sys.executable, FULL],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1, ended
    last = ended.stderr.strip().splitlines()[-1]
    assert "ConfigError" in last, last
    assert "/dev/shm" in last, last
    assert "memory_bytes" in last, last
