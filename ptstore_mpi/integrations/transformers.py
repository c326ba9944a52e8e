"""The Hugging Face transformers engine: prefill on the CPU with a prefix from the store.

Owns the engine around a causal language model (`TransformersEngine`); the order of events of one
request is in `prefix_reuse`. Never touches MPI; all it knows of the store is the public API.

Library versions: transformers 5.20 to 5.24 are tested; they differ in the name of the cache
argument, which is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.integrations._quiet import quiet
from ptstore_mpi.integrations.fetch_or_recompute import FetchOrRecompute
from ptstore_mpi.integrations.kv_buffers import KVBuffers
from ptstore_mpi.integrations.model_facts import (
    UnsupportedModelError,
    cache_argument,
    kv_identity,
    kv_shape,
    weights_digest,
)
from ptstore_mpi.integrations.prefix_reuse import Answer, PrefixReuse, TokenIds
from ptstore_mpi.integrations.process_setup import default_thread_count, set_up_process

if TYPE_CHECKING:
    from ptstore_mpi import Namespace, Store

__all__ = [
    "Answer",
    "FetchOrRecompute",
    "KVBuffers",
    "Prefill",
    "PrefixReuse",
    "TransformersEngine",
    "UnsupportedModelError",
    "default_thread_count",
]


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What a prefill computed.

    Attributes
    ----------
    token
        First token, greedy.
    logits
        float32 array (vocabulary,) of the prompt's last position.
    kv
        Keys and values of the whole prompt (the buffers that were passed in, if any).
    cache
        The library's cache over `kv`, with which decoding can go on.
    seconds
        Time from the entry to the first token.
    """

    token: int
    logits: npt.NDArray[np.float32]
    kv: KVBuffers
    cache: DynamicCache
    seconds: float


class TransformersEngine:
    """A causal language model whose KV can leave and enter: any model with a plain cache.

    Parameters
    ----------
    model
        A causal model on the CPU whose every layer keeps full attention in a `DynamicCache`:
        grouped queries and any dtype are fine. It is put into evaluation mode.
    model_id
        Names weights and revision; `from_pretrained` takes a digest of the weights.
    block_tokens
        Tokens per block of the layout.

    Raises
    ------
    UnsupportedModelError
        The model keeps another kind of KV; the message names it.
    """

    def __init__(self, model: PreTrainedModel, *, model_id: str, block_tokens: int = 16) -> None:
        model.train(False)
        self.model = model
        self.model_id = model_id
        self._shape = kv_shape(model)
        self._cache_argument = cache_argument(model)
        self.layout = self._shape.layout(block_tokens)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "float32",
        threads: int | None = None,
        computing_rank_count: int = 1,
        block_tokens: int = 16,
    ) -> TransformersEngine:
        """Load a model from a local folder and set this process up for computing with it.

        Never touches the network. Settings of the whole process: see `process_setup`.

        Parameters
        ----------
        path
            Folder with configuration and weights.
        dtype
            A torch floating-point dtype by name, for weights and KV.
        threads
            Threads of torch; None for `default_thread_count(computing_rank_count)`.
        computing_rank_count
            Ranks of this node that compute at the same time.
        block_tokens
            Tokens per block of the layout.
        """
        wanted = getattr(torch, dtype, None)
        if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
            raise ConfigError(f"dtype: expected a floating-point dtype of torch, got {dtype!r}")
        count = default_thread_count(computing_rank_count) if threads is None else threads
        set_up_process(count)
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, local_files_only=True)
        model_id = f"{model.config.model_type}-{weights_digest(model)}"
        return cls(model, model_id=model_id, block_tokens=block_tokens)

    @cached_property
    def identity(self) -> str:
        """Everything that makes this engine's KV interchangeable: the model of a namespace."""
        return kv_identity(self.model, self.model_id, self._shape.dtype)

    def namespace(self, store: Store, salt: str = "") -> Namespace:
        """Open the namespace of this engine's KV in `store`; `salt` sets tenants apart."""
        return store.namespace(self.identity, self.layout, salt=salt)

    def allocate(self, token_count: int) -> KVBuffers:
        """Allocate uninitialised buffers for `token_count` tokens, rounded up to a block."""
        if token_count < 1:
            raise ValueError(f"token_count: expected at least 1, got {token_count}")
        block_tokens = self.layout.block_tokens
        blocks = -(-token_count // block_tokens)
        return KVBuffers.empty(self._shape, blocks * block_tokens)

    def prefill(
        self, token_ids: TokenIds, buffers: KVBuffers | None = None, cached_tokens: int = 0
    ) -> Prefill:
        """Compute tokens `cached_tokens`.. of a prompt and its first token.

        Parameters
        ----------
        token_ids
            The whole prompt.
        buffers
            Where its keys and values go; None allocates. Positions before `cached_tokens` must
            hold the KV of exactly these tokens, the others are overwritten.
        cached_tokens
            Length of the prefix that is already there; at least one token is left to compute.

        Raises
        ------
        ValueError
            An empty prompt or one longer than the model's context, nothing left to compute,
            buffers too small, or a token outside the vocabulary. The buffers are untouched.
        TypeError
            Tokens that are no integers.
        """
        start = perf_counter()
        tokens = np.asarray(token_ids)
        self._check(tokens, buffers, cached_tokens)
        tokens = tokens.astype(np.int64)
        kv = self.allocate(tokens.size) if buffers is None else buffers
        cache = kv.cache(cached_tokens)
        inputs = torch.from_numpy(tokens[cached_tokens:])[None]
        with torch.inference_mode():
            output = self.model(
                input_ids=inputs, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache}
            )
            logits = output.logits[0, -1].float().numpy()
        token = int(logits.argmax())
        return Prefill(token, logits, kv, cache, perf_counter() - start)

    def _check(
        self, tokens: npt.NDArray[Any], buffers: KVBuffers | None, cached_tokens: int
    ) -> None:
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"expected a prompt of at least 1 token, got shape {tokens.shape}")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise TypeError(f"expected integer tokens, got {tokens.dtype}")
        room = 0 if buffers is None else buffers.tokens
        if not 0 <= cached_tokens < tokens.size or cached_tokens > room:
            raise ValueError(
                f"cached_tokens: expected 0 to {min(tokens.size - 1, room)} for a prompt of "
                f"{tokens.size} tokens and buffers for {room}, got {cached_tokens}"
            )
        if buffers is not None and room < tokens.size:
            raise ValueError(f"expected buffers for {tokens.size} tokens, got {room}")
        config = self.model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None) or tokens.size
        if tokens.size > positions:
            raise ValueError(f"expected at most {positions} tokens, got {tokens.size}")
        vocabulary = config.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(
                f"expected tokens 0 to {vocabulary - 1}, got {tokens.min()} to {tokens.max()}"
            )
