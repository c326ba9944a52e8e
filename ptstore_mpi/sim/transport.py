"""The client side of transport `sim`: bytes move when the cluster says so."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np

from ptstore_mpi.arena import Memory
from ptstore_mpi.protocol.effects import Effect, Operation, Pack, Unpack
from ptstore_mpi.protocol.messages import Reply, Request
from ptstore_mpi.sim.trace import START_S
from ptstore_mpi.transport.base import ClientTransport
from ptstore_mpi.types import ServerIndex, whole_pages

if TYPE_CHECKING:
    from ptstore_mpi.sim.cluster import Cluster

__all__ = ["SimTransport", "Stepper", "Transfer", "counted_memory"]

T = TypeVar("T")
E = TypeVar("E")


def counted_memory(nbytes: int) -> Memory:
    """Return memory whose bytes are only counted: read-only, one byte that looks like many."""
    return np.broadcast_to(np.uint8(0), nbytes)


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer in flight.

    Attributes
    ----------
    token
        Its name.
    server
        Whose arena is at its other end.
    staging
        The bytes at this client's end: of staging memory, or of a replica's slot.
    source, target
        Where its bytes come from, and where they go. A send has no target until it has met a
        receive at its receiver.
    meet
        Finds the target of a send; None for a Get.
    arrived
        What follows when the last byte of a send is at its receiver.
    torn
        Its client has vanished: what has not moved never will.
    """

    token: int
    server: ServerIndex
    staging: Memory
    source: Memory
    target: Memory | None
    meet: Callable[[], Memory] | None = None
    arrived: Callable[[], None] = lambda: None
    torn: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the transfer."""
        return len(self.staging)

    def carry(self, start: int, end: int) -> None:
        """Move the bytes ``start <= i < end``."""
        if self.target is None:
            assert self.meet is not None
            self.target = self.meet()
        if self.target.flags.writeable:  # else bytes are only counted
            self.target[start:end] = self.source[start:end]


class SimTransport(ClientTransport):
    """The carrier of one client of a `Cluster`.

    Attributes
    ----------
    replies
        Replies that have arrived and that nobody has taken yet.
    done
        Tokens of the transfers that have ended and that nobody has asked for yet.
    started_count
        Transfers started so far: the token of the newest.
    rate
        Speed of this client's clock against the cluster's.
    hold_transfers
        While true, transfers that are started stay in flight until `land`.
    """

    name = "sim"

    def __init__(self, cluster: Cluster, client: int) -> None:
        self._cluster = cluster
        self.client = client
        self.replies: deque[Reply] = deque()
        self.done: list[int] = []
        self.rate = 1.0
        self.hold_transfers = False
        self._in_flight: deque[Transfer] = deque()
        self.started_count = 0
        near = cluster.topology.servers_of(cluster.topology.nodes[client])
        super().__init__(
            {server: cluster.memories[server] for server in near},
            staging_bytes=cluster.config.staging_bytes,
            copy_threads=1,
        )

    def replace_staging(self, nbytes: int) -> None:
        """Use fresh staging memory; where bytes are only counted, addresses without pages."""
        if self._cluster.counts_only:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            pages = mmap.mmap(-1, whole_pages(nbytes), flags=flags, prot=mmap.PROT_READ)
            self._memories[None] = np.frombuffer(pages, dtype=np.uint8)
        else:
            super().replace_staging(nbytes)

    def execute(self, effect: Effect) -> Any:
        """Carry out one effect and return its answer."""
        return self._execute(effect)

    def _execute(self, effect: Effect) -> Any:
        if self._cluster.counts_only:
            match effect:
                case Pack(_, _, image, checksums) | Unpack(_, _, image, checksums):
                    return np.zeros(image.block_count, np.uint32) if checksums else None
        return super()._execute(effect)

    def now(self) -> float:
        """Return this client's time, s."""
        return START_S + (self._cluster.now - START_S) * self.rate

    def cluster_time(self, until: float) -> float:
        """Return the cluster's time at which this client's clock shows ``until``, s."""
        return START_S + (until - START_S) / self.rate

    def send(self, server: ServerIndex, message: Request) -> None:
        """Hand a request to the network."""
        self._cluster.send(server, message)

    def receive(self, until: float) -> Reply | None:
        """Return the next reply; with none there, let time pass until ``until``."""
        self._cluster.wait(lambda: bool(self.replies), self.cluster_time(until))
        return self.replies.popleft() if self.replies else None

    def start_get(self, server: ServerIndex, offset: int, target: Memory) -> int:
        """Start reading: the bytes are taken when the transfer lands."""
        source = self._cluster.memories[server][offset : offset + len(target)]
        return self._start(Transfer(0, server, target, source, target))

    def start_write(self, server: ServerIndex, op: int, *, staging_offset: int, nbytes: int) -> int:
        """Start writing into the next receive posted for ``op``."""
        source = self._staging(staging_offset, nbytes)
        key = (server, self.client, op)
        meet = partial(self._cluster.take_posted, *key, nbytes)
        arrived = partial(self._cluster.end_data, *key)
        return self._start(Transfer(0, server, source, source, None, meet, arrived))

    def await_tokens(self, until: float) -> tuple[int, ...]:
        """Return the transfers that have landed; with none, let time pass until ``until``."""
        self._cluster.wait(lambda: bool(self.done), self.cluster_time(until))
        return self.take_done()

    def take_done(self) -> tuple[int, ...]:
        """Return the transfers that have ended since the last call."""
        done, self.done = tuple(self.done), []
        return done

    def land(self, count: int | None = None) -> None:
        """Let the first ``count`` transfers in flight arrive; default all."""
        for _ in range(len(self._in_flight) if count is None else count):
            transfer = self._in_flight.popleft()
            self._cluster.move(self, transfer)

    @property
    def in_flight_count(self) -> int:
        """Transfers held back."""
        return len(self._in_flight)

    def close(self) -> None:
        """Nothing is held."""

    def _start(self, transfer: Transfer) -> int:
        self.started_count += 1
        transfer.token = self.started_count
        if self.hold_transfers:
            self._in_flight.append(transfer)
        else:
            self._cluster.move(self, transfer)
        return self.started_count


class Stepper(Generic[T]):
    """One client operation, performed effect by effect.

    Attributes
    ----------
    effect
        The effect that comes next; None once the operation has ended.
    result
        What the operation returned, once it has ended.
    """

    def __init__(self, transport: SimTransport, operation: Operation[T]) -> None:
        self._transport = transport
        self._operation = operation
        self.effect: Effect | None = None
        self.result: T | None = None
        self._resume(None)

    @property
    def done(self) -> bool:
        """Whether the operation has ended."""
        return self.effect is None

    def step(self) -> None:
        """Carry out the next effect."""
        assert self.effect is not None, "the operation has ended"
        self._resume(self._transport.execute(self.effect))

    def run_to(self, kind: type[E]) -> E:
        """Carry out effects until one of this kind comes next, and return that one."""
        while (effect := self.effect) is not None:
            if isinstance(effect, kind):
                return effect
            self.step()
        raise AssertionError(f"the operation ended with {self.result} before a {kind.__name__}")

    def finish(self) -> T:
        """Carry out everything that is left and return the result."""
        while self.effect is not None:
            self.step()
        return cast("T", self.result)

    def stop(self) -> None:
        """End the operation where it stands, as an exception in the engine would."""
        self._operation.close()
        self.effect = None

    def _resume(self, answer: Any) -> None:
        try:
            self.effect = self._operation.send(answer)
        except StopIteration as stop:
            self.effect, self.result = None, stop.value
