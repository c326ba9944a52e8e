"""The folder in which one server of one job keeps its slabs, and what dead jobs left beside it.

Each server makes a folder of its own in the directory of the tier, and locks a file in it for as
long as it lives::

    <directory>/ptstore-tier-<boot>-<owner>-<random>/
        lock                   locked (flock); `unlocked` where the file system has no locks
        slab-000000 ...

``boot`` is the kernel's: it tells which machine, since which start. A folder is reclaimed only
when it is provably nobody's any more: its lock is free, and that can be trusted, because its file
system belongs to one machine, or because it was made under this very kernel. On a parallel file
system another node's lock may be invisible here (Lustre's ``localflock``, NFS's ``nolock``): such
folders are counted and left. What is in doubt stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ptstore_mpi.errors import TransportError
from ptstore_mpi.tiers.file_system import LOCAL_TYPES, file_system_type

__all__ = ["Leftovers", "TierDirectory", "reclaim"]

_LOCK = "lock"
_UNLOCKED = "unlocked"
_NAME = re.compile(r"ptstore-tier-([0-9a-f]{32})-(.+)")
_UNKNOWN_BOOT = "0" * 32
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What was found of other tiers in a directory, folders and bytes of their files.

    Attributes
    ----------
    reclaimed_count, reclaimed_bytes
        Nobody's any more, and removed.
    live_count, live_bytes
        Locked: their servers are at work.
    doubtful_count
        Perhaps somebody's, of another machine or user; left, and not looked into.
    """

    reclaimed_count: int = 0
    reclaimed_bytes: int = 0
    live_count: int = 0
    live_bytes: int = 0
    doubtful_count: int = 0


class TierDirectory:
    """The folder of this server, locked until `close`.

    Attributes
    ----------
    path
        The folder.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, directory: str, owner: str) -> TierDirectory:
        """Make the folder of ``owner`` in ``directory``.

        Raises
        ------
        TransportError
            Nothing can be made there.
        """
        label = re.sub(r"[^A-Za-z0-9_.]+", "_", owner)[:64]
        try:
            for _ in range(_TRIES):
                path = Path(
                    tempfile.mkdtemp(prefix=f"ptstore-tier-{_boot_id()}-{label}-", dir=directory)
                )
                # Until it is locked, somebody who reclaims may take it away: then another one.
                with contextlib.suppress(FileNotFoundError, BlockingIOError):
                    return cls(path, _lock_new(path))
        except OSError as error:
            raise TransportError(f"cannot make a tier in {directory!r}: {error}") from error
        raise TransportError(f"cannot make a tier in {directory!r}: always taken away")

    def slab_path(self, number: int) -> Path:
        """Return where the file of a slab is."""
        return self.path / f"slab-{number:06d}"

    def close(self) -> None:
        """Remove the folder with all that is in it. What cannot be removed is a leftover."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def reclaim(directory: str) -> Leftovers:
    """Remove the folders in ``directory`` that are nobody's any more; count the others.

    Raises
    ------
    OSError
        The directory cannot be read.
    """
    found: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    is_local = file_system_type(directory) in LOCAL_TYPES
    for path in sorted(Path(directory).iterdir()):
        name = _NAME.fullmatch(path.name)
        if name is None or path.is_symlink():
            continue
        size, what = 0, "doubtful"
        # The others are not even opened: n servers would look at n folders of a parallel system.
        if is_local or name[1] == _boot_id() != _UNKNOWN_BOOT:
            size, what = _file_bytes(path), _reclaim_one(path)
        found[what] += 1
        nbytes[what] += size
    return Leftovers(
        found["reclaimed"],
        nbytes["reclaimed"],
        found["live"],
        nbytes["live"],
        found["doubtful"],
    )


def _reclaim_one(path: Path) -> str:
    """Remove a folder whose lock is free and can be trusted; return what it was."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        # Its maker has not come to the lock yet, or there are no locks: only an empty one goes.
        with contextlib.suppress(OSError):
            path.rmdir()
        return "doubtful" if path.exists() else "gone"
    except OSError:
        return "doubtful"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(lock).st_nlink:
            return "gone"  # somebody else has just reclaimed it
        return "reclaimed" if _remove(path) else "doubtful"
    except BlockingIOError:
        return "live"
    except OSError:
        return "doubtful"
    finally:
        os.close(lock)


def _lock_new(path: Path) -> int:
    """Make and lock the lock of a folder; `FileNotFoundError`, `BlockingIOError`: it was lost."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise
    except OSError:  # no locks here: then nobody may reclaim this folder
        os.close(lock)
        (path / _LOCK).rename(path / _UNLOCKED)
        return os.open(path / _UNLOCKED, os.O_RDWR)
    if not os.fstat(lock).st_nlink:
        os.close(lock)
        raise FileNotFoundError(path)
    return lock


def _remove(path: Path) -> bool:
    """Remove a folder and its files, the lock last; return whether all of it is gone."""
    with contextlib.suppress(OSError):
        for file in sorted(path.iterdir(), key=lambda file: file.name in (_LOCK, _UNLOCKED)):
            file.unlink()
        path.rmdir()
        return True
    return False


def _file_bytes(path: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for file in path.iterdir():
            total += file.lstat().st_size
    return total


def _boot_id() -> str:
    """Return 32 hexadecimal digits that this start of this machine's kernel alone has."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return _UNKNOWN_BOOT
