"""The first half of a load: who lends which segment, and what is to be kept on this node.

::

    1  this node's servers   own segments; wishes for replicas of all others     (one message each)
    2  owners                what is not here: leased, or a redirect to a holder
    3  holders               leased from a complete replica, or not here         (P18)
    4  owners again          what 3 did not find; they serve now, and forget the hint

Steps without work cost nothing: with no wishes, 1 and 2 are one. What another client of the node
is fetching already is left to it: `lease_waiting` asks once more, after everything else (P17).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ptstore_mpi.protocol.call import Called, call
from ptstore_mpi.protocol.context import ClientContext
from ptstore_mpi.protocol.effects import Now, Operation
from ptstore_mpi.protocol.messages import (
    AcquireReply,
    AcquireRequest,
    AwaitReply,
    AwaitRequest,
    Grant,
    ReplicaPlace,
    ReplicaWish,
)
from ptstore_mpi.protocol.placement import keeper_of
from ptstore_mpi.protocol.plan import Part
from ptstore_mpi.types import ServerIndex

__all__ = ["Leasing"]

WAIT_SHARE = 0.5
"""Share of what is left of its deadline that a load waits for another's fill (P17)."""

_TOLD_COUNT = 64  # servers of which a client tells an owner what they have lent
_Parts = dict[ServerIndex, list[Part]]


