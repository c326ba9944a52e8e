"""vLLM over the store: an out-of-tree KV connector, and an engine for every client of a job.

    def main(store):
        prepare_process()
        with attach(store):
            llm = build_llm(model, connector={})
            llm.generate(prompts, sampling_params)

    ptstore_mpi.run(main)

Importing this imports no vLLM; `PTStoreConnector` itself is in the submodule `connector`.
"""

from __future__ import annotations

from typing import Any

from ptstore_mpi.integrations.vllm.attachment import Attachment, attach
from ptstore_mpi.integrations.vllm.checks import UnsupportedEngineError
from ptstore_mpi.integrations.vllm.engine_setup import (
    build_llm,
    join_ranks,
    kv_transfer_config,
    prepare_process,
    release,
    settle,
)
from ptstore_mpi.integrations.vllm.settings import ConnectorSettings
from ptstore_mpi.integrations.vllm.versions import VllmVersionError

__all__ = [
    "Attachment",
    "ConnectorSettings",
    "UnsupportedEngineError",
    "VllmVersionError",
    "attach",
    "build_llm",
    "join_ranks",
    "kv_transfer_config",
    "prepare_process",
    "register",
    "release",
    "settle",
]


def register() -> None:
    """Register `PTStoreConnector` by name: the entry point of ``vllm.general_plugins``."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registered: dict[str, Any] = KVConnectorFactory._registry
    if "PTStoreConnector" not in registered:
        KVConnectorFactory.register_connector(
            "PTStoreConnector", "ptstore_mpi.integrations.vllm.connector", "PTStoreConnector"
        )
