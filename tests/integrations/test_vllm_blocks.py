"""vLLM's caches in every shape that it has for them, as blocks of the store, byte for byte."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

import ptstore_mpi as pt
from ptstore_mpi.integrations.vllm.blocks import BlockPool

CONFIG = pt.Config(memory_bytes=8 << 20, segment_tokens=32, copy_threads=1)
BLOCK = 16
B, H, N, D = 12, 2, BLOCK, 8


def filled(shape, dtype=torch.float32):
    """Return a cache of random bytes."""
    generator = torch.Generator().manual_seed(sum(shape))
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def split():
    """Keys and values first: ``[2, B, N, H, D]``."""
    return {f"layer.{n}": filled((2, B, N, H, D)) for n in range(2)}, {"splits_kv": True}


def fused():
    """``[B, H, N, 2 D]``, dense as it stands."""
    return {f"layer.{n}": filled((B, H, N, 2 * D)) for n in range(3)}, {}


def permuted():
    """``[B, H, N, C]`` over memory in the order of ``[B, N, H, C]``."""
    return {"layer.0": filled((B, N, H, D)).permute(0, 2, 1, 3)}, {}


def kernel_blocks():
    """Four kernel blocks in a row are one of vLLM."""
    return {"layer.0": filled((4 * B, H, N // 4, D))}, {"block_count": B}


def permuted_kernel_blocks():
    """The same over permuted memory: unfolding axis 0 keeps a block dense."""
    return {"layer.0": filled((4 * B, N // 4, H, D)).permute(0, 2, 1, 3)}, {"block_count": B}


def split_kernel_blocks():
    """Keys and values, each of kernel blocks."""
    return {"l": filled((2, 2 * B, N // 2, H, D))}, {"splits_kv": True, "block_count": B}


def interleaved():
    """Layers are neighbours in each block: ``[B, L, ...]``."""
    memory = filled((B, 3, H, N, D))
    return {f"layer.{n}": memory[:, n] for n in range(3)}, {"block_count": B}


def latent():
    """MLA: one latent per token, ``[B, N, D]``."""
    return {f"layer.{n}": filled((B, N, 36), torch.bfloat16) for n in range(2)}, {"splits_kv": True}


def two_latent_blocks():
    """Two blocks are no keys and values."""
    return {"l": filled((2, N, 36))}, {"splits_kv": False}


def float8():
    """8-bit floats."""
    return {"layer.0": filled((B, H, N, D), torch.float8_e4m3fn)}, {}


def integers():
    """8-bit integers with keys and values apart."""
    return {"layer.0": filled((2, B, N, H, D), torch.int8)}, {"splits_kv": True, "block_count": B}


def mixed():
    """Layers of two dtypes and sizes."""
    return {"a": filled((B, H, N, D)), "b": filled((B, H, N, D), torch.bfloat16)}, {}


SHAPES = [
    *(split, fused, permuted, kernel_blocks, permuted_kernel_blocks, split_kernel_blocks),
    *(interleaved, latent, two_latent_blocks, float8, integers, mixed),
]


def pool_of(make):
    """Return the caches of a shape and the pool that reads them."""
    caches, options = make()
    options = {"block_count": None, "block_tokens": BLOCK, **options}
    return caches, BlockPool(caches, **options)


def erase(caches):
    """Fill caches with zeros."""
    for cache in caches.values():
        (cache.view(torch.uint8) if cache.element_size() == 1 else cache).zero_()


def bytes_of(tensor):
    """Return the bytes of a tensor in its own order."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def parts_of(caches, make):
    """Return the tensors of each layer in which axis 0 counts vLLM's blocks, as seen from vLLM."""
    options = make()[1]
    parts = []
    for cache in caches.values():
        halves = cache if options.get("splits_kv") and len(cache.shape) == 5 else [cache]
        for half in halves:
            count = options.get("block_count") or len(half)
            parts.append(
                [half[n * len(half) // count :][: len(half) // count] for n in range(count)]
            )
    return parts


@pytest.mark.parametrize("make", SHAPES, ids=lambda make: make.__name__)
def test_blocks_come_back_from_the_store_as_they_went(make):
    """Through the real store, to other blocks, and nothing else is touched."""
    caches, pool = pool_of(make)
    targets, target_pool = pool_of(make)
    blocks = len(pool.pages[0])
    ids = np.array([5, 2, 7, 1] if blocks > 2 else [1], dtype=np.int64)
    others = np.array([3, 8, 0, 4] if blocks > 2 else [0], dtype=np.int64)
    erase(targets)
    tokens = np.arange(len(ids) * BLOCK + 1)

    def main(store):
        namespace = store.namespace("m", pool.layout)
        kept = namespace.store(tokens[:-1], pool.views(ids))
        loaded = namespace.load(namespace.match(tokens), target_pool.views(others))
        return kept, loaded.tokens

    kept, loaded = pt.run(main, CONFIG)
    assert (kept.tokens, loaded) == (len(ids) * BLOCK, len(ids) * BLOCK)
    total = sum(cache.numel() * cache.element_size() for cache in caches.values())
    assert kept.bytes * blocks == total * len(ids), "all of a block, and no byte twice"
    for sources, sinks in zip(parts_of(caches, make), parts_of(targets, make), strict=True):
        for block, other in zip(ids, others, strict=True):
            assert np.array_equal(bytes_of(sources[block]), bytes_of(sinks[other]))
        for untouched in set(range(blocks)) - set(others.tolist()):
            assert not bytes_of(sinks[untouched]).any()


@pytest.mark.parametrize(
    "make",
    [make for make in SHAPES if make is not two_latent_blocks],
    ids=lambda make: make.__name__,
)
def test_host_buffers_take_the_place_of_blocks(make):
    """As a verified load does: into host memory first, then the blocks behind what vLLM has."""
    caches, pool = pool_of(make)
    targets, target_pool = pool_of(make)
    ids, others = np.array([5, 2, 7, 1]), np.array([3, 8, 0])
    erase(targets)
    tokens = np.arange(4 * BLOCK + 1)

    def main(store):
        namespace = store.namespace("m", pool.layout)
        namespace.store(tokens[:-1], pool.views(ids))
        host = pool.host_buffers(4)
        assert namespace.load(namespace.match(tokens), host, skip_tokens=BLOCK).tokens == 64
        target_pool.copy_in(host, others, 1)
        return [len(buffer) for buffer in host]

    assert pt.run(main, CONFIG) == [4] * len(pool.pages)
    for sources, sinks in zip(parts_of(caches, make), parts_of(targets, make), strict=True):
        for block, other in zip(ids[1:3], others[1:], strict=True):
            assert np.array_equal(bytes_of(sources[block]), bytes_of(sinks[other]))
        for untouched in set(range(B)) - {8, 0}:
            assert not bytes_of(sinks[untouched]).any()


def test_layers_know_where_their_tensors_end():
    caches, pool = pool_of(split)
    assert pool.layer_ends == {"layer.0": 2, "layer.1": 4}
    _, pool = pool_of(fused)
    assert pool.layer_ends == {"layer.0": 1, "layer.1": 2, "layer.2": 3}
    assert [spec.name for spec in pool.layout.tensors] == ["0.kv", "1.kv", "2.kv"]
    assert caches.keys() == {"layer.0", "layer.1"}


def test_layers_that_share_a_cache_are_stored_once():
    one, two = filled((B, H, N, D)), filled((B, H, N, D))
    caches = {"layer.0": one, "layer.1": two, "layer.2": one, "layer.3": two}
    pool = BlockPool(caches, block_count=B, block_tokens=BLOCK)
    assert len(pool.layout.tensors) == 2
    assert pool.layer_ends == {"layer.0": 1, "layer.1": 2, "layer.2": 1, "layer.3": 2}


def test_layers_that_are_neighbours_are_not_taken_for_one():
    """The first begins where the memory of all begins."""
    memory = filled((B, 3, H, N, D))
    caches = {"all": memory, "layer.0": memory[:, 0]}
    pool = BlockPool(caches, block_count=B, block_tokens=BLOCK)
    assert len(pool.layout.tensors) == 2


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(fused, "float32"), (latent, "bfloat16"), (float8, "uint8"), (integers, "uint8")],
)
def test_the_layout_names_what_blocks_are_made_of(make, dtype):
    _, pool = pool_of(make)
    assert (pool.layout.dtype, pool.layout.block_tokens) == (dtype, BLOCK)
    assert pool.device.type == "cpu"


