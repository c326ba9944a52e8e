"""`PTStoreConnector`: the class that vLLM builds by name. Importing this needs vLLM.

::

    KVTransferConfig(
        kv_connector="PTStoreConnector",
        kv_connector_module_path="ptstore_mpi.integrations.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )

The module path may be left out: an entry point registers the name in every process of vLLM.
"""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from ptstore_mpi.integrations.vllm.api import Api
from ptstore_mpi.integrations.vllm.plans import StepPlan
from ptstore_mpi.integrations.vllm.versions import generation_of

__all__ = ["PTStoreConnector"]

API_VARIABLE = "PTSTORE_VLLM_API"

_api: type[Api] = generation_of(vllm.__version__, os.environ.get(API_VARIABLE, ""))
_bases: tuple[Any, ...] = tuple(
    getattr(base, name) for name in ("KVConnectorBase_V1", "SupportsHMA") if hasattr(base, name)
)

base.KVConnectorMetadata.register(StepPlan)
PTStoreConnector: Any = type("PTStoreConnector", (_api, *_bases), {"__module__": __name__})
PTStoreConnector.__doc__ = "KV of prefixes out of a PTStore, into it: see `settings`."
