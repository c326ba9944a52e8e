"""One server over a file tier, both moved by hand: real slabs, no threads, faults as planned."""

from __future__ import annotations

import mmap

import numpy as np
from hand import Hand, replies

from ptstore_mpi.cache.eviction import Eviction
from ptstore_mpi.cache.memory_copies import MemoryCopies
from ptstore_mpi.cache.policies.factory import make_policy
from ptstore_mpi.testing.checks import check_server_space
from ptstore_mpi.testing.tier_faults import FaultyFiles, HandWorkers, open_store
from ptstore_mpi.tiers.segment_tier import SegmentTier
from ptstore_mpi.tiers.settings import TierSettings
from ptstore_mpi.tiers.transfers import ReadSlot, WriteSlot

TENSOR_BYTES = (8192, 8192)  # a segment of two blocks is eight pages
SEGMENT_BYTES = 8 * 4096
SLAB_BYTES = 8 * 9 * 4096  # eight slots: a page of header, then the payload


class TieredHand(Hand):
    """A server with ``slots`` segments of memory and ``slabs`` slabs of eight segments each."""

    tensor_bytes = TENSOR_BYTES
    slot_bytes = SEGMENT_BYTES + 2048

    def __init__(self, directory, *, slots=8, slabs=4, eviction="lru", **options):
        self.now = 100.0
        self._filler = 1000
        self.files = FaultyFiles()
        self.workers = HandWorkers()
        settings = TierSettings(
            directory=str(directory),
            capacity_bytes=slabs * SLAB_BYTES,
            slab_bytes=SLAB_BYTES,
            direct="off",
            queue_depth=options.pop("queue_depth", 16),
        )
        self.store = open_store(
            settings, files=self.files, workers=self.workers, clock=lambda: self.now
        )

        def below(capacity):
            self.memory = np.frombuffer(mmap.mmap(-1, capacity), dtype=np.uint8)
            lowest = Eviction(make_policy(eviction, capacity)) if eviction else None
            return {
                "eviction": lowest,
                "copies": MemoryCopies(Eviction(make_policy(eviction or "lru", capacity))),
                "tier": SegmentTier("ssd", self.store, self.memory),
            }

        super().__init__(slots=slots, below=below, **options)
        self.work()  # the first slab

    # -- the tier ----------------------------------------------------------------------------

    def poll(self):
        """Let the server see what has ended."""
        actions = self.handler.poll_tier(self.now)
        check_server_space(self.handler)
        return actions

    def work(self):
        """Carry out all I/O, and what follows from it."""
        actions = self.poll()
        while self.workers.waiting:
            self.workers.run_one()
            actions += self.poll()
        return actions

    def waiting(self, kind):
        """Return the reads or writes that have not been carried out."""
        return [task for task in self.workers.waiting if isinstance(task, kind)]

    @property
    def reads(self):
        return self.waiting(ReadSlot)

    @property
    def writes(self):
        return self.waiting(WriteSlot)

    # -- bytes -------------------------------------------------------------------------------

    def stored(self, blocks, *, ancestors=(), client=6, works=True):
        """Store a prompt, each segment filled with bytes of its own; return its record."""
        op = self.op()
        actions = self.reserve(blocks, ancestors=ancestors, op=op, client=client)
        if works:
            actions += self.work()
        (reply,) = replies(actions)
        assert reply.status == "reserved", reply
        for segment in self.cache.slots:
            if segment.offset in reply.offsets:
                self.bytes_of(segment)[:] = pattern(segment)
        (reply,) = replies(self.publish(op=op, client=client))
        assert reply.status == "published", reply
        return self.match(blocks)

    def bytes_of(self, segment):
        return self.memory[segment.offset : segment.offset + segment.nbytes]

    def segment(self, ref):
        return self.cache.find(ref)

    def is_right(self, ref):
        """Tell whether a segment's memory holds what was stored."""
        segment = self.segment(ref)
        return bool((self.bytes_of(segment) == pattern(segment)).all())

    def demoted(self, *blocks, crowded=False):
        """Store a prompt and press it out of memory; return its record.

        What it was pressed out with is dropped again, unless memory shall be ``crowded``.
        """
        refs, fillers = self.stored(blocks), []
        while any(self.segment(ref).in_memory for ref in refs):
            self._filler += 2
            fillers += self.stored((self._filler, self._filler + 1))
            self.work()
        for ref in () if crowded else fillers:
            self.drop(ref, op=self.op())
        return refs

    def counter(self, name):
        return self.handler.counters()[name]


def pattern(segment):
    seed = int.from_bytes(segment.block_hash(-1)[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, segment.nbytes, dtype=np.uint8)


__all__ = ["SEGMENT_BYTES", "TieredHand", "pattern"]