@dataclass(slots=True, eq=False)
class Leasing:
    """Leases of one load.

    Attributes
    ----------
    context, op, until
        Of the load.
    namespace, tensor_bytes
        Of all its segments.
    waiting
        Parts that another client of this node is fetching, by who keeps them.
    servers
        Who has answered, and so may hold leases of this operation.
    late
        Whether a server did not answer in time.
    """

    context: ClientContext
    op: int
    until: float
    namespace: bytes
    tensor_bytes: tuple[int, ...]
    waiting: _Parts = field(default_factory=dict)
    servers: set[ServerIndex] = field(default_factory=set)
    late: bool = False

    def lease(self, parts: list[Part]) -> Operation[None]:
        """Lease as much as there is; what is granted, or waits, says so itself."""
        near = self.context.near
        own = _by_server((p for p in parts if p.owner in near), lambda part: part.owner)
        far = [part for part in parts if part.owner not in near]
        wishes: _Parts = {}
        if self._keeps:
            whole = (part for part in far if not part.first_block)
            wishes = _by_server(whole, lambda part: keeper_of(part.ref.segment, near))
        first = {server: self._own_request(server, own, wishes) for server in {**own, **wishes}}
        if not wishes:
            first |= self._owner_requests(far)
        called = yield from self._call(first, self.until)
        self.late |= not own.keys() <= called.keys()
        for server, answer in called.items():
            if isinstance(answer.reply, AcquireReply):
                places = answer.reply.places
                self._take_places(server, wishes.get(server, []), answer, places)
                self._take(own.get(server, []), answer)
        if wishes:
            far = [part for part in far if not (part.is_granted or part.is_awaited)]
            called = yield from self._call(self._owner_requests(far), self.until)
        yield from self._take_from_owners(far, called)

    def cut(self, parts: list[Part]) -> list[Part]:
        """Return the prefix that is leased or comes; what lies behind is not waited for."""
        prefix = list(itertools.takewhile(lambda p: p.is_granted or p.is_awaited, parts))
        for part in parts[len(prefix) :]:
            part.is_awaited = False
        still = ((k, [p for p in waiting if p.is_awaited]) for k, waiting in self.waiting.items())
        self.waiting = {keeper: waiting for keeper, waiting in still if waiting}
        return prefix

    def lease_waiting(self) -> Operation[list[Part]]:
        """Lease what others have fetched meanwhile, the rest at its owners; return all of it."""
        if not self.waiting:
            return []
        now = yield Now()
        requests = {
            keeper: AwaitRequest(
                *self.context.ledger.key(self.op, keeper),
                tuple(part.ref for part in parts),
                remaining_s=0.0,  # set at each sending
                checksums=self._verifies_own,
            )
            for keeper, parts in self.waiting.items()
        }
        called = yield from self._call(requests, now + WAIT_SHARE * max(self.until - now, 0.0))
        waited, self.waiting = self.waiting, {}
        for keeper, answer in called.items():
            if isinstance(answer.reply, AwaitReply):
                self._take_places(keeper, waited[keeper], answer, answer.reply.places)
        parts = [part for of_keeper in waited.values() for part in of_keeper]
        left = [part for part in parts if not part.is_granted]
        called = yield from self._call(self._owner_requests(left, again=True), self.until)
        yield from self._take_from_owners(left, called)
        return sorted(parts, key=lambda part: part.view_block)

    # -- requests ----------------------------------------------------------------------------

    @property
    def _keeps(self) -> bool:
        config = self.context.config
        return config.replica_admission != "never" and config.replica_max_share > 0

    @property
    def _verifies_own(self) -> bool:
        return self.context.config.verify == "always"

    @property
    def _verifies_far(self) -> bool:
        return self.context.config.verify != "off"

    def _own_request(self, server: ServerIndex, own: _Parts, wishes: _Parts) -> AcquireRequest:
        wish = None
        if server in wishes:
            refs = tuple(part.ref for part in wishes[server])
            wish = ReplicaWish(refs, self.namespace, self.tensor_bytes, may_fill=True)
        return AcquireRequest(
            *self.context.ledger.key(self.op, server),
            tuple(part.ref for part in own.get(server, [])),
            remaining_s=0.0,  # set at each sending
            checksums=self._verifies_own,
            wish=wish,
        )

    def _owner_requests(
        self, parts: Iterable[Part], *, again: bool = False
    ) -> dict[ServerIndex, AcquireRequest]:
        """Ask the owners; ``again`` they must serve, and forget who was named in vain (P18)."""
        requests: dict[ServerIndex, AcquireRequest] = {}
        for owner, asked in _by_server(parts, lambda part: part.owner).items():
            stale = tuple(-1 if part.server == part.owner else part.server for part in asked)
            keepers = tuple(-1 if part.slot is None else part.slot[0] for part in asked)
            requests[owner] = AcquireRequest(
                *self.context.ledger.key(self.op, owner),
                tuple(part.ref for part in asked),
                remaining_s=0.0,
                checksums=self._verifies_far,
                keepers=keepers if max(keepers) >= 0 else (),
                may_redirect=not again and self.context.config.redirect_bytes > 0,
                stale=stale if max(stale) >= 0 else (),
                lent=tuple(self.context.lent_bytes.items())[-_TOLD_COUNT:],
            )
        return requests

    def _call(
        self, requests: Mapping[ServerIndex, AcquireRequest | AwaitRequest], until: float
    ) -> Operation[dict[ServerIndex, Called]]:
        if not requests:
            return {}
        called = yield from call(self.context, requests, until)
        self.servers.update(called)
        heard = self.context.lent_bytes
        for server, answer in called.items():
            if isinstance(answer.reply, AcquireReply):
                heard.pop(server, None)
                heard[server] = answer.reply.lent_bytes
        return called

    # -- answers -----------------------------------------------------------------------------

    def _take(self, asked: list[Part], answer: Called) -> list[Part]:
        """Enter what an owner granted; return the parts it sends elsewhere, holder entered."""
        reply = answer.reply
        assert isinstance(reply, AcquireReply)
        elsewhere = dict(reply.redirects)
        redirected: list[Part] = []
        for place, (part, grant) in enumerate(zip(asked, reply.grants, strict=False)):
            if place in elsewhere and elsewhere[place] < self.context.server_count:
                part.server = ServerIndex(elsewhere[place])
                redirected.append(part)
            else:
                part.server = part.owner
                _enter(part, grant, answer, reply.granted_s)
        return redirected

    def _take_places(
        self,
        server: ServerIndex,
        wished: list[Part],
        answer: Called,
        places: tuple[ReplicaPlace, ...],
    ) -> None:
        reply = answer.reply
        assert isinstance(reply, AcquireReply | AwaitReply)
        for part, place in zip(wished, places, strict=False):
            if place.status == "here":
                part.server = server
                part.slot = part.slot if server not in self.context.near else None
                _enter(part, place.grant, answer, reply.granted_s)
            elif place.status == "fill":
                part.slot = (server, place.grant.offset)
            elif place.status == "wait":
                part.is_awaited = True
                self.waiting.setdefault(server, []).append(part)

    def _take_from_owners(
        self, asked: list[Part], called: dict[ServerIndex, Called]
    ) -> Operation[None]:
        """Enter what owners granted, and follow their redirects: each part once (P18)."""
        redirected: list[Part] = []
        for owner, parts in _by_server(asked, lambda part: part.owner).items():
            if owner in called and isinstance(called[owner].reply, AcquireReply):
                redirected += self._take(parts, called[owner])
            else:
                self.late = True
        if not redirected:
            return
        holders = _by_server(redirected, lambda part: part.server)
        requests = {
            holder: AcquireRequest(
                *self.context.ledger.key(self.op, holder),
                (),
                remaining_s=0.0,
                checksums=self._verifies_far,
                wish=ReplicaWish(
                    tuple(part.ref for part in parts),
                    self.namespace,
                    self.tensor_bytes,
                    may_fill=False,
                ),
            )
            for holder, parts in holders.items()
        }
        now = yield Now()
        called = yield from self._call(requests, now + WAIT_SHARE * max(self.until - now, 0.0))
        for holder, answer in called.items():
            if isinstance(answer.reply, AcquireReply):
                self._take_places(holder, holders[holder], answer, answer.reply.places)
        left = [part for part in redirected if not part.is_granted]
        called = yield from self._call(self._owner_requests(left, again=True), self.until)
        for owner, parts in _by_server(left, lambda part: part.owner).items():
            if owner in called:
                self._take(parts, called[owner])
            else:
                self.late = True


def _enter(part: Part, grant: Grant, answer: Called, granted_s: float) -> None:
    part.grant, part.sent_s, part.granted_s = grant, answer.sent_s, granted_s


def _by_server(parts: Iterable[Part], key: Callable[[Part], ServerIndex]) -> _Parts:
    grouped: _Parts = {}
    for part in parts:
        grouped.setdefault(key(part), []).append(part)
    return grouped
