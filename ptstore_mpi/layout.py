"""What makes KV bytes interchangeable: the layout of a block, and the namespace digest.

The store treats a block as opaque bytes per tensor. A layout is the ordered list of tensors with
their bytes per block; whatever else decides the meaning of the bytes (model, dtype, backend,
tenant) goes into the namespace, whose digest roots every hash chain. Another layout is therefore
another namespace: a miss, never an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.types import HASH_BYTES

__all__ = ["DTYPE_BYTES", "KVLayout", "TensorSpec", "namespace_digest"]

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element by dtype name."""

_LARGEST = (1 << 48) - 1  # bytes or tokens: what a machine can address


class TensorSpec(msgspec.Struct, frozen=True):
    """One named piece of a layer's KV: opaque bytes for every block.

    Attributes
    ----------
    name
        Unique within a layout, such as ``layers.0.key``.
    block_bytes
        Bytes of one block of this tensor.
    """

    name: str
    block_bytes: int


class KVLayout(msgspec.Struct, frozen=True):
    """Ordered tensors of one block.

    Attributes
    ----------
    tensors
        In the order in which `Namespace.load` and `Namespace.store` take their arrays.
    block_tokens
        Tokens of a block, the unit of matching.
    dtype
        Names what the bytes are, where somebody cares: two dtypes of one size are two layouts,
        and so two namespaces.

    Raises
    ------
    ConfigError
        No tensor, a size that is not positive, or two tensors of one name.
    """

    tensors: tuple[TensorSpec, ...]
    block_tokens: int
    dtype: str = "bytes"

    def __post_init__(self) -> None:
        _check_count("block_tokens", self.block_tokens)
        if not isinstance(self.dtype, str):
            raise ConfigError(f"dtype must be a name, got {self.dtype!r:.80}")
        if not self.tensors:
            raise ConfigError("a layout needs at least one tensor, got none")
        if not isinstance(self.tensors, tuple | list):
            raise ConfigError(f"tensors must be a tuple of TensorSpec, got {self.tensors!r:.80}")
        for spec in self.tensors:
            if not isinstance(spec, TensorSpec) or not isinstance(spec.name, str):
                raise ConfigError(f"expected TensorSpec(name, block_bytes), got {spec!r:.80}")
            _check_count(f"tensor {spec.name!r}: block_bytes", spec.block_bytes)
        _check_count("block_bytes of all tensors", self.block_bytes)
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"tensor names must be unique, got twice: {', '.join(twice)}")

    @classmethod
    def for_attention(
        cls, *, layers: int, kv_heads: int, head_dim: int, dtype: str, block_tokens: int = 16
    ) -> KVLayout:
        """Return the layout of plain attention: a key and a value tensor per layer.

        ``block_bytes = kv_heads * block_tokens * head_dim * bytes of dtype`` for each tensor.

        Parameters
        ----------
        layers, kv_heads, head_dim
            Of the model: layers, key-value heads per layer, elements per head.
        dtype
            Key of `DTYPE_BYTES`, such as ``bfloat16``.
        block_tokens
            Tokens of a block.

        Raises
        ------
        ConfigError
            An unknown dtype, or a count that is no integer of at least 1.
        """
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}; got {dtype!r:.80}")
        counts = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, value in {**counts, "block_tokens": block_tokens}.items():
            _check_count(name, value)
        block_bytes = kv_heads * block_tokens * head_dim * DTYPE_BYTES[dtype]
        tensors = tuple(
            TensorSpec(f"layers.{layer}.{kind}", block_bytes)
            for layer in range(layers)
            for kind in ("key", "value")
        )
        return cls(tensors, block_tokens, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all tensors."""
        return sum(spec.block_bytes for spec in self.tensors)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token over all tensors."""
        return self.block_bytes / self.block_tokens


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r:.80}")
    if value > _LARGEST:
        raise ConfigError(f"{name} must be at most {_LARGEST}, got {value}")


def namespace_digest(layout: KVLayout, identity: Mapping[str, str]) -> bytes:
    """Return the 16-byte digest that roots the hash chains of a namespace.

    It is the BLAKE2b digest of the canonical MessagePack form of layout and identity, so it is
    equal on every rank, in every job and under any ``PYTHONHASHSEED``.

    Parameters
    ----------
    layout
        Layout of the KV.
    identity
        Everything else that makes KV interchangeable: model and revision, backend, LoRA,
        tenant salt. Order does not matter.

    Raises
    ------
    TypeError, ValueError
        Something of the identity is not text, or no Unicode text.
    """
    for name, value in identity.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}: expected text, got {value!r:.80}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{name}: expected Unicode text, got {value!r:.80}")
    canonical = msgspec.msgpack.encode(("ptstore-namespace-1", layout, sorted(identity.items())))
    return hashlib.blake2b(canonical, digest_size=HASH_BYTES).digest()
