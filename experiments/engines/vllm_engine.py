"""The engine `vllm`: every system has an engine of its own, one after the other.

Owns the memory of these engines. vLLM keeps its connector in a global of the process, and a GPU
holds one engine, so systems cannot alternate. Every engine has the KV memory that one prompt needs
while it runs; what a system may keep comes on top, for ``prefix`` in the engine, for the others in
servers. Never imported by a server beyond `VllmEngine.require`, which loads nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.baselines.base import System
from experiments.baselines.vllm_base import EngineFacts, VllmPrefix, VllmVanilla
from experiments.baselines.vllm_pooled import VllmEvoStore, VllmPrefixNode, VllmPTStore
from experiments.common.model_presets import GroupedAttention
from experiments.common.options import UsageError
from experiments.common.vllm_answers import NOT_INSTALLED, is_installed
from experiments.common.workload import Workload
from experiments.engines.base import Engine

if TYPE_CHECKING:
    from experiments.common.options import Options

BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128
CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"

_POOLED = {system.name: system for system in (VllmPrefixNode, VllmEvoStore, VllmPTStore)}


class VllmEngine(Engine):
    """Systems that build vLLM engines of one model."""

    alternates = False
    compared = "tokens"

    def __init__(
        self, folder: Path, options: Options, *, longest_prompt: int, block_tokens: int
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        try:
            attention = GroupedAttention.from_config(config, options.dtype)
        except ValueError as error:
            raise UsageError(f"--model {folder}: {error}") from None
        digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
        self.model_id = f"{config.get('model_type', 'unknown')}-config-{digest}"
        self.block_tokens = block_tokens
        self.bytes_per_token = attention.bytes_per_token
        self._fetch = options.fetch
        max_model_len = longest_prompt + 1
        positions = config.get("max_position_embeddings")
        if positions is not None and max_model_len > positions:
            raise UsageError(
                f"--context-tokens {options.context_tokens}: a prompt and its answer take "
                f"up to {max_model_len} tokens, this model takes {positions}"
            )
        self.facts = EngineFacts(
            model=folder,
            dtype=options.dtype,
            max_model_len=max_model_len,
            block_tokens=block_tokens,
            working_bytes=working_bytes(max_model_len, block_tokens, attention.bytes_per_token),
        )

    @classmethod
    def require(cls) -> None:
        """See that vLLM is installed."""
        if not is_installed():
            raise UsageError(NOT_INSTALLED)

    @classmethod
    def prepare_process(cls, threads: int) -> None:
        """Set the environment that vLLM reads when it is imported."""
        from ptstore_mpi.integrations.vllm import prepare_process

        prepare_process(threads=threads)

    @classmethod
    def start(cls, folder: Path, options: Options, workload: Workload) -> VllmEngine:
        """Work out how large the engines must be; each is built when its system is opened."""
        if os.environ.get(CACHE_VARIABLE):
            raise UsageError(
                f"--engine vllm: expected {CACHE_VARIABLE} not to be set: vLLM would take it for "
                f"every engine in place of --memory-bytes-per-node"
            )
        from vllm.platforms import current_platform

        longest = max(len(request.tokens) for request in workload.requests)
        block_tokens = CPU_BLOCK_TOKENS if current_platform.is_cpu() else BLOCK_TOKENS
        return cls(folder, options, longest_prompt=longest, block_tokens=block_tokens)

    def build_system(self, name: str, *, stores: Mapping[str, Any], cache_bytes: int) -> System:
        """Build a system whose engine starts when it is opened."""
        if name == "vanilla":
            return VllmVanilla(self.facts)
        if name == "prefix":
            return VllmPrefix(self.facts, cache_bytes=cache_bytes)
        segment_tokens = stores[name].config.segment_tokens
        if segment_tokens % self.block_tokens:
            raise UsageError(
                f"--engine vllm: expected PTSTORE_SEGMENT_TOKENS to be a multiple of the "
                f"{self.block_tokens} tokens of a block of vLLM, given {segment_tokens}"
            )
        return _POOLED[name](self.facts, stores[name], {"fetch": self._fetch})


def working_bytes(max_model_len: int, block_tokens: int, bytes_per_token: int) -> int:
    """Return the KV memory that one running prompt takes: its blocks, and vLLM's null block."""
    blocks = -(-max_model_len // block_tokens) + 1
    return blocks * block_tokens * bytes_per_token
