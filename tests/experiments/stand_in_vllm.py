"""Stands in for vLLM and for the connector, with what the driver sees of them and no more.

An engine's first token is a sum over the prompt. Its prefix cache and the "store" are sets of
prefixes by whole blocks; `events` says what was built, warmed up, answered, settled and released.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BLOCK_TOKENS = 128
VOCABULARY = 251


class Metrics:
    first_token_latency = 0.25


class Output:
    """What one request came to."""

    def __init__(self, token_ids: list[int], first_token: int) -> None:
        self.prompt_token_ids = token_ids
        self.outputs = [types.SimpleNamespace(token_ids=[first_token])]
        self.metrics: Any = Metrics()
        self.num_cached_tokens = 0
        self.kv_transfer_params: dict[str, Any] | None = None


class StandIn:
    """The two modules' state. One engine lives at a time, as vLLM has it."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.built: list[dict[str, Any]] = []
        self.live: Engine | None = None
        self.attached: Any = None
        self.stored: dict[int, set[tuple[int, ...]]] = {}
        self.first_token = lambda token_ids: sum(token_ids) % VOCABULARY

    def install(self, monkeypatch: Any) -> None:
        """Put both modules where an import finds them."""
        functions = ("prepare_process", "attach", "build_llm", "settle", "release")
        connector = {name: getattr(self, name) for name in functions}
        platform = types.SimpleNamespace(is_cpu=lambda: True)
        contents: dict[str, dict[str, Any]] = {
            "vllm": {"SamplingParams": dict},
            "vllm.platforms": {"current_platform": platform},
            "ptstore_mpi.integrations.vllm": connector,
        }
        for name, attributes in contents.items():
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=__file__)
            module.__dict__.update(attributes)
            monkeypatch.setitem(sys.modules, name, module)

    def prepare_process(self, threads: int = 1) -> None:
        self.events.append(("prepare", threads))

    @contextmanager
    def attach(self, store: Any) -> Iterator[Any]:
        assert self.attached is None
        self.attached = store
        self.saves: list[tuple[str, int, str, float]] = []
        try:
            yield self
        finally:
            assert self.live is None, "the store went before its engine"
            self.attached = None

    def take_saves(self) -> list[tuple[str, int, str, float]]:
        taken, self.saves = self.saves, []
        return taken

    def build_llm(self, model_path: str, **arguments: Any) -> Engine:
        assert self.live is None, "two engines at once"
        assert (arguments["connector"] is None) == (self.attached is None)
        self.built.append(arguments)
        self.live = Engine(self, arguments)
        return self.live

    def settle(self, llm: Engine) -> bool:
        assert llm is self.live
        llm.save()
        return True

    def release(self, llm: Engine) -> None:
        assert llm is self.live
        self.live = None
        self.events.append(("release",))


class Engine:
    """A `vllm.LLM`."""

    def __init__(self, stand_in: StandIn, arguments: dict[str, Any]) -> None:
        self._all = stand_in
        self._arguments = arguments
        self._cached: set[tuple[int, ...]] = set()
        self._unsaved: list[tuple[int, ...]] = []

    def generate(
        self, prompts: list[Any], sampling: dict[str, Any], use_tqdm: bool
    ) -> list[Output]:
        assert sampling["temperature"] == 0
        assert sampling["max_tokens"] == 1
        (prompt,) = prompts
        token_ids = prompt["prompt_token_ids"]
        assert len(token_ids) < self._arguments["max_model_len"]
        self._all.events.append(("generate", len(token_ids)))
        output = Output(token_ids, self._all.first_token(token_ids))
        blocks = [
            tuple(token_ids[:end]) for end in range(BLOCK_TOKENS, len(token_ids), BLOCK_TOKENS)
        ]
        if self._arguments["prefix_caching"] and self._arguments["connector"] is None:
            output.num_cached_tokens = _length(blocks, self._cached)
            self._cached |= set(blocks)
        if self._arguments["connector"] is not None:
            stored = self._all.stored.setdefault(id(self._all.attached), set())
            owned = _length(blocks, stored)
            output.num_cached_tokens = owned
            output.kv_transfer_params = {"ptstore": _facts(owned, len(token_ids))}
            self._unsaved = [block for block in blocks if block not in stored]
        return [output]

    def save(self) -> None:
        stored = self._all.stored.setdefault(id(self._all.attached), set())
        stored |= set(self._unsaved)
        if self._unsaved:
            self._all.saves.append(("request", 1_000 * len(self._unsaved), "stored", 0.5))
        self._unsaved = []


def _length(blocks: list[tuple[int, ...]], known: set[tuple[int, ...]]) -> int:
    return max((len(block) for block in blocks if block in known), default=0)


def _facts(owned: int, asked: int) -> dict[str, Any]:
    sources = ("engine", "owned", "replica", "remote", "disk")
    return {
        **{f"{source}_tokens": 0 for source in sources},
        "owned_tokens": owned,
        "recomputed_tokens": asked - owned,
        "reason": "whole" if owned else "cold",
        "match_s": 0.01,
        "load_s": 0.04,
    }
