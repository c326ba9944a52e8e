"""The same on a real device, with torch: skipped where there is none."""

from __future__ import annotations

import time

import numpy as np
import pytest

import ptstore_mpi as pt
from ptstore_mpi import KVLayout, TensorView

torch = pytest.importorskip("torch", reason="needs torch, with a CUDA device")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device that this torch reaches"
    ),
]

LAYERS, HEADS, DIM, BLOCK_TOKENS, TOKENS = 4, 8, 128, 16, 512
BLOCKS = TOKENS // BLOCK_TOKENS
LAYOUT = KVLayout.for_attention(
    layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", block_tokens=BLOCK_TOKENS
)
PROMPT = np.arange(TOKENS + 1)
TABLE = np.random.default_rng(3).permutation(2 * BLOCKS)[:BLOCKS]


def contiguous(device):
    shape = (BLOCKS, HEADS, BLOCK_TOKENS, DIM)
    return [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in LAYOUT.tensors]


def paged(device):
    shape = (2 * BLOCKS, 2, HEADS, BLOCK_TOKENS, DIM)  # keys and values in one page
    return [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]


def heads(device):
    shape = (1, HEADS, TOKENS + 48, DIM)
    return [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in LAYOUT.tensors]


FORMS = {
    contiguous: lambda arrays: arrays,
    paged: lambda arrays: [TensorView.paged(a[:, side], TABLE) for a in arrays for side in (0, 1)],
    heads: lambda arrays: [TensorView.heads(a[:, :, 16:], BLOCK_TOKENS) for a in arrays],
}


def in_job(main):
    config = pt.Config(memory_bytes=64 << 20, segment_tokens=64)
    return pt.run(lambda store: main(store, store.namespace("m", LAYOUT)), config)


@pytest.mark.parametrize("form", FORMS)
def test_bytes_of_every_form(form):
    view = FORMS[form]

    def main(_, namespace):
        source = form("cuda")
        for array in source:
            array.normal_()
        assert namespace.store(PROMPT, view(source)).tokens == TOKENS
        match = namespace.match(PROMPT)
        on_host, on_device = form("cpu"), form("cuda")
        for out in (on_host, on_device):
            assert namespace.load(match, view(out)).tokens == TOKENS
        # What is outside of the prompt's blocks stayed zero in both: they are equal throughout.
        for here, there in zip(on_host, on_device, strict=True):
            assert torch.equal(here, there.cpu())
        again = form("cpu")
        stored = pt.run(
            lambda store: _through_host(store, view(again), view([a.cpu() for a in source])),
            pt.Config(memory_bytes=64 << 20, segment_tokens=64),
        )
        assert stored == TOKENS
        assert all(torch.equal(here, there) for here, there in zip(on_host, again, strict=True))

    in_job(main)


def _through_host(store, out, kv):
    namespace = store.namespace("m", LAYOUT)
    namespace.store(PROMPT, kv)
    return namespace.load(namespace.match(PROMPT), out).tokens


def test_copies_follow_kernels_on_any_stream():
    def main(_, namespace):
        kv, out = contiguous("cuda"), contiguous("cuda")
        busy = torch.randn(4096, 4096, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                busy = busy @ busy * 1e-3
            for number, array in enumerate(kv):
                array.fill_(number + 1)
            assert namespace.store(PROMPT, kv).tokens == TOKENS
            for _ in range(20):
                busy = busy @ busy * 1e-3
            for array in out:
                array.fill_(-1)
            assert namespace.load(namespace.match(PROMPT), out).tokens == TOKENS
        torch.cuda.synchronize()
        for number, array in enumerate(out):
            assert (array == number + 1).all()

    in_job(main)


def test_arena_and_staging_get_page_locked_and_bytes_stay_right(caplog):
    def main(store, namespace):
        kv, out = contiguous("cuda"), contiguous("cuda")
        for array in kv:
            array.normal_()
        assert namespace.store(PROMPT, kv).tokens == TOKENS
        deadline = time.monotonic() + 20
        while len(store._transport._devices._locked) < 2:
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.01)
        assert namespace.load(namespace.match(PROMPT), out).tokens == TOKENS
        assert all(torch.equal(here, there) for here, there in zip(kv, out, strict=True))

    in_job(main)
    assert not caplog.messages
