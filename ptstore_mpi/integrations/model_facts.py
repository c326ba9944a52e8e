"""What has to be known about a transformers model before its KV may be reused.

Owns the refusal of models whose KV is not a plain function of the prefix, the shape of the KV,
and the digest of everything that makes KV interchangeable. Never talks to the store.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.integrations.kv_buffers import KVShape

# Keys of a configuration that say nothing about the KV, or say what the identity says apart.
_CONFIG_NOISE = frozenset(
    {"_commit_hash", "_name_or_path", "architectures", "dtype", "torch_dtype"}
    | {"transformers_version", "use_cache"}
)


class UnsupportedModelError(ConfigError):
    """The KV of this model cannot be kept as tensors per layer and reused by prefix."""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which `model.forward` takes its cache (renamed in 5.2x)."""
    names = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise UnsupportedModelError(
        f"expected a model whose forward takes cache or past_key_values, "
        f"{type(model).__name__} takes {', '.join(names)}"
    )


def kv_shape(model: PreTrainedModel) -> KVShape:
    """Return the shape of the model's KV, found by running it on two tokens, twice.

    Raises
    ------
    UnsupportedModelError
        Naming what was found: another device than the CPU, an encoder, cache layers other than
        full attention, rotary embeddings that depend on the prompt's length, KV that depends on
        later tokens, or layers whose KV differs in shape.
    """
    _refuse_by_config(model)
    last_token = model.config.get_text_config(decoder=True).vocab_size - 1
    probes = [_probe(model, second_token) for second_token in (0, last_token)]
    found = {tuple((*tensor.shape, tensor.dtype) for tensor in pair) for pair in probes[0]}
    shapes = "; ".join(sorted(str(pair) for pair in found))
    if len(found) != 1:
        raise _unsupported(model, f"keys and values of {shapes}", "equal layers")
    _refuse_lookahead(model, *probes)
    (pair,) = found
    match pair:
        case (1, heads, 2, key_dim, torch.dtype() as dtype), (1, value_heads, 2, value_dim, other):
            if heads == value_heads and dtype == other:
                return KVShape(len(probes[0]), heads, key_dim, value_dim, dtype)
    raise _unsupported(
        model, f"keys and values of {shapes}", "[1, kv_heads, 2 tokens, head_dim] of one dtype"
    )


def kv_identity(model: PreTrainedModel, model_id: str, dtype: torch.dtype) -> str:
    """Return the name of everything that makes this model's KV interchangeable.

    That is `model_id`, the configuration, the KV dtype, the attention implementation, the
    backend and the library's minor version: KV of a prefix computed under another one may differ
    by more than rounding.
    """
    release = ".".join(transformers.__version__.split(".")[:2])
    attention = getattr(model.config, "_attn_implementation", None) or "default"
    config = hashlib.sha256(_config_text(model).encode()).hexdigest()[:32]
    precision = str(dtype).removeprefix("torch.")
    return f"transformers-{release}/cpu/{attention}/{precision}/{config}/{model_id}"


def weights_digest(model: PreTrainedModel) -> str:
    """Return a digest (32 hex digits) of every parameter and buffer: names, dtypes and content.

    All bytes in memory are hashed, not a sample, because a fine-tuned model may differ in few
    rows only; SHA-256 reads about 2 GB/s where the processor has its instructions, less time than
    loading takes. The files' container, sharding and folder do not matter.
    """
    state = hashlib.sha256()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()[:32]


def _probe(model: PreTrainedModel, second_token: int) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of every layer for the prompt (0, `second_token`)."""
    cache = _plain_cache(model)
    tokens = torch.tensor([[0, second_token]])
    with torch.inference_mode():
        model(input_ids=tokens, use_cache=True, **{cache_argument(model): cache})
    pairs = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise _unsupported(model, "layers that keep nothing in the cache")
        pairs.append((layer.keys, layer.values))
    return pairs


def _refuse_lookahead(
    model: PreTrainedModel,
    one: list[tuple[Tensor, Tensor]],
    other: list[tuple[Tensor, Tensor]],
) -> None:
    """Refuse a model in which the first token's KV depends on the second token."""
    for layer, (pair, other_pair) in enumerate(zip(one, other, strict=True)):
        for tensor, other_tensor in zip(pair, other_pair, strict=True):
            first, again = tensor[:, :, 0].float(), other_tensor[:, :, 0].float()
            # Far above rounding, which experts and kernels may cause, far below what a token does.
            bound = torch.finfo(tensor.dtype).eps ** 0.5 * float(first.abs().max())
            if float((first - again).abs().max()) > bound:
                raise _unsupported(
                    model, f"KV of layer {layer} that depends on later tokens", "causal attention"
                )


def _refuse_by_config(model: PreTrainedModel) -> None:
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise _unsupported(model, f"parameters on {', '.join(sorted(devices))}", "cpu")
    if model.config.is_encoder_decoder:
        raise _unsupported(model, "an encoder-decoder", "a decoder")
    # With these, the rotation of a token depends on the length of the whole sequence, so that
    # equal prefixes of prompts of unequal length have unequal keys.
    found = set(_rope_types(model.config.to_dict()))
    ropes = {name for name in found if "dynamic" in name or name == "longrope"}
    if ropes:
        raise _unsupported(
            model,
            f"rotary embeddings of type {', '.join(sorted(ropes))}",
            "keys that do not depend on the length of the whole prompt",
        )


def _plain_cache(model: PreTrainedModel) -> DynamicCache:
    try:
        cache = DynamicCache(config=model.config)
    except KeyError as error:
        raise _unsupported(model, f"cache layers of type {error}") from error
    others = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if others:
        raise _unsupported(model, f"{', '.join(sorted(others))}")
    return cache


def _unsupported(
    model: PreTrainedModel, found: str, expected: str = "DynamicLayer (full attention) only"
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"cannot reuse the KV of {type(model).__name__}: expected {expected}, found {found}"
    )


def _rope_types(value: object) -> Iterator[str]:
    """Yield every rope type that a configuration names, at any depth (some name one per layer)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == "rope_type" and isinstance(item, str):
                yield item
            else:
                yield from _rope_types(item)


def _config_text(model: PreTrainedModel) -> str:
    config = model.config.to_dict()
    facts = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    return json.dumps(facts, sort_keys=True)