def test_names_of_layers_do_not_count():
    """Two engines that name them differently have the same KV."""
    cache = filled((B, H, N, D))
    pools = [BlockPool({n: cache}, block_count=B, block_tokens=BLOCK) for n in ("a.b", "model.0")]
    assert pools[0].layout == pools[1].layout
    assert pools[0].shape == pools[1].shape


def test_shapes_are_told_apart():
    """Blocks of as many bytes that mean something else."""
    shapes = {pool_of(make)[1].shape for make in (split, fused, permuted, latent, float8, integers)}
    assert len(shapes) == 6
    one = BlockPool({"l": filled((B, H, N, D))}, block_count=B, block_tokens=BLOCK)
    other = BlockPool({"l": filled((B, H, D, N))}, block_count=B, block_tokens=BLOCK)
    assert one.layout.block_bytes == other.layout.block_bytes
    assert one.shape != other.shape


def test_the_order_of_memory_tells_shapes_apart():
    """The same shape to vLLM, over memory in another order: the bytes mean something else."""
    one = filled((B, BLOCK, BLOCK, D))  # as many heads as tokens
    other = filled((B, BLOCK, BLOCK, D)).permute(0, 2, 1, 3)
    pools = [BlockPool({"l": cache}, block_count=B, block_tokens=BLOCK) for cache in (one, other)]
    assert pools[0].shape != pools[1].shape


def test_the_number_of_blocks_is_no_part_of_the_shape():
    pools = [
        BlockPool({"l": filled((count, H, N, D))}, block_count=None, block_tokens=BLOCK)
        for count in (4, 9)
    ]
    assert pools[0].shape == pools[1].shape
    assert pools[0].layout == pools[1].layout


REFUSED = {
    "no layer": ({}, {}, "at least one layer"),
    "gaps in a block": ({"l": filled((B, H, N, 2 * D))[..., :D]}, {}, "one run of bytes"),
    "blocks inside": ({"l": filled((H, B, N, D)).permute(1, 0, 2, 3)}, {}, "one run of bytes"),
    "keys and values far apart": (
        {"l": filled((2, B, N, H, D))},
        {"block_count": B},
        r"expected a cache of 12 blocks, found the shape \(2, 12",
    ),
    "too few": ({"l": filled((B, H, N, D))}, {"block_count": 5}, "a cache of 5 blocks"),
    "more than there are": ({"l": filled((B, H, N, D))}, {"block_count": 99}, "of 99 blocks"),
    "kernel blocks apart": (
        {"l": filled((2 * B, 2, H, N, D))[:, 0]},
        {"block_count": B},
        "one run of bytes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_caches_that_are_refused(name):
    caches, options, message = REFUSED[name]
    with pytest.raises(pt.ConfigError, match=message):
        BlockPool(caches, block_tokens=BLOCK, **{"block_count": None, **options})


def test_a_table_outside_the_cache_is_refused():
    _, pool = pool_of(fused)
    with pytest.raises(pt.LayoutMismatchError):
        pool.views(np.array([B], dtype=np.int64))
