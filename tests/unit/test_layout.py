"""Layouts, and the digest that keeps what is not interchangeable apart."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ptstore_mpi import ConfigError, KVLayout, TensorSpec
from ptstore_mpi.layout import DTYPE_BYTES, namespace_digest

LAYOUT = KVLayout.for_attention(layers=2, kv_heads=3, head_dim=5, dtype="float16", block_tokens=4)


def test_attention_layout():
    names = [spec.name for spec in LAYOUT.tensors]
    assert names == ["layers.0.key", "layers.0.value", "layers.1.key", "layers.1.value"]
    assert {spec.block_bytes for spec in LAYOUT.tensors} == {3 * 5 * 4 * 2}
    assert LAYOUT.block_bytes == 4 * 120
    assert LAYOUT.bytes_per_token == 120.0


@pytest.mark.parametrize(("dtype", "itemsize"), DTYPE_BYTES.items())
def test_every_dtype_has_its_bytes(dtype, itemsize):
    layout = KVLayout.for_attention(layers=1, kv_heads=1, head_dim=7, dtype=dtype)
    assert layout.tensors[0].block_bytes == 7 * 16 * itemsize


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "float31"}, "float31"),
        ({"layers": 0}, "layers"),
        ({"kv_heads": -1}, "kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
def test_impossible_attention(wrong, message):
    right = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32", "block_tokens": 16}
    with pytest.raises(ConfigError, match=message):
        KVLayout.for_attention(**{**right, **wrong})


@pytest.mark.parametrize(
    ("tensors", "block_tokens", "message"),
    [
        ((), 16, "at least one tensor"),
        ((TensorSpec("a", 0),), 16, "'a'.*block_bytes"),
        ((TensorSpec("a", 8), TensorSpec("b", 8), TensorSpec("a", 8)), 16, "unique.*a"),
        ((TensorSpec("a", 8),), 0, "block_tokens"),
    ],
)
def test_impossible_layouts(tensors, block_tokens, message):
    with pytest.raises(ConfigError, match=message):
        KVLayout(tensors, block_tokens)


def test_a_digest_tells_everything_apart():
    tensors = LAYOUT.tensors
    identity = {"model": "m", "salt": ""}
    digests = [
        namespace_digest(LAYOUT, identity),
        namespace_digest(LAYOUT, {"model": "n", "salt": ""}),
        namespace_digest(LAYOUT, {"model": "m", "salt": "t"}),
        namespace_digest(LAYOUT, {"model": "ms", "salt": ""}),
        namespace_digest(LAYOUT, {"model": "m", "salt": "", "lora": ""}),
        namespace_digest(KVLayout(tensors, 8, "float16"), identity),
        namespace_digest(KVLayout(tensors[:-1], 4, "float16"), identity),
        namespace_digest(KVLayout(tensors[::-1], 4, "float16"), identity),
        namespace_digest(KVLayout((TensorSpec("x", 120), *tensors[1:]), 4, "float16"), identity),
    ]
    assert namespace_digest(KVLayout(tensors, 4, "float16"), identity) == digests[0]
    assert {len(digest) for digest in digests} == {16}
    assert len(set(digests)) == len(digests)
    assert namespace_digest(LAYOUT, {"salt": "", "model": "m"}) == digests[0]


def test_dtypes_of_one_size_are_other_namespaces():
    """The same model in float16 and in bfloat16: equal sizes, other bytes."""
    half, brain = (
        KVLayout.for_attention(layers=1, kv_heads=2, head_dim=8, dtype=dtype)
        for dtype in ("float16", "bfloat16")
    )
    identity = {"model": "m", "salt": ""}
    assert namespace_digest(half, identity) != namespace_digest(brain, identity)


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_digest_and_hashes_do_not_depend_on_pythonhashseed(seed):
    program = (
        "import numpy as np\n"
        "from ptstore_mpi import Config, KVLayout, _native\n"
        "from ptstore_mpi.layout import namespace_digest\n"
        "layout = KVLayout.for_attention(layers=2, kv_heads=3, head_dim=5, dtype='float16')\n"
        "digest = namespace_digest(layout, {'b': '2', 'a': '1', 'model': 'm', 'salt': 's'})\n"
        "hashes = _native.hash_blocks(np.arange(64, dtype=np.uint32), block_tokens=16,"
        " root=digest, seed=Config().seed)\n"
        "print(digest.hex(), hashes[-1].tobytes().hex())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.split() == [
        "9182fb1fb9942679b01fa55b80e911dc",
        "224fead4dd1143e17e1338dbd21315e0",
    ]
