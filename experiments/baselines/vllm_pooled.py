"""`ptstore`, `evostore` and `prefix_node` on vLLM: engines with the store's connector.

Owns what a sample takes from the connector. Never touches a store itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from experiments.baselines.base import Sample
from experiments.baselines.vllm_base import EngineFacts, VllmSystem
from experiments.common.vllm_answers import settle_saves, told_of
from ptstore_mpi import SOURCES


class VllmPTStore(VllmSystem):
    """vLLM over one namespace of the store, with a prefix cache as large as one prompt.

    Parameters
    ----------
    facts
        What all engines have alike.
    store
        The store of this system.
    connector
        Settings of the connector.
    """

    name = "ptstore"

    def __init__(self, facts: EngineFacts, store: Any, connector: Mapping[str, Any]) -> None:
        super().__init__(facts)
        self._store = store
        self._connector = dict(connector)
        self._attachment: Any = None

    def arguments(self) -> dict[str, Any]:
        """Return the engine's settings, with a connector."""
        return {**super().arguments(), "connector": self._connector}

    def surround(self, stack: ExitStack) -> None:
        """Give the store to the connectors of this process."""
        from ptstore_mpi.integrations.vllm import attach

        self._attachment = stack.enter_context(attach(self._store))

    def tokens_by_source(self, output: Any) -> dict[str, int]:
        """Return what the connector counted, with those that were computed."""
        counted = told_of(output)
        return {source: counted[f"{source}_tokens"] for source in (*SOURCES, "recomputed")}

    def times(self, output: Any) -> tuple[float, float]:
        """Return what the connector measured; of what it did not do it says nothing."""
        told = told_of(output)
        return told.get("match_s", 0.0), told.get("load_s", 0.0)

    def reason(self, output: Any) -> str:
        """Return what the connector says."""
        reason: str = told_of(output)["reason"]
        return reason

    def drain(self) -> None:
        """Wait for the saves, and forget them."""
        self._saves()

    def settle(self, sample: Sample) -> None:
        """Wait until all saves have ended, and write down what became of them."""
        saves = self._saves()
        sample.stored_bytes = sum(stored_bytes for _, stored_bytes, _, _ in saves)
        sample.store_s = sum(seconds for *_, seconds in saves)
        reasons = dict.fromkeys(reason for _, _, reason, _ in saves)
        sample.store_reason = "+".join(reasons) or "none"

    def _saves(self) -> list[tuple[str, int, str, float]]:
        settle_saves(self._llm)
        saves: list[tuple[str, int, str, float]] = self._attachment.take_saves()
        return saves


class VllmEvoStore(VllmPTStore):
    """The pooled store without replicas."""

    name = "evostore"


class VllmPrefixNode(VllmPTStore):
    """A store on each node by itself."""

    name = "prefix_node"
