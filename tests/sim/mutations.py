"""Rules of the protocol, taken away one at a time: what the checkers must catch.

A mutation replaces text in the source of a function and puts the result in the function's place,
for the time of a ``with`` block. Nothing of this exists outside the tests.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ptstore_mpi.protocol.call as call
import ptstore_mpi.protocol.load as load
import ptstore_mpi.protocol.plan as plan
import ptstore_mpi.protocol.store as store
from ptstore_mpi.cache import owned
from ptstore_mpi.cache.leases import Leases
from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.replicas import Replica, ReplicaCache
from ptstore_mpi.protocol.context import Ledger
from ptstore_mpi.protocol.demotion import Demotion
from ptstore_mpi.protocol.fan_out import FanOut
from ptstore_mpi.protocol.handler import ServerHandler
from ptstore_mpi.protocol.peer_link import PeerLink
from ptstore_mpi.protocol.plan import Fetch
from ptstore_mpi.protocol.promotion import Promotion
from ptstore_mpi.protocol.reads import ReadPath
from ptstore_mpi.protocol.removal import Removal
from ptstore_mpi.protocol.replicas import ReplicaPath
from ptstore_mpi.protocol.writes import WritePath
from ptstore_mpi.sim.workloads import WORKLOADS
from ptstore_mpi.tiers.room import SlabRoom
from ptstore_mpi.tiers.transfers import ReadSlot

__all__ = ["MUTATIONS", "Mutation"]


@dataclass(frozen=True)
class Mutation:
    """One rule less.

    Attributes
    ----------
    name
        What is missing.
    rule
        Which rule, and which counterexample (CE) where there is one.
    changes
        Function, old text, new text; the old text stands in the function exactly once.
    workloads
        Where it shows; default: anywhere.
    """

    name: str
    rule: str
    changes: tuple[tuple[Callable[..., Any], str, str], ...]
    workloads: tuple[str, ...] = tuple(WORKLOADS)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Run the body of the ``with`` without this rule."""
        right = {function: function.__code__ for function, _, _ in self.changes}
        try:
            for function in right:
                function.__code__ = self._changed(function)
            yield
        finally:
            for function, code in right.items():
                function.__code__ = code

    def _changed(self, function: Callable[..., Any]) -> Any:
        source = textwrap.dedent(inspect.getsource(function))
        for where, old, new in self.changes:
            if where is function:
                assert source.count(old) == 1, f"{self.name}: {source.count(old)} times {old!r}"
                source = source.replace(old, new)
        scope: dict[str, Any] = {}
        header = "from __future__ import annotations\n"
        exec(compile(header + source, self.name, "exec"), function.__globals__, scope)
        return scope[function.__name__].__code__


def _in_hot(name: str, rule: str, *changes: tuple[Callable[..., Any], str, str]) -> Mutation:
    return Mutation(name, rule, changes, ("hot",))


def _one(name: str, rule: str, function: Callable[..., Any], old: str, new: str) -> Mutation:
    return Mutation(name, rule, ((function, old, new),))


_TOLERANT_EXPIRY = (
    (Leases.expire_leases, "c.leases[key] <= now", "c.leases.get(key, 0.0) <= now"),
)

