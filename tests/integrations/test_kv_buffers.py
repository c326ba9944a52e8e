from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from transformers import DynamicCache

from ptstore_mpi import KVLayout
from ptstore_mpi.integrations.kv_buffers import KVBuffers, KVShape

SHAPE = KVShape(layers=2, kv_heads=3, key_dim=4, value_dim=4, dtype=torch.bfloat16)


def states(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, 3, count, 4), generator=generator).to(torch.bfloat16)


def test_views_follow_the_layout_and_cover_whole_blocks():
    layout = KVLayout.for_attention(
        layers=2, kv_heads=3, head_dim=4, dtype="bfloat16", block_tokens=16
    )
    assert SHAPE.layout(16) == layout
    buffers = KVBuffers.empty(SHAPE, 40)
    views = buffers.views(16)
    expected = [buffers.keys[0], buffers.values[0], buffers.keys[1], buffers.values[1]]
    assert [view.address for view in views] == [tensor.data_ptr() for tensor in expected]
    assert [view.block_count for view in views] == [2] * 4
    sizes = [view.piece_count * view.piece_bytes for view in views]
    assert sizes == [spec.block_bytes for spec in layout.tensors]


def test_layer_appends_like_the_library_and_in_place():
    buffers = KVBuffers.empty(SHAPE, 32)
    ours, theirs = buffers.cache(0), DynamicCache()
    for step, count in enumerate((5, 1, 26)):
        for layer in (0, 1):
            new = states(count, 10 * step + layer), states(count, 100 + 10 * step + layer)
            for got, want in zip(ours.update(*new, layer), theirs.update(*new, layer), strict=True):
                assert torch.equal(got, want)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(7, 1) == theirs.get_mask_sizes(7, 1)
    assert ours.layers[1].keys.data_ptr() == buffers.keys[1].data_ptr()
    assert torch.equal(buffers.values[1][None], theirs.layers[1].values)


def test_layer_starts_behind_the_loaded_prefix():
    buffers = KVBuffers.empty(SHAPE, 32)
    prefix, rest = states(16, 1), states(3, 2)
    buffers.keys[0][:, :16] = prefix[0]
    keys, _ = buffers.cache(16).update(rest, rest, 0)
    assert torch.equal(keys, torch.cat([prefix, rest], dim=2))


def test_layer_goes_on_beyond_its_room_and_leaves_the_buffers():
    buffers = KVBuffers.empty(SHAPE, 16)
    first, second, third = states(15, 1), states(3, 2), states(1, 3)
    cache = buffers.cache(0)
    cache.update(first, first, 0)
    before = buffers.keys[0].clone()
    cache.update(second, second, 0)
    keys, values = cache.update(third, third, 0)
    assert torch.equal(keys, torch.cat([first, second, third], dim=2))
    assert torch.equal(values, keys)
    assert torch.equal(buffers.keys[0][:, :15], before[:, :15])


def test_layer_can_be_cropped_and_reset():
    cache = KVBuffers.empty(SHAPE, 16).cache(0)
    first, second = states(8, 1), states(2, 2)
    cache.update(first, first, 0)
    cache.crop(-3)
    keys, _ = cache.update(second, second, 0)
    assert torch.equal(keys, torch.cat([first[:, :, :5], second], dim=2))
    cache.reset()
    keys, _ = cache.update(second, second, 0)
    assert torch.equal(keys, second)


@pytest.mark.parametrize(
    "wrong", [states(4, 1).float(), states(4, 1)[:, :2], states(4, 1).repeat(2, 1, 1, 1)]
)
def test_layer_refuses_states_that_a_copy_would_bend(wrong):
    cache = KVBuffers.empty(SHAPE, 16).cache(0)
    with pytest.raises(ValueError, match=r"expected states of shape \(1, 3, 4, 4\)"):
        cache.update(wrong, wrong, 0)
