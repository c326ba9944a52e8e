"""Store and load of CUDA tensors in a job of one process, over the stand-in driver."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
from stand_in import BFLOAT

import ptstore_mpi as pt
from ptstore_mpi import KVLayout, LayoutMismatchError, TensorView, TransportError, cuda
from ptstore_mpi.arena import anonymous_memory
from ptstore_mpi.transport import devices

LAYERS, HEADS, DIM, BLOCK_TOKENS, BLOCKS = 2, 3, 4, 4, 10
LAYOUT = KVLayout.for_attention(
    layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", block_tokens=BLOCK_TOKENS
)
TOKENS = BLOCKS * BLOCK_TOKENS
PROMPT = np.arange(TOKENS + 1)
TABLE = [9, 3, 4, 5, 0, 2, 11, 13, 8, 1]


def config(**changes):
    return pt.Config(memory_bytes=1 << 20, segment_tokens=16, **changes)


def values(seed=1):
    """Return the KV of the prompt: [tensors, blocks, heads, block_tokens, dim] in 16 bits."""
    shape = (2 * LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, DIM)
    return np.random.default_rng(seed).integers(0, 1 << 16, shape).astype(np.uint16)


class Contiguous:
    """Each tensor ``(blocks, block_bytes)``."""

    shape = (BLOCKS, HEADS, BLOCK_TOKENS, DIM)

    @staticmethod
    def fill(memory, blocks):
        memory[...] = blocks

    @staticmethod
    def view(array):
        return array


class Paged:
    """Pages behind a table, every second one of a larger array."""

    shape = (30, HEADS, BLOCK_TOKENS, DIM)

    @staticmethod
    def fill(memory, blocks):
        memory[::2][TABLE] = blocks

    @staticmethod
    def view(array):
        return TensorView.paged(array[::2], TABLE)


class Heads:
    """The cache of transformers, longer than the prompt."""

    shape = (1, HEADS, TOKENS + 7, DIM)

    @staticmethod
    def fill(memory, blocks):
        memory[0, :, 1 : TOKENS + 1] = blocks.transpose(1, 0, 2, 3).reshape(HEADS, TOKENS, DIM)

    @staticmethod
    def view(array):
        return TensorView.heads(array[:, :, 1:], BLOCK_TOKENS)


FORMS = [Contiguous, Paged, Heads]


def host(form, kv):
    """Return host arrays of a form that hold ``kv``; None: zeros."""
    arrays = [np.zeros(form.shape, np.uint16) for _ in range(2 * LAYERS)]
    if kv is not None:
        for array, blocks in zip(arrays, kv, strict=True):
            form.fill(array, blocks)
    return arrays


def on_device(stand_in, arrays, device=0):
    made = [stand_in.array(array, device) for array in arrays]
    for array in made:
        array.code = BFLOAT
    return made


def views(form, arrays):
    return [form.view(array) for array in arrays]


def same(arrays, expected):
    return all(np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))


def in_job(main, **changes):
    return pt.run(lambda store: main(store, store.namespace("m", LAYOUT)), config(**changes))


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.mark.parametrize("verify", ["remote", "always"])
@pytest.mark.parametrize("form", FORMS)
def test_from_device_to_host_and_back(stand_in, form, verify):
    kv = values()

    def main(_, namespace):
        source = on_device(stand_in, host(form, kv))
        assert namespace.store(PROMPT, views(form, source)).tokens == TOKENS
        match = namespace.match(PROMPT)
        out = host(Contiguous, None)
        assert namespace.load(match, out).tokens == TOKENS
        assert same(out, kv)
        back = on_device(stand_in, host(form, None))
        assert namespace.load(match, views(form, back)).tokens == TOKENS
        assert same([array.inside for array in back], host(form, kv))
        streams = {stream for array in (*source, *back) for stream in array.streams}
        assert streams == {cuda.device(0).stream}

    in_job(main, verify=verify)


def test_from_host_to_device_where_a_part_is_there(stand_in):
    kv = values()

    def main(_, namespace):
        assert namespace.store(PROMPT, host(Contiguous, kv)).tokens == TOKENS
        out = on_device(stand_in, host(Heads, None))
        loaded = namespace.load(namespace.match(PROMPT), views(Heads, out), skip_tokens=12)
        assert (loaded.tokens, loaded.by_source["owned"]) == (TOKENS, TOKENS - 12)
        kv[:, :3] = 0
        assert same([array.inside for array in out], host(Heads, kv))

    in_job(main)


@pytest.mark.parametrize("form", FORMS)
def test_to_a_device_layer_by_layer(stand_in, form, monkeypatch):
    monkeypatch.setattr("ptstore_mpi.protocol.plan.BAND_BYTES", 1)
    monkeypatch.setattr("ptstore_mpi.protocol.plan.COPY_BYTES", 1)
    kv = values()

    def main(_, namespace):
        assert namespace.store(PROMPT, host(Contiguous, kv)).tokens == TOKENS
        out = on_device(stand_in, host(form, None))
        wanted, told = host(form, kv), []

        def progress(count):
            assert same([array.inside for array in out[:count]], wanted[:count])
            told.append(count)

        loaded = namespace.load(namespace.match(PROMPT), views(form, out), progress=progress)
        assert (loaded.tokens, told) == (TOKENS, [*range(2, 2 * LAYERS + 1, 2)])
        assert same([array.inside for array in out], wanted)

    in_job(main)


@pytest.mark.parametrize("view_first", [False, True])
def test_copies_follow_what_the_engine_has_under_way(stand_in, view_first):
    """A kernel that still writes ``kv`` is waited for, and one on ``out`` ends before the load."""
    kv = values()

    def main(_, namespace):
        source = on_device(stand_in, host(Contiguous, None))
        out = on_device(stand_in, host(Contiguous, None))
        written, read = source, out
        if view_first:
            written, read = (list(map(TensorView.contiguous, side)) for side in (source, out))
        for array, blocks in zip(source, kv, strict=True):
            array.write_later(blocks)
        assert namespace.store(PROMPT, written).tokens == TOKENS
        for array in out:
            array.write_later(np.zeros(array.inside.shape))
        assert namespace.load(namespace.match(PROMPT), read).tokens == TOKENS
        stand_in.finish_writes()
        assert same([array.inside for array in out], kv)

    in_job(main)


def test_a_store_and_a_load_take_few_copies(stand_in):
    def main(_, namespace):
        arrays = on_device(stand_in, host(Heads, values()))
        namespace.store(PROMPT, views(Heads, arrays))
        # segments of 4, 4 and 2 blocks; a copy per head, or per block where those are fewer
        assert stand_in.copy_count() == 2 * LAYERS * (3 + 3 + 2)
        assert stand_in.calls("cuStreamSynchronize") == 3
        namespace.load(namespace.match(PROMPT), on_device(stand_in, host(Contiguous, None)))
        assert stand_in.copy_count() == 2 * LAYERS * (3 + 3 + 2) + 2 * LAYERS * 3

    in_job(main)


def test_mixtures_are_refused_and_both_are_named(stand_in):
    def main(_, namespace):
        here = on_device(stand_in, host(Contiguous, values()))
        there = on_device(stand_in, host(Contiguous, values()), device=1)
        for mixture, places in (
            ([*here[:3], there[3]], r"'layers.0.key' on CUDA device 0 .* on CUDA device 1"),
            ([here[0], *host(Contiguous, None)[1:]], r"CUDA device 0 .*'layers.0.value' in host"),
            ([*host(Contiguous, None)[:3], here[3]], r"in host memory .* on CUDA device 0"),
        ):
            with pytest.raises(LayoutMismatchError, match=places):
                namespace.store(PROMPT, mixture)
        assert namespace.store(PROMPT, there).tokens == TOKENS, "one device, whichever"
        with pytest.raises(TransportError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
            namespace.store(PROMPT, on_device(stand_in, host(Contiguous, values()), device=7))

    in_job(main)


def test_what_cannot_be_written_is_refused(stand_in):
    def main(_, namespace):
        out = on_device(stand_in, host(Contiguous, values()))
        assert namespace.store(PROMPT, out).tokens == TOKENS
        match = namespace.match(PROMPT)
        with pytest.raises(LayoutMismatchError, match=r"'layers\.\d\.\w+' and .* that overlap"):
            namespace.load(match, [*out[:3], out[0]])
        out[1].read_only = True
        with pytest.raises(LayoutMismatchError, match=r"'layers\.0\.value': .* read-only"):
            namespace.load(match, out)
        out[1].versioned = False  # an older export cannot say so
        assert namespace.load(match, out).tokens == TOKENS

    in_job(main)


def test_without_a_driver_a_tensor_on_a_device_is_a_clear_error(stand_in, monkeypatch):
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-is-not-here.so.1")

    def main(_, namespace):
        out = on_device(stand_in, host(Contiguous, values()))
        with pytest.raises(LayoutMismatchError, match=r"no CUDA driver here: libcuda-that-is"):
            namespace.store(PROMPT, out)
        assert namespace.store(PROMPT, host(Contiguous, values())).tokens == TOKENS

    in_job(main)


def test_no_driver_is_opened_for_host_arrays():
    program = (
        "import sys, numpy as np, ptstore_mpi as pt\n"
        "layout = pt.KVLayout((pt.TensorSpec('a', 64),), 4)\n"
        "def main(store):\n"
        "    namespace = store.namespace('m', layout)\n"
        "    out = [np.zeros((2, 64), np.uint8)]\n"
        "    assert namespace.store(np.arange(8), out).tokens == 8\n"
        "    assert namespace.load(namespace.match(np.arange(9)), out).tokens == 8\n"
        "pt.run(main, pt.Config(memory_bytes=1 << 20, segment_tokens=8))\n"
        "print([name for name in sys.modules if name.startswith('ptstore_mpi')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "ptstore_mpi.transport.local" in done.stdout
    assert "ptstore_mpi.cuda" not in done.stdout
    assert "ptstore_mpi.transport.devices" not in done.stdout


def test_a_copy_that_fails_ends_the_call_with_nothing_under_way(stand_in):
    kv = values()

    def main(_, namespace):
        out = on_device(stand_in, host(Contiguous, kv))
        stand_in.fail_from("cuMemcpyDtoHAsync_v2", 2, after=2)
        with pytest.raises(TransportError, match=r"cuMemcpyDtoHAsync_v2: CUDA_ERROR_OUT_OF_MEMORY"):
            namespace.store(PROMPT, out)
        assert stand_in.pending_count() == 0
        stand_in.fail_from("cuMemcpyDtoHAsync_v2", 0)
        assert namespace.match(PROMPT).tokens == 0, "nothing of it is visible"
        assert namespace.store(PROMPT, out).tokens == TOKENS
        stand_in.fail_from("cuMemcpyHtoDAsync_v2", 2, after=2)
        with pytest.raises(TransportError, match="cuMemcpyHtoDAsync_v2"):
            namespace.load(namespace.match(PROMPT), out)
        assert stand_in.pending_count() == 0

    in_job(main)


def test_an_engine_that_captures_a_graph_meanwhile_is_not_disturbed(stand_in):
    def main(_, namespace):
        out = on_device(stand_in, host(Contiguous, values()))
        stand_in.capture(True)
        assert namespace.store(PROMPT, out).tokens == TOKENS
        assert stand_in.capture_mode() == 0
        wait_until(lambda: stand_in.registered_count() == 2)

    in_job(main)


# -- page-locks ----------------------------------------------------------------------------------


def test_arena_and_staging_are_locked_until_the_job_closes(stand_in):
    def main(_, namespace):
        assert stand_in.registered_count() == 0, "not before a tensor on a device is used"
        namespace.store(PROMPT, on_device(stand_in, host(Contiguous, values())))
        wait_until(lambda: stand_in.registered_count() == 2)

    in_job(main)
    assert stand_in.registered_count() == 0
    assert stand_in.calls("cuMemHostUnregister") == 2


def test_staging_that_is_replaced_is_unlocked_and_the_new_one_locked(stand_in):
    def main(store, namespace):
        namespace.store(PROMPT, on_device(stand_in, host(Contiguous, values())))
        wait_until(lambda: stand_in.registered_count() == 2)
        store.namespace("m", KVLayout.for_attention(
            layers=8, kv_heads=64, head_dim=512, dtype="float32", block_tokens=16
        ))  # fmt: skip
        wait_until(lambda: stand_in.registered_count() == 2)
        assert stand_in.calls("cuMemHostRegister_v2") == 3

    in_job(main, staging_bytes=1 << 16, get_bytes=1 << 12)
    assert stand_in.calls("cuMemHostUnregister") == 3


def test_an_arena_is_not_locked_before_it_has_pages(stand_in):
    populated = []
    arena, staging = anonymous_memory(8192), anonymous_memory(4096)
    locks = devices.Devices([arena], staging, device=0, is_populated=lambda: bool(populated))
    wait_until(lambda: stand_in.registered_count() == 1)
    time.sleep(0.05)
    assert stand_in.registered_count() == 1, "only the staging memory"
    populated.append(True)
    wait_until(lambda: stand_in.registered_count() == 2)
    locks.close()


def test_closing_before_the_pages_exist_does_not_wait_for_them(stand_in):
    locks = devices.Devices(
        [anonymous_memory(4096)], anonymous_memory(4096), device=0, is_populated=lambda: False
    )
    locks.close()
    assert stand_in.registered_count() == 0


def test_a_refused_lock_is_told_once_and_copies_go_on(stand_in, caplog):
    kv = values()
    stand_in.fail_from("cuMemHostRegister_v2", 2)

    def main(_, namespace):
        assert namespace.store(PROMPT, on_device(stand_in, host(Contiguous, kv))).tokens == TOKENS
        wait_until(lambda: stand_in.calls("cuMemHostRegister_v2") == 2)
        out = on_device(stand_in, host(Contiguous, None))
        assert namespace.load(namespace.match(PROMPT), out).tokens == TOKENS
        assert same([array.inside for array in out], kv)

    with caplog.at_level(logging.WARNING):
        in_job(main)
    [told] = caplog.messages
    assert "cannot be page-locked" in told
    assert "cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY" in told
    assert stand_in.calls("cuMemHostUnregister") == 0


def test_locked_memory_is_not_unmapped_by_who_forgets_to_close(stand_in):
    """The driver would go on to copy from the pages that were there, whatever is there now."""
    arena, staging = anonymous_memory(4096), anonymous_memory(4096)
    locks = devices.Devices([arena], staging, device=0, is_populated=lambda: True)
    wait_until(lambda: stand_in.registered_count() == 2)
    memories, forgotten = [weakref.ref(arena), weakref.ref(staging)], weakref.ref(locks)
    del arena, staging, locks
    gc.collect()
    assert all(memory() is not None for memory in memories)
    forgotten().close()
    wait_until(lambda: gc.collect() >= 0 and not any(memory() is not None for memory in memories))
