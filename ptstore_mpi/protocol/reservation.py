"""What an owner remembers of the writes of its clients (P2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.protocol.messages import PublishRequest, WriteStatus

__all__ = ["Reservation", "Reservations"]


@dataclass(slots=True, eq=False)
class Reservation:
    """One write of one client, remembered until the client's watermark passes it (P2)."""

    client: int
    op: int
    status: WriteStatus
    expiry_s: float
    segments: list[Segment] = field(default_factory=list)
    linked: bool = True
    mapped: bool = True
    complete: bool = False
    receives_open: bool = False
    freeing: bool = False
    publish: PublishRequest | None = None

    @property
    def is_live(self) -> bool:
        """Whether it may still be published."""
        return self.status == "reserved"

    @property
    def holds_region(self) -> bool:
        """Whether bytes of the arena are kept for a write that is not published."""
        return bool(self.segments) and self.status != "published"


class Reservations:
    """All that one owner remembers, by client and operation."""

    def __init__(self) -> None:
        self._by_client: dict[int, dict[int, Reservation]] = {}

    def __iter__(self) -> Iterator[Reservation]:
        """Iterate over a copy: what is iterated over may be forgotten meanwhile."""
        return iter([known for ops in self._by_client.values() for known in ops.values()])

    def find(self, client: int, op: int) -> Reservation | None:
        """Return what is known of one write."""
        return self._by_client.get(client, {}).get(op)

    def add(self, known: Reservation) -> None:
        """Remember a write."""
        self._by_client.setdefault(known.client, {})[known.op] = known

    def forget(self, known: Reservation) -> None:
        """Forget a write."""
        del self._by_client[known.client][known.op]

    def below(self, client: int, low: float) -> list[Reservation]:
        """Return the writes of a client that its watermark has passed (P3)."""
        return [known for op, known in self._by_client.get(client, {}).items() if op < low]

    def of_segment(self, segment: Segment) -> Reservation | None:
        """Return the write that a segment belongs to."""
        return next((known for known in self if segment in known.segments), None)

    def at(self, client: int, offset: int) -> Reservation | None:
        """Return the write of a client that was given the region at ``offset``."""
        writes = self._by_client.get(client, {}).values()
        return next((k for k in writes if any(s.offset == offset for s in k.segments)), None)

    def regions_of(self, client: int) -> list[list[Segment]]:
        """Return the regions that a client holds and has not published (P2)."""
        writes = self._by_client.get(client, {}).values()
        return [known.segments for known in writes if known.holds_region]

    @property
    def live_count(self) -> int:
        """Writes that may still be published."""
        return sum(known.is_live for known in self)
