"""The system calls of the file tier, one method each, so that tests can put faults among them.

Knows no slots and no threads; every method may be called from several threads at once. Errors are
`OSError`. Page cache: with ``direct`` the bytes go past it; without, they are written out and
their pages given up at once, because the arena already holds them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["Files"]

_FALLOCATE_BYTES = 64 << 20
_SYNC_WAIT_WRITE_WAIT = 1 | 2 | 4  # of sync_file_range: what is under way, then all that is dirty
_NOT_OFFERED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE}

# Not in `os`. Unlike fdatasync it takes a range, and leaves the journal and the disk's own cache.
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class Files:
    """Files of one tier.

    Parameters
    ----------
    direct
        Whether reads and writes go past the page cache.
    """

    def __init__(self, *, direct: bool) -> None:
        self.direct = direct

    def create(self, path: Path, nbytes: int, *, go_on: Callable[[], bool]) -> int:
        """Make a file with all its blocks and return its descriptor; on failure it is gone.

        Where the file system cannot allocate, the C library writes into every block: slow, and so
        done in pieces, with a look at ``go_on`` in between. `InterruptedError`: it said no.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        descriptor = os.open(path, flags, 0o600)
        try:
            for start in range(0, nbytes, _FALLOCATE_BYTES):
                if not go_on():
                    raise InterruptedError(errno.EINTR, "closed")
                self.allocate(descriptor, start, min(_FALLOCATE_BYTES, nbytes - start))
            if self.direct:
                # Only now: what stands in for fallocate writes single bytes.
                os.close(descriptor)
                descriptor = -1
                descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return descriptor

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Give a range of a file its blocks."""
        os.posix_fallocate(descriptor, offset, nbytes)

    def free_bytes(self, directory: Path) -> int:
        """Return what this user may still write there."""
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Take a file away; nothing happens where there is none."""
        path.unlink(missing_ok=True)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Write from several pieces of memory; return how many bytes were."""
        return os.pwritev(descriptor, views, offset)

    def read(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Read into several pieces of memory; return how many bytes were: 0 at the end."""
        return os.preadv(descriptor, views, offset)

    def size(self, descriptor: int) -> int:
        """Return the length of a file."""
        return os.fstat(descriptor).st_size

    def let_pages_go(self, descriptor: int, offset: int, nbytes: int, *, dirty: bool) -> None:
        """Write a range out, where it is dirty, and give its pages of the page cache up."""
        if self.direct:
            return
        if dirty and _sync_file_range is not None:
            flags = _SYNC_WAIT_WRITE_WAIT
            if _sync_file_range(descriptor, offset, nbytes, flags) != 0:
                number = ctypes.get_errno()
                if number not in _NOT_OFFERED:
                    raise OSError(number, os.strerror(number))
        with contextlib.suppress(OSError):  # advice; not every file system takes it
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
