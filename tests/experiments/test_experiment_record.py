"""The result file: schema, units, life while the run goes on, names that are never reused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest
import synthetic_results as made

from experiments import record
from experiments.common import provenance

KILLED_PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests/experiments")
import synthetic_results as made
from experiments import record
file = record.ResultFile(Path(sys.argv[1]), "killed", made.ATTRIBUTES)
for batch in range(2):
    file.append(record.samples_of("vanilla"), [made.sample(batch, 1.0 + batch)])
    file.flush()
file.append(record.samples_of("vanilla"), [made.sample(2, 3.0)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_every_dataset_has_units_and_every_row_is_kept(tmp_path):
    path = made.write(tmp_path, made.usual_samples(), counters={"rma_bytes": 5.0})
    units = {}

    def visit(name, node):
        if isinstance(node, h5py.Dataset):
            units[name] = node.attrs["units"]

    with h5py.File(path) as file:
        file.visititems(visit)
        assert file["samples/ptstore/ttft_s"][:].tolist() == [8.0, 1.0, 2.0, 4.0]
        assert file["samples/ptstore/reason"].asstr()[:].tolist() == [""] * 4
        assert file.attrs["schema_version"] == record.SCHEMA_VERSION
        assert file.attrs["complete"]
    assert units["samples/ptstore/ttft_s"] == "s"
    assert units["samples/vanilla/asked_tokens"] == "tokens"
    assert units["batches/ptstore/counters/rma_bytes"] == "bytes"
    assert all(units.values())


def test_a_flushed_file_is_readable_while_it_grows(tmp_path, repository):
    reader = (
        "import pathlib, sys; from experiments.reading import open_results;"
        "print(len(open_results(pathlib.Path(sys.argv[1]))['samples/prefix/ttft_s']))"
    )
    table = record.samples_of("prefix")
    with record.ResultFile(tmp_path, "growing", {}) as file:
        for batch in range(3):
            file.append(table, [made.sample(batch, 1.0), made.sample(batch, 2.0)])
            file.flush()
            done = subprocess.run(
                [sys.executable, "-c", reader, str(file.part_path)],
                capture_output=True, text=True, check=True, cwd=repository,
            )  # fmt: skip
            assert int(done.stdout) == 2 * (batch + 1)


def test_the_file_of_a_killed_job_opens_and_holds_the_flushed_batches(tmp_path, repository):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_PROGRAM, str(tmp_path)], cwd=repository, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["killed.h5.part"]
    with h5py.File(tmp_path / "killed.h5.part", "r") as file:
        assert file["samples/vanilla/ttft_s"][:2].tolist() == [1.0, 2.0]
        assert not file.attrs["complete"]


def test_a_full_disk_is_named_before_it_damages_the_file(tmp_path, monkeypatch):
    with record.ResultFile(tmp_path, "full", {}) as file:
        file.append(record.samples_of("prefix"), [made.sample(0, 1.0)])
        monkeypatch.setattr(record, "LEAST_FREE_BYTES", 1 << 62)
        with pytest.raises(record.RecordError, match="bytes are free"):
            file.append(record.samples_of("prefix"), [made.sample(1, 1.0)])
        with pytest.raises(record.RecordError, match="bytes are free"):
            record.require_folder(tmp_path)
    with h5py.File(tmp_path / "full.h5.part", "r") as file:
        assert len(file["samples/prefix/ttft_s"]) == 1


def test_an_error_keeps_the_part_file(tmp_path):
    with pytest.raises(RuntimeError, match="boom"), record.ResultFile(tmp_path, "bad", {}):
        raise RuntimeError("boom")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.h5.part"]


def test_a_name_in_use_is_not_used_again(tmp_path):
    first = made.write(tmp_path, made.usual_samples(), stem="same")
    content = first.read_bytes()
    second = made.write(tmp_path, made.usual_samples(), stem="same")
    with record.ResultFile(tmp_path, "same", {}) as open_file:
        third = made.write(tmp_path, made.usual_samples(), stem="same")
        assert open_file.part_path.name == "same-3.h5.part"
    names = [path.name for path in (first, second, third)]
    assert names == ["same.h5", "same-2.h5", "same-4.h5"]
    assert first.read_bytes() == content


def test_a_file_that_took_the_final_name_meanwhile_is_not_overwritten(tmp_path):
    with record.ResultFile(tmp_path, "late", {}) as file:
        (tmp_path / "late.h5").write_text("somebody else's")
        with pytest.raises(FileExistsError):
            file.finish()
    assert (tmp_path / "late.h5").read_text() == "somebody else's"
    assert (tmp_path / "late.h5.part").exists()


def test_rows_must_have_the_columns(tmp_path):
    row = made.sample(0, 1.0)
    del row["ttft_s"]
    with (
        record.ResultFile(tmp_path, "odd", {}) as file,
        pytest.raises(
            ValueError, match=r"samples/vanilla: rows and columns differ in \['ttft_s'\]"
        ),
    ):
        file.append(record.samples_of("vanilla"), [row])


def test_a_counter_that_appears_late_is_nan_before(tmp_path):
    turn = {"batch": 0, "client": 0, "busy_s": 1.0}
    table = record.batches_of("ptstore")
    with record.ResultFile(tmp_path, "late-counter", {}) as file:
        file.append_counted(table, [turn], [{"a_count": 1.0}])
        file.append_counted(table, [turn], [{"a_count": 2.0, "b_bytes": 3.0}])
        file.append_counted(table, [turn], [{"b_bytes": 4.0}])
        path = file.finish()
    with h5py.File(path) as file:
        counters = file["batches/ptstore/counters"]
        np.testing.assert_array_equal(counters["a_count"][:], [1.0, 2.0, np.nan])
        np.testing.assert_array_equal(counters["b_bytes"][:], [np.nan, 3.0, 4.0])


def test_counters_are_flattened_and_subtracted():
    before = record.flatten_counters({"rma_bytes": 10, "hits": {"owned": 1}, "name": "x"})
    after = record.flatten_counters(
        {"rma_bytes": 25, "hits": {"owned": 3, "remote": 2}, "name": "x", "open": True}
    )
    assert before == {"rma_bytes": 10.0, "hits.owned": 1.0}
    assert record.difference(before, after) == {
        "rma_bytes": 15.0,
        "hits.owned": 2.0,
        "hits.remote": 2.0,
    }


def test_provenance_names_job_script_and_environment(tmp_path, monkeypatch):
    script = tmp_path / "job.pbs"
    script.write_text("#PBS -l select=1\n")
    monkeypatch.setenv("PBS_JOBID", "77.polaris")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    monkeypatch.setenv(provenance.JOB_SCRIPT_VARIABLE, str(script))
    facts = provenance.collect(
        config={"b": 1},
        seed=9,
        clients=[provenance.describe_host()],
        started_utc="20260101T000000Z",
    )
    assert facts["job_id"] == "77.polaris"
    assert len(facts["job_script_sha256"]) == 64
    assert json.loads(facts["environment"])["UCX_TLS"] == "tcp,self"
    assert "SECRET_TOKEN" not in facts["environment"]
    assert json.loads(facts["config"]) == {"b": 1}
    assert (facts["clients_count"], facts["seed"]) == (1, 9)
    assert facts["dirty"] in ("true", "false", "unknown")


def test_without_a_scheduler_the_job_is_local(monkeypatch):
    for name in ("PBS_JOBID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert provenance.job_id() == "local"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert provenance.job_id() == "12"