MUTATIONS: tuple[Mutation, ...] = (
    # -- P1 to P4: keys and content ------------------------------------------------------------
    _one(
        "a repeated reserve reserves again",
        "P2, CE 4",
        WritePath.reserve,
        "known = self.reservations.find(request.client, request.op)",
        "known = None",
    ),
    _one(
        "a request below the watermark is handled",
        "P3",
        ServerHandler._handle,
        "if request.op < self._low[client]:",
        "if False:",
    ),
    _one(
        "low passes writes and Gets in flight",
        "P3, CE 17",
        Ledger.low,
        "live += [t.op for t in self._transfers.values() if server in t.servers]",
        "pass",
    ),
    _one(
        "the watermark frees nothing",
        "P3",
        WritePath.raise_low,
        "self._free(known)\n",
        "pass\n",
    ),
    _one(
        "a client may hold any number of regions",
        "P2",
        WritePath._reserve_anew,
        ">= self._unconfirmed_count",
        "< 0",
    ),
    _one(
        "an id is enough",
        "P4, CE 15",
        OwnedCache.find,
        "if segment.block_hash(ref.block_count - 1) == ref.last_hash else None",
        "",
    ),
    # -- P5 to P9: writing ---------------------------------------------------------------------
    _one(
        "published before the bytes are complete",
        "P5",
        WritePath._advance,
        "(known.complete and known.linked)",
        "known.linked",
    ),
    _one(
        "what was sent is not verified",
        "P5",
        WritePath._verified,
        'if self._verify == "off" or',
        "if True or",
    ),
    _one(
        "a reservation is reused by time",
        "P6",
        WritePath.expire,
        'yield from self._end(known, "expired", now)',
        'yield from self._end(known, "expired", now); self._free(known)',
    ),
    _one(
        "an abandoned region is reused at once",
        "P6",
        WritePath.abandon,
        'yield from self._end(known, "abandoned", now)',
        'yield from self._end(known, "abandoned", now); self._free(known)',
    ),
    Mutation(
        "a late abandon frees what is published",
        "P6, CE 16",
        (
            (
                ServerHandler._handle,
                "yield from self._raise_low(client, request.low, now)",
                "if not isinstance(request, AbandonRequest):\n"
                "        yield from self._raise_low(client, request.low, now)",
            ),
            (
                ServerHandler._handle,
                "if request.op < self._low[client]:",
                "if request.op < self._low.get(client, 0):",
            ),
            (
                WritePath.abandon,
                "if known is not None and known.is_live:\n        yield from",
                'if known is not None and known.status == "published":\n'
                "        for segment in known.segments:\n"
                "            self._cache.retire(segment, now)\n"
                "    elif known is not None and known.is_live:\n        yield from",
            ),
        ),
    ),
    _one(
        "published before the link is there",
        "P7, CE 3",
        WritePath._advance,
        "(known.complete and known.linked)",
        "known.complete",
    ),
    _one(
        "the parent on the same server is not linked",
        "P7",
        WritePath._reserve_anew,
        "self._cache.link(own_parent, segments[0].serial, segments[0].id)",
        "pass",
    ),
    _one(
        "links are counted",
        "P7, CE 18",
        WritePath.handle_peer,
        "if segment is not None:\n                self._cache.unlink(segment, serial)",
        "if segment is not None and segment.links:\n                segment.links.popitem()",
    ),
    Mutation(
        "the channel between servers doubles and reorders",
        "P7, CE 18",
        (
            (
                PeerLink.receive,
                "if frame.number <= self._received_count or frame.number in self._early:",
                "if False:",
            ),
            (
                PeerLink.receive,
                "while (message := self._early.pop(self._received_count + 1, None)) is not None:",
                "self._early.clear()\n    for message in (frame.message,):",
            ),
        ),
    ),
    _one(
        "a link is not undone",
        "P7",
        Removal.unlink,
        "self._cache.unlink(own, segment.serial)",
        "pass",
    ),
    _one(
        "removing one copy hides the other",
        "P8, CE 11",
        OwnedCache.retire,
        'assert removed == segment.block_count, "a published segment was not wholly indexed"',
        "for other in self.slots:\n        self._index.remove(segment.hashes, other.id)",
    ),
    _one(
        "a record mixes two paths",
        "P8",
        WritePath._link_result,
        "elif not self._cache.rebase(known.segments, path):",
        "elif False:",
    ),
    _one(
        "the same increment is published twice",
        "P8",
        WritePath._advance,
        "if self._cache.is_published(known.segments[-1].block_hash(-1)):",
        "if False:",
    ),
    # -- P10 to P13: reading -------------------------------------------------------------------
    Mutation(
        "leases are counted",
        "P10, CE 13",
        (
            (Leases.release, "self._leased.pop(key, ())", "tuple(self._leased.get(key, ()))"),
            (
                Leases._end,
                "copy.leases.pop(key, None) is not None",
                "copy.leases and copy.leases.popitem()",
            ),
            *_TOLERANT_EXPIRY,
        ),
    ),
    _one(
        "an owner forgets a lease before the time it granted",
        "P11",
        ReadPath.grant,
        "now + granted_s",
        "now + granted_s / 2",
    ),
    _one(
        "leases are ignored",
        "P10",
        OwnedCache.free_if_dead,
        "and not segment.is_leased(now)",
        "",
    ),
    Mutation(
        "one release ends all leases",
        "P10",
        (
            (
                Leases._end,
                "if copy.leases.pop(key, None) is not None:",
                "while copy.leases:\n        copy.leases.popitem()",
            ),
            *_TOLERANT_EXPIRY,
        ),
    ),
    _one(
        "the lease counts from the last attempt",
        "P12, CE 12",
        call.call,
        "Called(reply, sent_s[server, reply.attempt])",
        "Called(reply, max(at for (to, _), at in sent_s.items() if to == server))",
    ),
    _one(
        "the clock is not looked at",
        "P12",
        load._is_in_time,
        "now - part.sent_s < (1 - LEASE_MARGIN) * part.granted_s",
        "True",
    ),
    Mutation(
        "the clock is looked at before the copy",
        "P12, CE 1",
        (
            (
                load._copy_out,
                "    found: Checksums = yield Unpack(",
                "    in_time = yield from _is_in_time(part)\n    found: Checksums = yield Unpack(",
            ),
            (load._copy_out, "if not (yield from _is_in_time(part)):", "if not in_time:"),
        ),
    ),
    Mutation(
        "staging is reused under a Get",
        "P13",
        (
            (
                Ledger.give_back,
                "self._free_if_idle(extent)",
                "self._staging.release(extent.offset, whole_pages(extent.nbytes))",
            ),
            (Ledger.finish, "self._free_if_idle(extent)", "pass"),
        ),
    ),
    # -- P14: file tiers -----------------------------------------------------------------------
    Mutation(
        "a promotion eats the lease",
        "P11, CE 8",
        (
            (Promotion._keep, "self._cache.lease(segment, key, until)", "pass"),
            (
                Promotion.read_ended,
                "pending.segments, pending.fetched, now",
                "pending.segments, pending.fetched, pending.until - pending.request.remaining_s",
            ),
        ),
    ),
    _one(
        "what cannot be read stays",
        "P15, CE 9",
        Promotion.read_ended,
        "yield from self._removal.lose(segment, now)",
        "self._cache.free_memory(segment)",
    ),
    _one(
        "leases are looked at only when a write begins",
        "P14, CE 14",
        Demotion.write_ended,
        "self._cache.let_slot_go(segment)",
        "self._cache.let_slot_go(segment)\n    else:\n        self._free(segment)",
    ),
    Mutation(
        "memory is freed before its write has ended",
        "P14",
        (
            (Demotion._begin, 'segment.move = "write"', "pass"),
            (Demotion._begin, "self._cache.hold(segment)", "pass"),
            (Demotion.write_ended, "self._cache.let_go(segment)", "pass"),
        ),
    ),
    _one(
        "a promotion waits for room and holds leases",
        "P14, CE 22",
        Promotion.acquire,
        "if waiting:",
        "if len(prefix) < len(segments):\n"
        "        needed = {segments[len(prefix)]}\n"
        "        self._pending[key] = _Pending(request, segments, set(), needed, until)\n"
        "    elif waiting:",
    ),
    Mutation(
        "a slot is freed with I/O on it",
        "P14",
        (
            (
                SlabRoom.release,
                "self.free_if_idle(slot)",
                "slot.slab.slots.remove(slot)\n"
                "    slot.slab.allocator.release(slot.place.offset, slot.nbytes)\n"
                "    self.reserved_bytes -= slot.nbytes",
            ),
            (SlabRoom.free_if_idle, "if slot.is_released and not slot.is_busy:", "if False:"),
        ),
    ),
    _one(
        "a slot outlives its segment",
        "P14",
        OwnedCache.retire,
        "self.let_slot_go(segment)",
        "pass",
    ),
    _one(
        "what is read back is not verified",
        "P14",
        ReadSlot._do,
        "if _checksums(slot, self.memory) != slot.checksums:",
        "if False:",
    ),
    # -- P15: evicting, dropping and losing ----------------------------------------------------
    Mutation(
        "a segment is evicted under a lease",
        "P10, P15",
        (
            (Leases.lease, "self.hold(copy)", "pass"),
            (Leases._end, "self.let_go(copy)", "pass"),
        ),
    ),
    Mutation(
        "a segment is evicted before its child on another server",
        "P7, P15",
        (
            (OwnedCache.link, "self._eviction.hold(parent)", "pass"),
            (OwnedCache.unlink, "self._eviction.let_go(parent)", "pass"),
            (OwnedCache.publish, "self._eviction.let_go(parent)", "pass"),
        ),
    ),
    Mutation(
        "a parent is evicted to make room for its child",
        "P7, P15",
        (
            (WritePath._reserve_anew, "self._cache.hold(own_parent)", "pass"),
            (WritePath._reserve_anew, "self._cache.let_go(own_parent)", "pass"),
        ),
    ),
    Mutation(
        "a parent is dropped before its child",
        "P15",
        (
            (ServerHandler._remove, "and whole and not segment.links", "and whole"),
            (
                ServerHandler._remove,
                "removed_count = yield from self.removal.remove(segment, now)",
                "removed_count = 1; self.cache.retire(segment, now)",
            ),
        ),
    ),
    _one(
        "what hangs on a lost segment stays",
        "P15",
        Removal.remove,
        "for serial, child in list(segment.links.items()):",
        "for serial, child in ():",
    ),
    _one(
        "children on other servers stay",
        "P15",
        Removal.remove,
        "yield ToPeer(segment_owner(child), Prune(serial, child))",
        "pass",
    ),
    _one(
        "a prune goes by id alone",
        "P15, CE 15",
        Removal.prune,
        "if segment is not None and segment.serial == serial:",
        "if segment is not None:",
    ),
    _one(
        "a clear lets reservations live",
        "P15",
        WritePath.clear,
        'yield from self._end(known, "gone", now)',
        "pass",
    ),
    _one(
        "an owner believes that its segment is lost",
        "P15",
        ReadPath.check_lost,
        "if not self._is_intact(segment, segment.checksums):",
        "if True:",
    ),
    _one(
        "what a load could not verify is built upon",
        "P8",
        store.store,
        "base = min(found.block_count, verified_blocks)",
        "base = found.block_count",
    ),
    Mutation(
        "a server full of parents asks nobody",
        "P16, CE 10",
        ((WritePath._find_room, "yield from self.trimming.ask(now)", "pass"),),
        ("overfull",),
    ),
    # -- P17 and P18: replicas ------------------------------------------------------------------
    _one(
        "a fill that stalls is never given up",
        "P17, CE 5",
        ReplicaPath.expire,
        "yield from self._give_up(replica, now)",
        "yield from ()",
    ),
    _in_hot(
        "a load waits for others before it fetches its own",
        "P17, CE 6",
        (
            load.load,
            "        yield from _fetch(state, [part for part in wanted if part.is_granted])\n"
            "        yield from _fetch(state, (yield from leasing.lease_waiting()))\n",
            "        waited = yield from leasing.lease_waiting()\n"
            "        yield from _fetch(state, [part for part in wanted if part.is_granted])\n",
        ),
    ),
    _one(
        "who waits is not leased in the step that publishes",
        "P17, CE 7",
        ReplicaPath.filled,
        "self.replicas.lease(replica, waiter, now + lease_s)",
        "pass",
    ),
    _one(
        "a filler publishes what it did not trust",
        "P17, CE 21",
        load._land,
        "[part for part in fetch.parts if part.trusted]",
        "fetch.parts",
    ),
    Mutation(
        "a given-up slot is reused by time",
        "P3, P17",
        (
            (
                ReplicaPath.expire,
                "yield from self._give_up(replica, now)",
                "yield from self._give_up(replica, now)\n        self.replicas.free_slot(replica)",
            ),
        ),
    ),
    _one(
        "low passes Gets that fill a slot",
        "P3, P17",
        load._start_gets,
        "touched = (server,) if into is None else (server, into)",
        "touched = (server,)",
    ),
    Mutation(
        "a holder answers while it fills",
        "P18, CE 20",
        (
            (
                ReplicaCache.find,
                "self._complete.get(ref.segment)",
                "self._complete.get(ref.segment) or self._filling.get(ref.segment)",
            ),
            (
                ReplicaCache.find,
                "replica is not None and replica.holds(ref)",
                "replica is not None and replica.block_count >= ref.block_count",
            ),
            (ReplicaCache.use, "self._policy.hit(replica.serial, now)", "pass"),
        ),
    ),
    _in_hot(
        "a holder goes by id alone",
        "P4, P18, CE 20",
        (
            Replica.holds,
            "and bytes(self.hashes[ref.block_count - 1]) == ref.last_hash",
            "",
        ),
    ),
    _one(
        "a replica is not leased",
        "P10, P18, CE 20",
        ReplicaPath._here,
        "self.replicas.lease(replica, key, expiry_s)",
        "pass",
    ),
    _in_hot(
        "an owner redirects who has come back",
        "P18, CE 19",
        (
            FanOut.choose,
            "not self._busy_bytes or not request.may_redirect or not segments",
            "not self._busy_bytes or not segments",
        ),
    ),
    _in_hot(
        "replicas pass their limit",
        "invariant 7",
        (
            ReplicaCache.reserve,
            "if self.used_bytes + nbytes + metadata_bytes > self.most_bytes:",
            "if False:",
        ),
        (
            ReplicaPath._make_room,
            "replicas.used_bytes + wanted > replicas.most_bytes or not room.fits(",
            "not room.fits(",
        ),
    ),
    _one(
        "an operation that has ended goes on reading",
        "invariant 7",
        FanOut._forget,
        "self._under_way.subtract(reader.nbytes)",
        "pass",
    ),
    # -- what a review found that no checker saw -----------------------------------------------
    _one(
        "a store follows a match that lacks an answer",
        "P9",
        store.store,
        'if found.partial:\n            return Stored(0, "partial")',
        "",
    ),
    _one(
        "a store says stored whatever became of it",
        "invariant 3",
        store._store_at,
        'stored = answer.reply.status == "published"',
        'stored = answer.reply.status != "full"',
    ),
    _one(
        "the last block is never kept",
        "invariant 3",
        store.store,
        "if base >= len(increment.hashes):",
        "if base >= len(increment.hashes) - 1:",
    ),
    _one(
        "own and other nodes are exchanged",
        "invariant 6",
        load._source,
        'return "owned" if part.server == part.owner else "replica"',
        'return "remote"',
    ),
    _one(
        "no byte of a load counts as used",
        "invariant 6",
        load._result,
        "state.used_rma_bytes = crossed * state.block_bytes",
        "state.used_rma_bytes = 0",
    ),
    _one(
        "checksums are compared from the first block on",
        "liveness",
        load._copy_out,
        "first, end = 4 * part.first_block, 4 * (part.first_block + part.block_count)",
        "first, end = 0, 4 * part.block_count",
    ),
    _one(
        "an owner verifies all segments with the first one's checksums",
        "liveness",
        WritePath._verified,
        "start = end",
        "pass",
    ),
    _one(
        "every segment is gone",
        "liveness",
        ReadPath.acquire,
        "if segment is None:",
        "if True:",
    ),
    _one(
        "low is infinite",
        "liveness",
        Ledger.key,
        "self._open[op].add(server)",
        "pass",
    ),
    _one(
        "servers owe each other no word",
        "P7",
        PeerLink.receive,
        "self._owes_word = True",
        "self._owes_word = False",
    ),
    _one(
        "a lease is as long as asked for",
        "P11",
        ReadPath.grant,
        "granted_s = min(request.remaining_s, self._lease_cap_s)",
        "granted_s = request.remaining_s",
    ),
    _one(
        "reservations never expire",
        "P6",
        WritePath.expire,
        "if known.is_live and known.expiry_s <= now:",
        "if False:",
    ),
    _one(
        "a repeated clear clears again",
        "P2",
        ServerHandler._remove,
        "if key not in self._removed_counts:",
        "if True:",
    ),
    _one(
        "part of a segment names all of it",
        "P15",
        ServerHandler._remove,
        "and whole and not segment.links",
        "and not segment.links",
    ),
    _one(
        "a bad segment stays",
        "P15",
        ReadPath.check_lost,
        "if segment is None or not segment.checksums:",
        "if True:",
    ),
    _one(
        "a clear takes the first segment only",
        "P15",
        Removal.remove_namespace,
        "for segment in self._cache.published(namespace):",
        "for segment in self._cache.published(namespace)[:1]:",
    ),
    _one(
        "what is inherited is not charged",
        "invariant 7",
        owned._needs,
        "metadata[0] = metadata_bytes_of(block_counts[0], len(record.refs))",
        "pass",
    ),
    _one(
        "finished writes are remembered for ever",
        "P2",
        WritePath.raise_low,
        "if not known.holds_region:\n            self.reservations.forget(known)",
        "if not known.holds_region:\n            pass",
    ),
    _one(
        "all segments of a fetch are read from its first",
        "invariant 1",
        Fetch.images,
        "offset += ",
        "offset += 0 * ",
    ),
    _one(
        "the parts of a long Get land on each other",
        "invariant 1",
        plan._pieces,
        "start + done",
        "start",
    ),
)
