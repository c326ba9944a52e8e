"""The figure is drawn from HDF5 alone, and what cannot be drawn is named."""

from __future__ import annotations

import os
import subprocess
import sys

import h5py
import pytest
import synthetic_results as made

pytest.importorskip("matplotlib", reason="figures need matplotlib")


def plot(repository, *arguments):
    return subprocess.run(
        [sys.executable, str(repository / "plots" / "plot_qa_replay.py"), *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("systems", [("vanilla", "prefix", "ptstore"), ("ptstore",)])
def test_a_figure_is_drawn_and_n_is_said(tmp_path, repository, systems):
    samples = {name: made.usual_samples()[name] for name in systems}
    path = made.write(tmp_path, samples)
    done = plot(repository, path)
    assert done.returncode == 0, done.stderr
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "ptstore: n = 4, TTFT median 3.000 s" in done.stdout
    assert done.stderr == ""


def test_the_output_can_be_named(tmp_path, repository):
    path = made.write(tmp_path, made.usual_samples())
    assert plot(repository, path, "-o", tmp_path / "figure.pdf").returncode == 0
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["nowhere/figure.png", "figure.txtx", ""])
def test_an_output_that_cannot_be_is_named(tmp_path, repository, name):
    path = made.write(tmp_path, made.usual_samples())
    done = plot(repository, path, "-o", tmp_path / name)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(tmp_path / name) in done.stderr


def test_a_folder_means_its_newest_file_and_the_module_form_works(tmp_path, repository):
    old = made.write(tmp_path / "a", made.usual_samples(), stem="old")
    os.utime(old, (1e9, 1e9))
    new = made.write(tmp_path / "b", made.usual_samples(), stem="new")
    done = subprocess.run(
        [sys.executable, "-m", "plots.plot_qa_replay", str(tmp_path)],
        cwd=repository, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"figure: {new.with_suffix('.png')}" in done.stdout
    assert not old.with_suffix(".png").exists()
    (tmp_path / "empty").mkdir()
    assert "found none" in plot(repository, tmp_path / "empty").stderr


def test_other_files_and_other_schemas_are_refused(tmp_path, repository):
    path = made.write(tmp_path, made.usual_samples())
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = 2
    done = plot(repository, path)
    assert done.returncode == 1
    assert "expected samples with schema_version 1, found 2" in done.stderr
    path.write_text("text")
    assert "not a readable HDF5 file" in plot(repository, path).stderr
