"""What makes the KV of one vLLM engine interchangeable with another's: the names of namespaces.

Owns the collection of these facts. A fact too many costs a miss, one too few serves wrong KV, so
whatever may change a byte of a block is in: weights, configuration, dtypes, version, backend,
instruction set, layout, block size, parallel shard; and by request LoRA, images, cache salt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptstore_mpi.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "engine_identity",
    "folder_digest",
    "instruction_set",
    "request_identity",
    "weights_identity",
]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_DIGITS = 32


def engine_identity(
    vllm_config: Any, *, version: str, model_id: str, tensor_shape: str
) -> tuple[str, dict[str, str]]:
    """Return the model and the other facts of an engine, as `Store.namespace` takes them.

    Parameters
    ----------
    vllm_config
        vLLM's configuration of the engine.
    version
        Of vLLM.
    model_id
        Name of weights and revision; empty: a digest of the model's files.
    tensor_shape
        What a block looks like, `BlockPool.shape`.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    facts = {
        "engine": f"vllm-{version}",
        "config": _digest(_config_text(model)),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "backend": _backend(vllm_config),
        "instruction_set": instruction_set(model.dtype, cache.block_size),
        "tensors": tensor_shape,
        "block_tokens": str(cache.block_size),
        "tensor_parallel": f"{parallel.tensor_parallel_size}:{_tensor_rank()}",
    }
    return model_id or weights_identity(vllm_config), facts


def request_identity(request: Any) -> dict[str, str]:
    """Return what sets a request's KV apart from that of others with equal tokens.

    Images take their place by position and content, so a prompt matches where all of them agree.
    """
    facts: dict[str, str] = {}
    if request.cache_salt:
        facts["cache_salt"] = str(request.cache_salt)
    lora = request.lora_request
    if lora is not None:
        facts["lora"] = _lora_digest(lora.lora_name, lora.lora_path)
    if request.mm_features:
        facts["multimodal"] = json.dumps(
            [
                [item.identifier, item.mm_position.offset, item.mm_position.length]
                for item in request.mm_features
            ]
        )
    return facts


def instruction_set(dtype: torch.dtype, block_tokens: int) -> str:
    """Return what decides how a block is packed and computed on this processor or device."""
    import torch

    if torch.cuda.is_available():
        return "cuda-{}.{}".format(*torch.cuda.get_device_capability())
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:  # before 0.12 keys and values were not packed
        packing = "plain"
    else:
        packing = str(_get_attn_isa(dtype, block_tokens))
    return f"{torch.backends.cpu.get_cpu_capability()}/{packing}"


def folder_digest(folder: Path) -> str:
    """Return a digest of names and contents of a model's weight files, 32 hex digits.

    All bytes are read: a fine-tuned model may differ in few rows only. That is about 2 GB/s from
    the page cache, where the weights were just read from.

    Raises
    ------
    ConfigError
        The folder has no weight files.
    """
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    if not files:
        raise ConfigError(
            f"expected weights ({', '.join(_WEIGHTS)}) in {folder}, found none; set model_id in "
            "kv_connector_extra_config to a name of weights and revision"
        )
    state = hashlib.sha256()
    for file in files:
        stat = file.stat()
        seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        state.update(f"{file.name} {_file_digest(file, seen)};".encode())
    return state.hexdigest()[:_DIGITS]


@lru_cache
def _file_digest(file: Path, seen: tuple[int, ...]) -> str:
    """Return a file's digest, read once as long as it is ``seen`` to be as it was."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def weights_identity(vllm_config: Any) -> str:
    """Return what names an engine's weights: a digest of its files, or revision and name.

    Raises
    ------
    ConfigError
        A model of the hub without a revision, or a folder without weights.
    """
    model = vllm_config.model_config
    folder = Path(model.model)
    if str(vllm_config.load_config.load_format) == "dummy":
        return f"dummy-{model.seed}"
    if folder.is_dir():
        return f"files-{folder_digest(folder)}"
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if not commit:
        raise ConfigError(
            f"expected a folder, or a model of the hub with its revision, got {model.model!r}; "
            "set model_id in kv_connector_extra_config to a name of weights and revision"
        )
    return f"{model.model}@{commit}"


def _config_text(model: Any) -> str:
    config: Mapping[str, Any] = model.hf_config.to_dict()
    noise = ("_name_or_path", "_commit_hash", "transformers_version", "architectures")
    kept = {name: value for name, value in config.items() if name not in noise}
    # The length decides the rotation where it grows with the context.
    kept["max_model_len"] = model.max_model_len if _rotation_depends_on_length(config) else 0
    return json.dumps(kept, sort_keys=True, default=str)


def _rotation_depends_on_length(config: Mapping[str, Any]) -> bool:
    return any(name in json.dumps(config, default=str) for name in ("longrope", "dynamic"))


def _backend(vllm_config: Any) -> str:
    layers = vllm_config.compilation_config.static_forward_context.values()
    names = {
        getattr(layer, "attn_backend", None) or getattr(layer, "backend", None) for layer in layers
    } - {None}
    said = sorted(getattr(name, "__name__", None) or str(name) for name in names)
    return f"{vllm_config.device_config.device_type}/{','.join(said) or 'default'}"


def _tensor_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _lora_digest(name: str, path: str) -> str:
    """Return a digest of an adapter's files, looked at each time: they may be loaded in place."""
    folder = Path(path)
    if not folder.is_dir():
        return f"{name}@{path}"
    config = folder / "adapter_config.json"
    settings = _digest(config.read_text()) if config.is_file() else ""
    return f"{folder_digest(folder)}/{settings}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
