"""What a folder's file system is and can do: its type, its room, `O_DIRECT`, its speed.

Asked at start, and by whoever wants to know what a tier would be like. Leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.tiers.files import Files
from ptstore_mpi.types import PAGE_BYTES

__all__ = [
    "LOCAL_TYPES",
    "FileSystemFacts",
    "SpeedFacts",
    "choose_direct",
    "examine",
    "file_system_type",
    "measure_speed",
]

LOCAL_TYPES = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)
"""File systems of one machine alone: when its kernel starts anew, whoever used them is gone."""

_MEMORY_TYPES = frozenset({"ramfs", "tmpfs"})
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class FileSystemFacts:
    """What a tier in a folder would find.

    Attributes
    ----------
    directory
        The folder.
    file_system
        Type of its file system, as the kernel names it.
    total_bytes, free_bytes
        Its size, and what this user may still write.
    direct, direct_reason
        Whether `O_DIRECT` would be used, and why.
    """

    directory: str
    file_system: str
    total_bytes: int
    free_bytes: int
    direct: bool
    direct_reason: str


@dataclass(frozen=True, slots=True)
class SpeedFacts:
    """How fast one thread wrote a new file of ``nbytes`` and read it back."""

    nbytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float


def examine(directory: str, direct: Literal["auto", "on", "off"] = "auto") -> FileSystemFacts:
    """Return the facts of ``directory``.

    Parameters
    ----------
    directory
        A folder in which this user may make files.
    direct
        As in `TierSettings`.

    Raises
    ------
    ConfigError
        There is no such folder, or it is none, or nothing can be written there; or ``direct`` is
        ``on`` and the file system does not take it.
    """
    try:
        status = os.statvfs(directory)
        chosen, reason = choose_direct(directory, direct)
    except OSError as error:
        raise ConfigError(f"tier directory {directory!r}: {error.strerror}") from None
    if direct == "on" and not chosen:
        raise ConfigError(f"tier directory {directory!r}: direct = on, but {reason}")
    return FileSystemFacts(
        directory=directory,
        file_system=file_system_type(directory),
        total_bytes=status.f_blocks * status.f_frsize,
        free_bytes=status.f_bavail * status.f_frsize,
        direct=chosen,
        direct_reason=reason,
    )


def choose_direct(directory: str, wanted: Literal["auto", "on", "off"]) -> tuple[bool, str]:
    """Return whether to use `O_DIRECT` in ``directory``, and why."""
    if wanted == "off":
        with _nameless_file(directory, 0):
            return False, "switched off"
    kind = file_system_type(directory)
    if wanted == "auto" and kind in _MEMORY_TYPES:
        with _nameless_file(directory, 0):
            return False, f"{kind} is memory"
    return _try_direct(directory)


def file_system_type(directory: str) -> str:
    """Return the type of the file system that ``directory`` is on, ``unknown`` without /proc."""
    path = os.path.realpath(directory)
    try:
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return _UNKNOWN
    best, found = -1, _UNKNOWN
    for line in text.splitlines():
        mount, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), mount.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of mounts on one point the last is seen
            best, found = len(point), rest.split()[0]
    return found


def measure_speed(
    directory: str, *, direct: bool, most_bytes: int = 256 << 20, most_s: float = 1.0
) -> SpeedFacts:
    """Write a file, read it back, and return how fast that was.

    Parameters
    ----------
    directory
        Where.
    direct
        Whether past the page cache; without, what was written is written out all the same.
    most_bytes, most_s
        Bounds of the file and of the time for each direction; a call of 8 MiB is not broken off.

    Raises
    ------
    OSError
        The disk is full or broken.
    """
    files = Files(direct=direct)
    memory = memoryview(mmap.mmap(-1, 8 << 20))
    memory[:] = os.urandom(1 << 20) * 8
    with _nameless_file(directory, os.O_DIRECT if direct else 0) as descriptor:
        done = 0
        started_s = time.perf_counter()
        while done == 0 or (done < most_bytes and time.perf_counter() - started_s < most_s):
            moved = files.write(descriptor, [memory], done)
            files.let_pages_go(descriptor, done, moved, dirty=True)
            done += moved
        wrote_s = time.perf_counter() - started_s
        read = 0
        started_s = time.perf_counter()
        while read == 0 or (read < done and time.perf_counter() - started_s < most_s):
            read += files.read(descriptor, [memory], read)
        read_s = time.perf_counter() - started_s
    return SpeedFacts(done, done / wrote_s, read / read_s)


def _try_direct(directory: str) -> tuple[bool, str]:
    """Write a page to the second page of a file, from the second page of memory, and read it."""
    memory = memoryview(mmap.mmap(-1, 3 * PAGE_BYTES))
    wrote, read = memory[PAGE_BYTES : 2 * PAGE_BYTES], memory[2 * PAGE_BYTES :]
    wrote[:] = os.urandom(PAGE_BYTES)
    with _nameless_file(directory, 0):
        pass  # what fails here has nothing to do with O_DIRECT
    try:
        with _nameless_file(directory, os.O_DIRECT) as descriptor:
            os.pwritev(descriptor, [wrote], PAGE_BYTES)
            os.preadv(descriptor, [read], PAGE_BYTES)
    except OSError as error:
        return False, f"O_DIRECT is refused ({error.strerror})"
    return (True, "O_DIRECT works") if read == wrote else (False, "O_DIRECT bends bytes")


@contextmanager
def _nameless_file(directory: str, flags: int) -> Iterator[int]:
    """Yield a file whose name is gone as soon as it is open: it ends with its descriptor."""
    descriptor, name = tempfile.mkstemp(prefix="ptstore-probe-", dir=directory)
    try:
        if flags:
            os.close(descriptor)
            descriptor = -1
            descriptor = os.open(name, os.O_RDWR | flags)
    finally:
        Path(name).unlink()
    try:
        yield descriptor
    finally:
        os.close(descriptor)
