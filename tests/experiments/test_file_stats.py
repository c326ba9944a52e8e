"""`ptstore stats` on files of known numbers, of real runs, and of others."""

from __future__ import annotations

import json
import sys

import h5py
import numpy as np
import pytest
from synthetic_results import usual_samples, write

from experiments import exp_trace_replay, record, report
from ptstore_mpi import cli

COUNTERS = {
    "bytes.rma_bytes": 50.0, "bytes.corrupt_count": 1.0, "transport.malformed_count": 0.0,
    "reasons.match.whole": 2.0, "reasons.match.cold": 0.0,
}  # fmt: skip


@pytest.fixture
def stats(capsys):
    """Return a function that runs the command with --json and returns its object."""

    def run(path):
        assert cli.main(["stats", str(path), "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line)

    return run


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, usual_samples(), counters=COUNTERS)


def test_sums_are_those_of_the_file(stats, path):
    with h5py.File(path, "r+") as file:
        group = file.create_group("servers/ptstore")
        group["server"], group["node"] = [0, 1], [0, 1]
        group["counters/owned_bytes"] = [100.0, 300.0]
        group["counters/lost_count"] = [0.0, 0.0]
    found = stats(path)
    assert list(found["systems"]) == ["vanilla", "prefix", "ptstore"]
    own = found["systems"]["ptstore"]
    assert own["requests"] == 4
    assert own["tokens"] == {
        "asked": 400,
        "engine": {"count": 0, "share": 0.0},
        "owned": {"count": 112, "share": 0.28},
        "replica": {"count": 0, "share": 0.0},
        "remote": {"count": 128, "share": 0.32},
        "disk": {"count": 0, "share": 0.0},
        "recomputed": {"count": 160, "share": 0.4},
    }
    assert own["bytes"] == {"rma_bytes": 100}  # of two clients
    assert own["counts"] == {"corrupt_count": 2, "malformed_count": 0}
    assert own["reasons"] == {"match": {"whole": 4}}
    assert own["servers"] == {
        "count": 2,
        "counters": {
            "lost_count": {"sum": 0, "max": 0, "max_over_mean": None},
            "owned_bytes": {"sum": 400, "max": 300, "max_over_mean": 1.5},
        },
    }
    assert found["systems"]["prefix"]["servers"]["count"] == 0
    assert (found["transport"], found["complete"]) == (
        {"name": "mpi", "reason": "asked for"},
        True,
    )
    assert "replica_share" not in found


def test_the_text_says_the_same(path, capsys):
    with h5py.File(path, "r+") as file:
        file["replica_share/ptstore/share"] = [0.25, 0.5]
        file["replica_share/ptstore/why"] = np.array([b"pressure", b"skew"])
        file.attrs["complete"] = False
    assert cli.main(["stats", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "incomplete" in shown
    assert "owned 112 (28.0%)" in shown
    assert "bytes: rma_bytes 100" in shown
    assert "reasons, match: whole 4" in shown
    assert shown.endswith(
        "ptstore: decisions on the replicas' share\n"
        "    share       why\n"
        "    0.25   pressure\n"
        "    0.50       skew\n"
    )


def test_of_a_replay(stats, tmp_path, capsys):
    arguments = ["--requests", "30", "--nodes", "2", "--memory-tokens", "3000", "--json"]
    assert exp_trace_replay.main([*arguments, "--output", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    found = stats(report.find_file(tmp_path))
    (own,) = found["systems"].values()
    assert own["tokens"]["remote"]["count"] == summary["tokens"]["remote"]
    assert own["bytes"]["sent_bytes"] == summary["bytes"]["loaded_from_other_nodes"]
    assert own["reasons"]["store"] == summary["stores"]
    assert own["servers"]["count"] == 2
    assert own["servers"]["counters"]["evicted_count"]["sum"] > 0
    assert found["transport"]["name"] == "sim"


def test_a_file_that_cannot_be_read_is_refused_by_name(path, tmp_path, capsys):
    text = tmp_path / "text.h5"
    text.write_text("no HDF5")
    foreign = tmp_path / "foreign.h5"
    with h5py.File(foreign, "w") as file:
        file["samples/x"] = [1]
    newer = write(tmp_path, usual_samples(), stem="newer")
    with h5py.File(newer, "r+") as file:
        file.attrs["schema_version"] = record.SCHEMA_VERSION + 1
    odd = write(tmp_path, usual_samples(), stem="odd")
    with h5py.File(odd, "r+") as file:
        file["samples/ptstore/owned_tokens"][0] = 5
    hollow = write(tmp_path, usual_samples(), stem="hollow")
    with h5py.File(hollow, "r+") as file:
        del file["samples/ptstore/asked_tokens"]
    for wrong, complaint in (
        (tmp_path / "none.h5", "there is no such file"),
        (tmp_path, "is a folder"),
        (text, "not a readable HDF5 file"),
        (foreign, "expected a results file with schema_version"),
        (newer, "expected schema_version 1, found"),
        (odd, "add up to the 400 asked for"),
        (hollow, "damaged, or not as expected"),
    ):
        assert cli.main(["stats", str(wrong)]) == 1
        shown = capsys.readouterr()
        assert shown.err.startswith(f"{wrong}: ")
        assert complaint in shown.err
        assert not shown.out


def test_without_h5py_it_says_what_to_install(path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert cli.main(["stats", str(path)]) == 2
    assert "pip install 'ptstore-mpi[experiments]'" in capsys.readouterr().err
