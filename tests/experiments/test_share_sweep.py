"""The sweep of shares: its rows, its file and its figure, at toy size."""

from __future__ import annotations

import json

import h5py
import pytest

from experiments import share_sweep
from plots import plot_share_sweep


@pytest.fixture
def toy(monkeypatch):
    words = "--trace embedded --documents 12 --context-tokens 600 --memory-tokens 1600 --nodes 3"
    monkeypatch.setattr(share_sweep, "WORKLOADS", {"power": words})


@pytest.mark.usefixtures("toy")
def test_a_sweep_is_recorded_judged_and_drawn(tmp_path, capsys):
    words = ["--workloads", "power", "--requests", "400", "--shares", "0", "0.75"]
    assert share_sweep.main([*words, "--output", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    none, most, adaptive = found["runs"]
    assert (none["share"], most["share"], adaptive["share"]) == (0.0, 0.75, -1.0)
    assert most["hit_ratio"] < none["hit_ratio"] < 1
    assert most["local_share"] > none["local_share"]
    verdict = found["verdicts"]["power"]
    assert verdict["best_share"] == 0.0
    assert verdict["adaptive_over_best"] == adaptive["ttft_s"] / none["ttft_s"] < 1.05

    with h5py.File(found["file"]) as file:
        assert file["runs/ttft_s"][:].tolist() == [row["ttft_s"] for row in found["runs"]]
        assert set(file["decisions/server"][:]) == {0, 1, 2}
        assert (file["decisions/recompute_s"][:] == share_sweep.TIMES["recompute"]).all()
        moved = (file["decisions/moved_bytes"][:] != 0).sum()
    assert moved == adaptive["move_count"]

    figure = tmp_path / "figure.png"
    assert plot_share_sweep.main([found["file"], "-o", str(figure)]) == 0
    assert figure.stat().st_size > 1000


def test_what_is_no_sweep_is_not_drawn(tmp_path, capsys):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.attrs["schema_version"] = 1
        file.create_group("runs")
    assert plot_share_sweep.main([str(tmp_path / "other.h5")]) == 1
    assert "expected results of share_sweep" in capsys.readouterr().err


def test_a_sweep_of_no_data_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PTSTORE_DATA", raising=False)
    assert share_sweep.main(["--workloads", "mooncake", "--output", str(tmp_path)]) == 2
    assert "PTSTORE_DATA" in capsys.readouterr().err
