"""Which generation of vLLM's connector API an installed version has."""

from __future__ import annotations

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.integrations.vllm.api import GENERATIONS, Api

__all__ = ["VllmVersionError", "generation_of"]


class VllmVersionError(ConfigError):
    """This version of vLLM was not tested with the connector."""


def generation_of(version: str, like: str = "") -> type[Api]:
    """Return the API of a version of vLLM.

    Parameters
    ----------
    version
        Such as ``0.32.0``.
    like
        Generation to take it for, such as ``0.32``; empty: by the version.

    Raises
    ------
    VllmVersionError
        Listing the versions that were tested.
    """
    wanted = like or ".".join(version.split(".")[:2])
    if wanted in GENERATIONS:
        return GENERATIONS[wanted]
    run = [name for api in GENERATIONS.values() for name in api.RUN]
    checked = [name for api in GENERATIONS.values() for name in api.CHECKED]
    raise VllmVersionError(
        f"PTStoreConnector: expected vLLM {', '.join(run)}, with which it was run, or "
        f"{', '.join(checked)}, whose sources it was checked against (or another patch of these), "
        f"found {like or version}; to try it as one of {', '.join(GENERATIONS)} set "
        "PTSTORE_VLLM_API"
    )
