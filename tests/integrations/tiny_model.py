"""A model small enough for every test: two layers, grouped queries, random weights."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 211


def tiny_llama(dtype="float32", seed=0, **changes):
    """Return a random Llama of two layers, 4 query heads over 2 KV heads of 16."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).to(getattr(torch, dtype)).eval()
