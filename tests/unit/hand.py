"""One server moved by hand: requests as a client would send them, actions as they come back.

`Hand` makes the requests of clients that may be late, double, or gone; time is a number.
"""

from __future__ import annotations

import itertools

import numpy as np

from ptstore_mpi import _native
from ptstore_mpi.cache.admission import make_admission
from ptstore_mpi.cache.eviction import Eviction
from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.policies.factory import make_policy
from ptstore_mpi.cache.replicas import ReplicaCache
from ptstore_mpi.cache.room import Room
from ptstore_mpi.cache.segment import SegmentState
from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol.actions import Answer, CancelReceives, PostReceives, SendFrame, ToPeer
from ptstore_mpi.protocol.handler import ServerHandler
from ptstore_mpi.protocol.peer_link import PeerLink
from ptstore_mpi.types import SegmentRef

NAMESPACE = b"n" * 16
TENSOR_BYTES = (1024, 1024)  # a block is half a page, a segment of two blocks a page
SLOT_BYTES = 4096 + 1024 + 2 * 80


def hashes_of(*blocks, root=NAMESPACE):
    """Return the chained hashes, uint8 (n, 16), of blocks named by integers."""
    return _native.hash_blocks(
        np.array(blocks, dtype=np.uint32), block_tokens=1, root=root, seed=b"s" * 16
    )


class Hand:
    """A server, and the messages that its clients could send.

    ``bad`` holds the offsets of segments whose bytes shall fail their checksums. ``below`` makes
    what the cache needs for a file tier, given the size of the arena.
    """

    tensor_bytes = TENSOR_BYTES
    slot_bytes = SLOT_BYTES

    def __init__(self, *, slots=8, server=0, now=100.0, **options):
        capacity = -(-slots * self.slot_bytes // 4096) * 4096
        self.bad = set()
        options.setdefault("peer_resend_s", 1e9)
        room = Room(capacity)
        policy = options.pop("eviction", None)
        below = options.pop("below", lambda capacity: {})(capacity)
        below.setdefault("eviction", Eviction(make_policy(policy, capacity)) if policy else None)
        self.cache = OwnedCache(server, room, generation_bits=options.pop("bits", 0), **below)
        self.replicas = ReplicaCache(
            room,
            make_policy("lru", capacity),
            least_bytes=options.pop("least_bytes", 0),
            most_bytes=options.pop("most_bytes", capacity),
        )
        admission = make_admission(options.pop("admission", "always"))
        balance_of = options.pop("balance_of", None)
        self.handler = ServerHandler(
            self.cache,
            self.replicas,
            admission=admission,
            balance=balance_of(self.replicas) if balance_of else None,
            is_intact=lambda segment, _: segment.offset not in self.bad,
            **options,
        )
        self.now = now
        self._ops = itertools.count(1)
        self._links = {}

    # -- requests ----------------------------------------------------------------------------

    def op(self):
        """Return the next number of an operation."""
        return next(self._ops)

    def send(self, kind, *args, op, client=7, attempt=0, low=None):
        """Let the server handle a request; ``low`` defaults to ``op``."""
        key = (client, op, attempt, op if low is None else low)
        return self.handler.handle(kind(*key, *args), self.now)

    def reserve(self, blocks, *, ancestors=(), mapped=True, remaining_s=30.0, own=None, **key):
        """Reserve for a prompt of ``blocks``, of which the last ``own`` (default all) are new."""
        hashes = hashes_of(*blocks)
        own = len(blocks) - sum(ref.block_count for ref in ancestors) if own is None else own
        counts = (2,) * (own // 2) + ((1,) if own % 2 else ())
        return self.send(
            m.ReserveRequest,
            NAMESPACE,
            tuple(ancestors),
            hashes[len(blocks) - own :].tobytes(),
            counts,
            self.tensor_bytes,
            remaining_s,
            mapped,
            **key,
        )

    def publish(self, *, checksums=b"", **key):
        """Publish."""
        return self.send(m.PublishRequest, checksums, **key)

    def abandon(self, **key):
        """Abandon."""
        return self.send(m.AbandonRequest, **key)

    def acquire(self, *refs, remaining_s=10.0, checksums=False, **key):
        """Acquire leases."""
        return self.send(m.AcquireRequest, tuple(refs), remaining_s, checksums, **key)

    def release(self, **key):
        """Release leases."""
        return self.send(m.ReleaseRequest, **key)

    def match(self, blocks):
        """Return the refs of the deepest match of a prompt."""
        payload = hashes_of(*blocks).tobytes()
        (reply,) = replies(self.send(m.MatchRequest, payload, op=1, client=99))
        return reply.refs

    def drop(self, ref, **key):
        """Drop a leaf."""
        return self.send(m.DropRequest, ref, **key)

    def clear(self, namespace=NAMESPACE, **key):
        """Clear a namespace."""
        return self.send(m.ClearRequest, namespace, **key)

    def peer(self, message, sender=1):
        """Let the server handle a message of another server."""
        link = self._links.setdefault(sender, PeerLink(1.0))
        return unframed(self.handler.handle_peer(sender, link.send(message, self.now), self.now))

    def tick(self, seconds=0.0):
        """Let time pass."""
        self.now += seconds
        return self.handler.tick(self.now)

    def stored(self, blocks, *, ancestors=(), client=6):
        """Store a prompt without any trouble and return the refs of its record."""
        op = self.op()
        (reply,) = replies(self.reserve(blocks, ancestors=ancestors, op=op, client=client))
        assert reply.status == "reserved", reply
        (reply,) = replies(self.publish(op=op, client=client))
        assert reply.status == "published", reply
        return self.match(blocks)

    # -- state -------------------------------------------------------------------------------

    def states(self):
        """Return how many segments are in each state."""
        found = {state.name: 0 for state in SegmentState}
        for segment in self.cache.slots:
            found[segment.state.name] += 1
        return {name: count for name, count in found.items() if count}

    @property
    def is_empty(self):
        """Whether every byte is free."""
        return self.cache.room.free_bytes == self.cache.room.capacity_bytes and not self.states()


def replies(actions):
    """Return the replies among actions."""
    return [action.reply for action in actions if isinstance(action, Answer)]


def statuses(actions):
    """Return the write statuses that were answered."""
    return [reply.status for reply in replies(actions)]


def unframed(actions):
    """Return actions with the messages to other servers taken out of their frames."""
    return [
        ToPeer(action.server, action.frame.message) if isinstance(action, SendFrame) else action
        for action in actions
    ]


def to_peers(actions):
    """Return the messages to other servers among actions."""
    return [action.message for action in unframed(actions) if isinstance(action, ToPeer)]


def posted(actions):
    """Return the receives to post among actions."""
    return [action for action in actions if isinstance(action, PostReceives)]


def cancelled(actions):
    """Return the writes whose receives are to be cancelled."""
    return [(a.client, a.op) for a in actions if isinstance(a, CancelReceives)]


def ref_of(server, slot, blocks, count):
    """Return a reference to a segment of another server, used up to the end of ``blocks``."""
    return SegmentRef((server << 48) | (slot << 20), count, bytes(hashes_of(*blocks)[-1]))
