"""Leases on copies of segments: who was promised which bytes, and until when (P10).

Leases are sets by (client, op), never counts: ending one twice changes nothing. The same on an
owner's segments and on a holder's replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

__all__ = ["LeaseKey", "Leased", "Leases", "is_leased"]

LeaseKey = tuple[int, int]
"""(client, op) of the operation that holds a lease (P10)."""


class Leased(Protocol):
    """Something with bytes in an arena that can be leased."""

    nbytes: int
    leases: dict[LeaseKey, float]


C = TypeVar("C", bound=Leased)


class Leases(ABC, Generic[C]):
    """The leases on the copies of one kind in one arena. A cache says what follows from them."""

    def __init__(self) -> None:
        # Dictionaries as ordered sets: the order of releases must not depend on addresses.
        self._leased: dict[LeaseKey, dict[C, None]] = {}

    @abstractmethod
    def hold(self, copy: C) -> None:
        """Keep a copy: a lease on it has begun."""

    @abstractmethod
    def let_go(self, copy: C) -> None:
        """A lease on it has ended, as many times as `hold` was called."""

    @abstractmethod
    def free_if_dead(self, copy: C, now: float) -> None:
        """Free the bytes of a copy that is out of sight and that no lease keeps any more."""

    def lease(self, copy: C, key: LeaseKey, expiry: float) -> None:
        """Promise not to reuse a copy's bytes before ``expiry``; twice: the later one."""
        if key not in copy.leases:
            self.hold(copy)
        copy.leases[key] = max(expiry, copy.leases.get(key, 0.0))
        self._leased.setdefault(key, {})[copy] = None

    def release(self, key: LeaseKey, now: float) -> None:
        """End the leases of one operation; ending them twice changes nothing."""
        for copy in self._leased.pop(key, ()):
            self._end(copy, key, now)

    def release_before(self, client: int, low: float, now: float) -> None:
        """End the leases of every operation of ``client`` below its watermark (P3)."""
        for key in [key for key in self._leased if key[0] == client and key[1] < low]:
            self.release(key, now)

    def expire_leases(self, now: float) -> None:
        """Forget leases whose time has passed, and free what only they held."""
        for key, copies in list(self._leased.items()):
            for copy in [c for c in copies if c.leases[key] <= now]:
                del copies[copy]
                self._end(copy, key, now)
            if not copies:
                del self._leased[key]

    @property
    def lease_holders(self) -> set[int]:
        """Clients that hold a lease."""
        return {client for client, _ in self._leased}

    @property
    def leased_bytes(self) -> int:
        """Bytes of the copies that somebody holds a lease on."""
        held = {copy for copies in self._leased.values() for copy in copies}
        return sum(copy.nbytes for copy in held)

    def forget_leases(self, copy: C) -> None:
        """A copy's bytes are freed: nobody holds a lease on it any more."""
        for key in copy.leases:
            self._leased.get(key, {}).pop(copy, None)

    def _end(self, copy: C, key: LeaseKey, now: float) -> None:
        if copy.leases.pop(key, None) is not None:
            self.let_go(copy)
        self.free_if_dead(copy, now)


def is_leased(copy: Leased, now: float) -> bool:
    """Tell whether any lease on a copy is still valid."""
    return any(expiry > now for expiry in copy.leases.values())
