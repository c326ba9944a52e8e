"""Copies of one client between CUDA devices and segment images, and the page-locks of its memory.

Made at the first such copy; until then nothing here is even imported. Arenas and staging
memory are page-locked by a thread in the background, an arena when its pages exist: until then, and
where the driver refuses, copies are right all the same, only slower.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import numpy as np

from ptstore_mpi import _native, cuda
from ptstore_mpi.arena import Memory
from ptstore_mpi.device_views import DeviceViews
from ptstore_mpi.errors import TransportError
from ptstore_mpi.protocol.effects import Checksums

__all__ = ["Devices"]

_LOG = logging.getLogger(__name__)
_NAP_S = 0.02
_OPEN: set[Devices] = set()  # what is page-locked must not be unmapped, whoever forgets to close


class Devices:
    """What `CopyPool` is for host memory: copies between device views and segment images.

    Parameters
    ----------
    arenas, staging
        Where images lie. Each is page-locked as a whole: the driver refuses a copy whose memory
        is locked only in part.
    device
        Ordinal of a device whose context may hold the locks; they count for all devices.
    is_populated
        Whether all pages of the arenas exist; to lock them before would mean to make them all.

    Attributes
    ----------
    unlocked_count
        Memories that the driver refused to page-lock.
    """

    def __init__(
        self,
        arenas: Iterable[Memory],
        staging: Memory,
        *,
        device: int,
        is_populated: Callable[[], bool],
    ) -> None:
        self.unlocked_count = 0
        self._device = cuda.device(device)
        self._arenas = list(arenas)  # that nobody has tried to lock yet
        self._staging = staging
        self._is_populated = is_populated
        self._locked: list[Memory] = []
        self._stop = threading.Event()
        self._start_locking()

    def pack(
        self,
        views: DeviceViews,
        memory: Memory,
        *,
        view_block: int,
        checksums: bool = False,
        **image: int,
    ) -> Checksums:
        """Copy blocks of the views into a segment image; all as in `CopyPool.pack`."""
        copies = views.copies(view_block=view_block, memory_bytes=memory.nbytes, **image)
        with cuda.device(views.device).copying(copies, memory, to_device=False):
            pass
        return _checksums(views, memory, image) if checksums else None

    def unpack(
        self,
        views: DeviceViews,
        memory: Memory,
        *,
        view_block: int,
        checksums: bool = False,
        **image: int,
    ) -> Checksums:
        """Copy blocks of a segment image into the views; all as in `CopyPool.unpack`."""
        copies = views.copies(view_block=view_block, memory_bytes=memory.nbytes, **image)
        with cuda.device(views.device).copying(copies, memory, to_device=True):
            return _checksums(views, memory, image) if checksums else None  # while they run

    # -- page-locks ------------------------------------------------------------------------

    def replace_staging(self, staging: Memory) -> None:
        """Let the old staging memory go and page-lock this one."""
        self._stop_locking()
        if any(memory is self._staging for memory in self._locked):
            self._unlock(self._staging)
        self._staging = staging
        self._start_locking()

    def close(self) -> None:
        """Unlock all pages, before their memory goes."""
        self._stop_locking()
        for memory in self._locked.copy():
            self._unlock(memory)
        _OPEN.discard(self)

    def _start_locking(self) -> None:
        _OPEN.add(self)
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._lock_pages, name="ptstore-page-locks", daemon=True
        )
        self._thread.start()

    def _stop_locking(self) -> None:
        self._stop.set()
        self._thread.join()

    def _lock_pages(self) -> None:
        self._lock(self._staging)
        while not self._is_populated():
            if self._stop.wait(_NAP_S):
                return
        while self._arenas and not self._stop.is_set():
            self._lock(self._arenas.pop())

    def _lock(self, memory: Memory) -> None:
        try:
            self._device.lock_pages(memory)
        except TransportError as error:
            self.unlocked_count += 1
            if self.unlocked_count == 1:
                _LOG.warning(
                    "%d bytes cannot be page-locked (%s): copies to and from CUDA devices are slow",
                    memory.nbytes,
                    error,
                )
        else:
            self._locked.append(memory)

    def _unlock(self, memory: Memory) -> None:
        self._locked = [locked for locked in self._locked if locked is not memory]
        try:
            self._device.unlock_pages(memory)
        except TransportError as error:  # an engine's fault ends its context, and the locks with it
            _LOG.warning("%s", error)


def _checksums(views: DeviceViews, memory: Memory, image: dict[str, int]) -> Checksums:
    sizes = np.asarray(views.block_bytes, dtype=np.int64)
    return _native.block_checksums(memory, block_bytes=sizes, **image)
