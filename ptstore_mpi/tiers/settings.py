"""What a file tier may use: where, how much, and how. Values only."""

from __future__ import annotations

from typing import Literal

import msgspec

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.types import PAGE_BYTES

__all__ = ["TierSettings"]

_MOST_SLABS = 256  # each keeps a descriptor open, and 1024 is a common limit of these
_MOST_THREADS = 64
_MOST_IN_QUEUE = 65536


class TierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the file tier of one server.

    Attributes
    ----------
    directory
        Folder of the slabs: it exists, on the file system that is meant.
    capacity_bytes
        Most that this server's files there may take together.
    slab_bytes
        Size of one file, in whole pages; the largest segment must fit. At most 256 of them make
        up the capacity; what is left over is not used.
    io_threads
        Threads that read and write.
    queue_depth
        Reads and writes that may be under way at once, waiting ones included.
    direct
        Past the page cache (`O_DIRECT`): ``on``, ``off``, or ``auto``: where the file system
        takes it and is not memory itself.
    """

    directory: str
    capacity_bytes: int
    slab_bytes: int = 1 << 30
    io_threads: int = 2
    queue_depth: int = 16
    direct: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        if not self.directory or "\0" in self.directory:
            raise ConfigError(f"directory must be a folder's name, got {self.directory!r}")
        if self.slab_bytes < PAGE_BYTES or self.slab_bytes % PAGE_BYTES:
            raise ConfigError(
                f"slab_bytes must be a multiple of {PAGE_BYTES}, got {self.slab_bytes}"
            )
        if not 1 <= self.most_slabs <= _MOST_SLABS:
            raise ConfigError(
                f"capacity_bytes must hold 1 to {_MOST_SLABS} slabs of slab_bytes "
                f"({self.slab_bytes}), got {self.capacity_bytes}"
            )
        for name, most in (("io_threads", _MOST_THREADS), ("queue_depth", _MOST_IN_QUEUE)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be 1 to {most}, got {getattr(self, name)}")
        if self.direct not in ("auto", "on", "off"):
            raise ConfigError(f"direct: expected one of auto, on, off, got {self.direct!r}")

    @property
    def most_slabs(self) -> int:
        """Files that the capacity allows."""
        return self.capacity_bytes // self.slab_bytes
