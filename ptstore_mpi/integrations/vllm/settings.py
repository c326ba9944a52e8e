"""Settings of the connector: what ``kv_connector_extra_config`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ptstore_mpi.errors import ConfigError

__all__ = ["ConnectorSettings"]

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one engine uses the store.

    Attributes
    ----------
    load
        ``async``: the request waits outside the batch while its prefix is loaded, others go on.
        ``layered``: it is in the batch at once, and each layer waits for its own tensors.
        ``verified``: the prefix is in host memory, checked, before the engine hears of it.
        ``auto``: the first that this version of vLLM can do.
    fetch
        ``cost``: a load that would take longer than computing is declined. ``always``: none is.
    save
        ``prompt``: the whole blocks of prompts. ``all``: those of decoded tokens too, when a
        request ends. ``none``.
    save_queue_tokens
        Tokens that may wait to be saved, whose blocks vLLM cannot use meanwhile; what comes beyond
        is dropped and counted.
    save_slice_tokens
        Tokens that are stored at once; a match goes first after each slice.
    match_wait_s
        How long a step waits for a match when it is first asked about a request, s; then it goes on
        without it, and the request misses a step. Matches take less than 1 ms where servers answer.
    model_id
        Name of weights and revision; empty: a digest of the model's files.
    weight_epoch
        Number of the weights that the engine begins with, where a job changes them as it runs.
    salt
        Sets tenants apart.
    """

    load: Literal["auto", "async", "layered", "verified"] = "auto"
    fetch: Literal["cost", "always"] = "cost"
    save: Literal["prompt", "all", "none"] = "prompt"
    save_queue_tokens: Count = 1 << 17
    save_slice_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1024
    match_wait_s: Seconds = 0.02
    model_id: str = ""
    weight_epoch: Count = 0
    salt: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> ConnectorSettings:
        """Return the settings in ``kv_connector_extra_config``.

        Raises
        ------
        ConfigError
            An unknown name or an impossible value.
        """
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"kv_connector_extra_config: expected settings, got {given!r:.80}")
        try:
            return msgspec.convert(dict(given or {}), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"kv_connector_extra_config: {error}; expected some of "
                f"{', '.join(cls.__struct_fields__)}"
            ) from None
