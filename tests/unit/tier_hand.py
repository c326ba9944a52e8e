"""What the tests of the file tier have in common: segments, a lent arena, patience, a gate."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np

from ptstore_mpi import _native
from ptstore_mpi.tiers.files import Files
from ptstore_mpi.tiers.header import SegmentContent
from ptstore_mpi.tiers.outcomes import Refusal
from ptstore_mpi.tiers.settings import TierSettings

PAGE = 4096
SLAB = 16 * PAGE


def tier_settings(directory, **changes):
    wanted = {"capacity_bytes": 4 * SLAB, "slab_bytes": SLAB, "direct": "off", **changes}
    return TierSettings(directory=str(directory), **wanted)


def content_of(seed=1, *, blocks=2, tensor_bytes=(PAGE, 1000), checksums=b""):
    return SegmentContent(
        namespace=bytes([seed % 256]) * 16,
        segment=seed,
        hashes=np.full((blocks, 16), seed % 256, dtype=np.uint8),
        tensor_bytes=tensor_bytes,
        checksums=checksums,
    )


def payload_of(content):
    return np.random.default_rng(content.segment).bytes(content.payload_bytes)


def used(content, memory):
    """The bytes of the blocks, without what fills the last page."""
    return bytes(memory[: content.block_count * sum(content.tensor_bytes)])


def block_sums(content, payload):
    return _native.block_checksums(
        np.frombuffer(payload, dtype=np.uint8),
        offset=0,
        block_bytes=np.array(content.tensor_bytes, dtype=np.int64),
        segment_blocks=content.block_count,
        segment_block=0,
        block_count=content.block_count,
    ).tobytes()


def memory_of(nbytes, payload=None):
    memory = memoryview(mmap.mmap(-1, nbytes))
    if payload is not None:
        memory[:] = payload
    return memory


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(1e-3)
    return result


def reserve(store, content):
    """Reserve a slot, as soon as the slab for it is made."""

    def attempt():
        store.poll()
        slot = store.reserve(content)
        return None if slot is Refusal.GROWING else slot

    return wait_until(attempt)


def finish(store):
    """Return the one transfer that ends next."""
    ended = wait_until(store.poll)
    assert len(ended) == 1
    return ended[0]


def write(store, content, payload=None):
    """Write a segment; return its slot and how that ended."""
    slot = reserve(store, content)
    memory = memory_of(content.payload_bytes, payload or payload_of(content))
    assert store.start_write(slot, memory)
    return slot, finish(store)


def read(store, slot):
    """Read a segment; return its bytes and how that ended."""
    memory = memory_of(slot.content.payload_bytes)
    assert store.start_read(slot, memory)
    ended = finish(store)
    return used(slot.content, memory), ended


class GatedFiles(Files):
    """System calls that wait for a gate: a slow disk. `begun` counts the writes that came to it."""

    def __init__(self):
        super().__init__(direct=False)
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)

    def write(self, descriptor, views, offset):
        self.begun.release()
        assert self.gate.wait(20)
        return super().write(descriptor, views, offset)
