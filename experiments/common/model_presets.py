"""KV bytes per token of models, computed from what their configurations say.

Owns the numbers and where they come from; never loads a model. Attention with key-value heads
keeps a key and a value per layer and head; multi-head latent attention (MLA) keeps per layer one
latent vector for all heads and the one rotary key that they share.

============  ================================================================================
SmolLM2-135M  ``config.json`` of HuggingFaceTB/SmolLM2-135M-Instruct: ``num_hidden_layers`` 30,
              ``num_key_value_heads`` 3, ``hidden_size`` 576 / ``num_attention_heads`` 9 = 64,
              ``torch_dtype`` bfloat16
Mistral-7B    ``config.json`` of mistralai/Mistral-7B-Instruct-v0.2, the model of the paper, which
              says 128 KiB per token: 32 layers, 8 key-value heads, 4096 / 32 =
              128, bfloat16
Llama-3-70B   ``config.json`` of meta-llama/Meta-Llama-3-70B: 80 layers, 8 key-value heads,
              8192 / 64 = 128, bfloat16
DeepSeek-V3   ``config.json`` of deepseek-ai/DeepSeek-V3 and its report, arXiv 2412.19437, section
              4.2: 61 layers, ``kv_lora_rank`` 512, ``qk_rope_head_dim`` 64; KV kept in bfloat16
============  ================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Attention with key-value heads."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str) -> GroupedAttention:
        """Read a model's ``config.json``.

        Raises
        ------
        ValueError
            It does not say what is needed, or has latent attention.
        """
        try:
            heads = int(config["num_attention_heads"])
            head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
            kv_heads = config.get("num_key_value_heads") or heads
            found = cls(int(config["num_hidden_layers"]), int(kv_heads), int(head_dim), dtype)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"its config.json describes no attention with heads: {error!r}"
            ) from None
        if "kv_lora_rank" in config or min(found.layers, found.kv_heads, found.head_dim) < 1:
            raise ValueError("its config.json describes no attention with key-value heads")
        return found

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention."""

    layers: int
    latent_dim: int
    rope_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of latents and rotary keys of one token."""
        return self.layers * (self.latent_dim + self.rope_dim) * DTYPE_BYTES[self.dtype]


MODELS: dict[str, GroupedAttention | LatentAttention] = {
    "smollm2-135m": GroupedAttention(layers=30, kv_heads=3, head_dim=576 // 9, dtype="bfloat16"),
    "mistral-7b": GroupedAttention(layers=32, kv_heads=8, head_dim=4096 // 32, dtype="bfloat16"),
    "llama-3-70b": GroupedAttention(layers=80, kv_heads=8, head_dim=8192 // 64, dtype="bfloat16"),
    "deepseek-v3": LatentAttention(layers=61, latent_dim=512, rope_dim=64, dtype="bfloat16"),
}
"""By the name that ``--model`` takes."""
