"""A server's memory: a file in shared memory that the server and its node's clients map.

The file is unlinked as soon as everybody has mapped it, so a crash leaks nothing. Its pages are
populated in the background, chunk by chunk and without writing through the mapping: a large arena
does not delay the start, and a full file system is an error with a name, not a bus error. The
server allocates the pages; every process that maps them fills its own page tables, because a
fault on the first touch of each page would cost more than the copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ptstore_mpi.errors import ConfigError, TransportError
from ptstore_mpi.free_memory import free_memory_bytes

__all__ = ["Arena", "anonymous_memory", "free_bytes_of"]

Memory = npt.NDArray[np.uint8]

_CHUNK_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels refuse it and fault page by page

# Through ctypes, because mmap.madvise keeps the interpreter lock while the kernel works.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def anonymous_memory(nbytes: int) -> Memory:
    """Return ``nbytes`` of private, page-aligned memory, uint8; pages come on first use.

    Raises
    ------
    ConfigError
        The system does not give so much.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"no memory of {nbytes} bytes to stage in ({error}); it holds staging_bytes, and at "
            f"least two segments (segment_tokens) and two Gets (get_bytes)"
        ) from None


def free_bytes_of(directory: str) -> int:
    """Return the bytes that an arena in ``directory`` may have.

    What the file system has free for this user or, where that is less, the memory of the machine
    or of this job's control group: a tmpfs may be larger than both, and its pages are memory.

    Raises
    ------
    ConfigError
        There is no such folder.
    """
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"shared_memory_dir {directory!r}: {error.strerror}") from None
    return min(status.f_bavail * status.f_frsize, free_memory_bytes())


class Arena:
    """The arena file of one server, as the process that made it or one that mapped it sees it.

    Attributes
    ----------
    memory
        The mapped bytes, shape (nbytes,), uint8.
    path
        The file while it has a name.
    """

    def __init__(self, descriptor: int, nbytes: int, path: Path, *, is_owner: bool) -> None:
        self._descriptor = descriptor
        self._is_owner = is_owner
        self.path = path
        self.nbytes = nbytes
        self.memory: Memory = np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
        self._address: int = self.memory.ctypes.data
        self._populated_bytes = 0
        self._failure: OSError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def create(cls, directory: str, nbytes: int) -> Arena:
        """Make and map a new file of ``nbytes`` in ``directory``, readable by this user only."""
        try:
            descriptor, name = tempfile.mkstemp(prefix="ptstore-arena-", dir=directory)
        except OSError as error:
            raise TransportError(f"cannot make an arena in {directory!r}: {error}") from error
        try:
            os.ftruncate(descriptor, nbytes)
            return cls(descriptor, nbytes, Path(name), is_owner=True)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            Path(name).unlink()
            raise TransportError(f"cannot map an arena of {nbytes} bytes: {error}") from error

    @classmethod
    def attach(cls, path: str, nbytes: int) -> Arena:
        """Map the file that another process of this node made."""
        return cls(os.open(path, os.O_RDWR), nbytes, Path(path), is_owner=False)

    def unlink(self) -> None:
        """Take the file's name away; the mapping stays."""
        self.path.unlink(missing_ok=True)

    # -- population ------------------------------------------------------------------------

    def start_populating(self) -> None:
        """Begin to populate the pages in a thread of its own; it never calls MPI."""
        self._thread = threading.Thread(target=self._populate, name="ptstore-populate", daemon=True)
        self._thread.start()

    @property
    def populated_bytes(self) -> int:
        """Bytes from the start whose pages exist.

        Raises
        ------
        TransportError
            The file system has no room for the rest.
        """
        if self._failure is not None:
            raise TransportError(
                f"arena: {self.path.parent} has room for {self._populated_bytes} of "
                f"{self.nbytes} bytes ({self._failure.strerror}); lower memory_bytes"
            )
        return self._populated_bytes

    @property
    def is_populated(self) -> bool:
        """Whether every page exists."""
        return self._populated_bytes == self.nbytes

    def _populate(self) -> None:
        while self._populated_bytes < self.nbytes and not self._stop.is_set():
            start = self._populated_bytes
            length = min(_CHUNK_BYTES, self.nbytes - start)
            if self._is_owner:
                try:
                    os.posix_fallocate(self._descriptor, start, length)
                except OSError as error:
                    self._failure = error
                    return
            _madvise(self._address + start, length, _MADV_POPULATE_WRITE)
            self._populated_bytes += length

    def close(self) -> None:
        """Stop populating and let the file go; the mapping ends with its last user."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.unlink()
        self.memory = np.empty(0, dtype=np.uint8)
