"""What every transport of the client side provides, and the interpreter of effects they share.

A transport performs client operations: it resumes the generator with the answer to each effect.
Copies between mapped memory and an engine's tensors, in host memory or on a CUDA device, are the
same everywhere and live here; a subclass provides time, messages and transfers.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ptstore_mpi import _native
from ptstore_mpi.arena import Memory, anonymous_memory
from ptstore_mpi.device_views import Views
from ptstore_mpi.protocol import effects
from ptstore_mpi.protocol.effects import Image, Operation
from ptstore_mpi.protocol.messages import Reply, Request
from ptstore_mpi.types import ServerIndex, whole_pages

if TYPE_CHECKING:
    from ptstore_mpi.transport.devices import Devices

__all__ = ["ClientTransport"]

T = TypeVar("T")


class ClientTransport(ABC):
    """Carries the operations of one client, one at a time.

    Parameters
    ----------
    arenas
        Mapped arenas by server: those of this client's node.
    staging_bytes
        Size of the staging memory.
    copy_threads
        Threads of a copy.
    is_populated
        Whether all pages of the arenas exist.
    """

    name: str
    malformed_count = 0  # replies that were refused; they count as never sent

    def __init__(
        self,
        arenas: dict[ServerIndex, Memory],
        *,
        staging_bytes: int,
        copy_threads: int,
        is_populated: Callable[[], bool] = lambda: True,
    ) -> None:
        self._turn = threading.Lock()
        self._memories: dict[ServerIndex | None, Memory] = dict(arenas.items())
        self._pool = _native.CopyPool(copy_threads)
        self._devices: Devices | None = None
        self._is_populated = is_populated
        self.replace_staging(staging_bytes)

    def replace_staging(self, nbytes: int) -> None:
        """Use fresh staging memory of ``nbytes``; the old one must not be in use."""
        staging = anonymous_memory(whole_pages(nbytes))
        if self._devices is not None:
            self._devices.replace_staging(staging)
        self._memories[None] = staging

    def _let_memory_go(self) -> None:
        """Forget the mapped memory, unlocked where a CUDA driver had locked its pages."""
        if self._devices is not None:
            self._devices.close()
            self._devices = None
        self._memories.clear()

    # -- what a subclass provides ----------------------------------------------------------

    @abstractmethod
    def now(self) -> float:
        """Return monotonic time, s."""

    @abstractmethod
    def send(self, server: ServerIndex, message: Request) -> None:
        """Send a request; never blocks."""

    @abstractmethod
    def receive(self, until: float) -> Reply | None:
        """Return the next reply of any server, or None once ``until`` has passed."""

    @abstractmethod
    def start_get(self, server: ServerIndex, offset: int, target: Memory) -> int:
        """Start reading from an arena until ``target`` is full; return the transfer's token."""

    @abstractmethod
    def start_write(self, server: ServerIndex, op: int, *, staging_offset: int, nbytes: int) -> int:
        """Start sending staging memory into the receive posted for ``op``; return the token."""

    @abstractmethod
    def await_tokens(self, until: float) -> tuple[int, ...]:
        """Return transfers that have completed: at least one, or () once ``until`` has passed."""

    @abstractmethod
    def close(self) -> None:
        """Flush what was sent and let the memory go. Call it once, after `bye`."""

    # -- the interpreter -------------------------------------------------------------------

    def perform(self, operation: Operation[T]) -> T:
        """Run an operation to its end and return its result; threads take turns."""
        with self._turn:
            return self._perform(operation)

    def _perform(self, operation: Operation[T]) -> T:
        answer: Any = None
        try:
            while True:
                answer = self._execute(operation.send(answer))
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            operation.close()

    def _execute(self, effect: effects.Effect) -> Any:
        match effect:
            case effects.Now():
                return self.now()
            case effects.Receive(until):
                return self.receive(until)
            case effects.Send(server, message):
                return self.send(server, message)
            case effects.AwaitTokens(until):
                return self.await_tokens(until)
            case effects.Unpack(views, view_block, image, checksums):
                memory, where = self._locate(image)
                return self._copier(views).unpack(
                    views, memory, view_block=view_block, checksums=checksums, **where
                )
            case effects.Pack(views, view_block, image, checksums):
                memory, where = self._locate(image)
                return self._copier(views).pack(
                    views, memory, view_block=view_block, checksums=checksums, **where
                )
            case effects.StartGet(server, offset, into, into_offset, nbytes):
                target = self._memories[into][into_offset : into_offset + nbytes]
                return self.start_get(server, offset, target)
            case effects.StartWrite(server, op, staging_offset, nbytes):
                return self.start_write(server, op, staging_offset=staging_offset, nbytes=nbytes)

    def _copier(self, views: Views) -> Any:
        if isinstance(views, _native.TensorViews):
            return self._pool
        if self._devices is None:
            from ptstore_mpi.transport.devices import Devices  # not where no CUDA tensor is used

            arenas = [memory for server, memory in self._memories.items() if server is not None]
            self._devices = Devices(
                arenas,
                self._memories[None],
                device=views.device,
                is_populated=self._is_populated,
            )
        return self._devices

    def _locate(self, image: Image) -> tuple[Memory, dict[str, int]]:
        return self._memories[image.server], {
            "offset": image.offset,
            "segment_blocks": image.segment_blocks,
            "segment_block": image.first_block,
            "block_count": image.block_count,
        }

    def _staging(self, offset: int, nbytes: int) -> Memory:
        return self._memories[None][offset : offset + nbytes]
