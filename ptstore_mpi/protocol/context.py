"""What a client's operations share: who is where, staging room, and the ledger of operations.

The ledger is the client's half of P1-P3: operation numbers that are never reused, and per server
the smallest number that is still live there *or has an outstanding Get or write into its arena*.
Staging extents that an operation left behind with transfers in flight stay lent until these have
ended (P13), and so does the number of that operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ptstore_mpi import _native
from ptstore_mpi.protocol.times import ClientTimes
from ptstore_mpi.types import ServerIndex, whole_pages

if TYPE_CHECKING:
    from ptstore_mpi.config import Config

__all__ = ["ClientContext", "Extent", "Ledger", "Transfer"]


@dataclass(slots=True, eq=False)
class Extent:
    """Staging bytes on loan; freed when its operation let go *and* no transfer uses it."""

    offset: int
    nbytes: int
    transfer_count: int = 0
    released: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer in flight between a server's arena and staging memory, or another arena.

    ``servers`` are those whose arenas it reads or writes; ``extent`` is None without staging.
    """

    op: int
    servers: tuple[ServerIndex, ...]
    extent: Extent | None


class Ledger:
    """Operations of one client, and the transfers that outlive them.

    Parameters
    ----------
    client
        Number of this client in every key.
    staging
        Allocator of its staging memory.
    """

    def __init__(self, client: int, staging: _native.RegionAllocator) -> None:
        self.client = client
        self._staging = staging
        self._next_op = 1
        self._open: dict[int, set[ServerIndex]] = {}
        self._attempts: dict[int, int] = {}
        self._transfers: dict[int, Transfer] = {}

    def open(self) -> int:
        """Begin an operation and return its number."""
        op = self._next_op
        self._next_op += 1
        self._open[op] = set()
        self._attempts[op] = 0
        return op

    def close(self, op: int) -> None:
        """End an operation: it is live nowhere any more, but for its transfers in flight."""
        self._open.pop(op, None)
        self._attempts.pop(op, None)

    def next_attempt(self, op: int) -> int:
        """Return the number of the next sending of an operation, whatever it asks for (P12)."""
        attempt = self._attempts[op]
        self._attempts[op] += 1
        return attempt

    @property
    def newest_op(self) -> int:
        """Number of the operation that was begun last; 0 before the first."""
        return self._next_op - 1

    def is_open(self, op: int) -> bool:
        """Whether an operation is under way."""
        return op in self._open

    def key(self, op: int, server: ServerIndex, attempt: int = 0) -> tuple[int, int, int, int]:
        """Return the key ``(client, op, attempt, low)`` of a request; ``op`` is live there now."""
        if op in self._open:
            self._open[op].add(server)
        return self.client, op, attempt, self.low(server)

    def low(self, server: ServerIndex) -> int:
        """Return the watermark for ``server`` (P3)."""
        live = [op for op, servers in self._open.items() if server in servers]
        live += [t.op for t in self._transfers.values() if server in t.servers]
        return min(live, default=self._next_op)

    # -- staging and transfers -------------------------------------------------------------

    def borrow(self, nbytes: int) -> Extent | None:
        """Take staging bytes, or None where there is no room now."""
        offset = self._staging.allocate(nbytes)
        return None if offset is None else Extent(offset, nbytes)

    def give_back(self, extent: Extent) -> None:
        """Let go of staging bytes; transfers in flight keep them lent."""
        extent.released = True
        self._free_if_idle(extent)

    def start(self, token: int, transfer: Transfer) -> None:
        """Enter a transfer in flight."""
        self._transfers[token] = transfer
        if transfer.extent is not None:
            transfer.extent.transfer_count += 1

    def finish(self, tokens: Iterable[int]) -> None:
        """Take note that these transfers have ended."""
        for token in tokens:
            extent = self._transfers.pop(token).extent
            if extent is not None:
                extent.transfer_count -= 1
                self._free_if_idle(extent)

    def replace_staging(self, staging: _native.RegionAllocator) -> None:
        """Use another staging memory; nothing may be on loan from the old one."""
        assert self._staging.free_bytes == self._staging.capacity_bytes, "staging is in use"
        self._staging = staging

    @property
    def staging_bytes(self) -> int:
        """Size of the staging memory."""
        return self._staging.capacity_bytes

    @property
    def transfer_count(self) -> int:
        """Transfers in flight, of open and of closed operations."""
        return len(self._transfers)

    def _free_if_idle(self, extent: Extent) -> None:
        if extent.released and not extent.transfer_count:
            self._staging.release(extent.offset, whole_pages(extent.nbytes))


_COUNTERS = (
    "local_bytes",
    "rma_bytes",
    "discarded_bytes",
    "stored_local_bytes",
    "stored_sent_bytes",
    "corrupt_count",
)


@dataclass(slots=True)
class ClientContext:
    """Everything a client operation reads besides its arguments.

    Attributes
    ----------
    config
        Settings of the job.
    ledger
        Operations and staging of this client.
    server_count
        Servers of the job, 0-based indices.
    near
        Servers of this client's node, whose arenas are mapped here; never empty.
    counters
        Bytes by path; see `ptstore_mpi.stats`.
    abandoned
        Writes, as (server, op), that ended without an answer and whose owner is yet to be told.
    lent_bytes
        What servers said they have lent to other nodes in all; the newest word last.
    times
        What loads and prefills take; None where nobody wants to know (``replica_share = fixed``).
    """

    config: Config
    ledger: Ledger
    server_count: int
    near: tuple[ServerIndex, ...]
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    abandoned: list[tuple[ServerIndex, int]] = field(default_factory=list)
    lent_bytes: dict[ServerIndex, int] = field(default_factory=dict)
    times: ClientTimes | None = None

    def __post_init__(self) -> None:
        if self.config.replica_share == "adaptive":
            self.times = ClientTimes()

    @property
    def servers(self) -> Iterable[ServerIndex]:
        """All servers."""
        return map(ServerIndex, range(self.server_count))

    def count(self, name: str, amount: int) -> None:
        """Add to a counter."""
        self.counters[name] += amount
