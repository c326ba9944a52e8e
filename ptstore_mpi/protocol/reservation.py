"""What an owner remembers of one write (P2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.protocol.messages import PublishRequest, WriteStatus

__all__ = ["Reservation"]


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
    def holds_region(self) -> bool:
        """Whether bytes of the arena are kept for a write that is not published."""
        return bool(self.segments) and self.status != "published"
