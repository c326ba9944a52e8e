"""The report on files whose numbers are known by hand, and on files that are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import h5py
import pytest
import synthetic_results as made

from experiments import report

KEYS = [
    "system", "requests", "ttft_s", "match_s", "load_s", "prefill_s", "store_s", "requests_per_s",
    "tokens", "speedup_by_source", "rma_bytes", "outputs_equal",
]  # fmt: skip


def summaries(path):
    with report.open_results(path) as file:
        return {row["system"]: row for row in report.summarise(file)}


def test_the_numbers_of_a_known_file(tmp_path):
    path = made.write(tmp_path, made.usual_samples(), counters={"rma_bytes": 6_400.0})
    rows = summaries(path)
    assert list(rows) == ["vanilla", "prefix", "ptstore"]
    own = rows["ptstore"]
    assert list(own) == KEYS
    assert own["requests"] == 4
    assert own["ttft_s"] == pytest.approx({"p50": 3.0, "p90": 6.8, "p99": 7.88, "mean": 3.75})
    assert own["load_s"]["mean"] == pytest.approx(0.0975)
    assert own["tokens"] == {
        "asked": 400, "engine": 0, "owned": 112, "replica": 0, "remote": 128, "disk": 0,
        "recomputed": 160,
    }  # fmt: skip
    # Request 2 took 80 tokens from remote and 16 from owned: it counts as remote.
    assert own["speedup_by_source"] == {"owned": 8.0, "remote": 3.0}
    assert rows["prefix"]["speedup_by_source"] == {"engine": 8.0}
    assert rows["vanilla"]["speedup_by_source"] == {}
    # Four requests in the 4 s of the slower client.
    assert own["requests_per_s"] == 1.0
    assert [row["rma_bytes"] for row in rows.values()] == [0, 0, 12_800]
    assert [row["outputs_equal"] for row in rows.values()] == [True, True, True]


@pytest.mark.parametrize(
    "change",
    [{"same_token": 0}, {"max_abs_logit_diff": 1.1e-3}, {"max_abs_logit_diff": float("nan")}],
)
def test_one_differing_request_makes_outputs_differ(tmp_path, change):
    samples = made.usual_samples()
    samples["ptstore"][2] |= change
    rows = summaries(made.write(tmp_path, samples))
    assert rows["ptstore"]["outputs_equal"] is False
    assert rows["prefix"]["outputs_equal"] is True


@pytest.mark.parametrize(("same_token", "equal"), [(1, True), (0, False)])
def test_where_there_were_no_logits_tokens_decide(tmp_path, capsys, same_token, equal):
    samples = made.usual_samples()
    for row in samples["ptstore"]:
        row["max_abs_logit_diff"] = float("nan")
    samples["ptstore"][2]["same_token"] = same_token
    path = made.write(tmp_path, samples)
    with h5py.File(path, "r+") as file:
        file.attrs["compared"] = "tokens"
    assert summaries(path)["ptstore"]["outputs_equal"] is equal
    assert report.main([str(path)]) == 0
    assert "there are no logits" in capsys.readouterr().out


def test_a_difference_of_the_limit_is_equal(tmp_path):
    samples = made.usual_samples()
    samples["ptstore"][2]["max_abs_logit_diff"] = report.LOGIT_DIFFERENCE_LIMIT
    assert summaries(made.write(tmp_path, samples))["ptstore"]["outputs_equal"] is True


def test_without_vanilla_nothing_is_compared(tmp_path):
    samples = made.usual_samples()
    del samples["vanilla"]
    rows = summaries(made.write(tmp_path, samples))
    assert rows["ptstore"]["outputs_equal"] is None
    assert rows["ptstore"]["speedup_by_source"] == {}


def test_tokens_that_do_not_add_up_are_refused(tmp_path):
    samples = made.usual_samples()
    samples["prefix"][2]["recomputed_tokens"] = 5
    with pytest.raises(
        report.ReportError, match=r"prefix, request 2: .*add up to 101, asked .*100"
    ):
        summaries(made.write(tmp_path, samples))


def test_a_folder_means_its_newest_file(tmp_path):
    old = made.write(tmp_path / "a", made.usual_samples(), stem="old")
    new = made.write(tmp_path / "b", made.usual_samples(), stem="new")
    for age_s, path in ((20, old), (10, new)):
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    assert report.find_file(tmp_path) == new
    assert report.find_file(old) == old


def test_the_command_prints_one_json_object_per_system_and_line(tmp_path, repository):
    made.write(tmp_path, made.usual_samples())
    done = subprocess.run(
        [sys.executable, "-m", "experiments.report", str(tmp_path), "--json"],
        cwd=repository, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(row) for row in rows] == [KEYS] * 3


def test_the_table_says_what_was_measured(tmp_path, capsys):
    path = made.write(tmp_path, made.usual_samples(), counters={"rma_bytes": 6_400.0})
    assert report.main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "owned 8.0x, remote 3.0x" in shown
    assert "12,800 bytes by RMA; 128 remote tokens x 100 bytes = 12,800, and 0 discarded" in shown
    assert "transport mpi: asked for" in shown
    assert "incomplete" not in shown


def damage(path, kind):
    if kind == "text":
        path.write_text("no HDF5 at all")
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:3000])
    elif kind == "foreign":
        with h5py.File(path, "w") as file:
            file["numbers"] = [1, 2]
    elif kind == "future":
        with h5py.File(path, "r+") as file:
            file.attrs["schema_version"] = 99
    else:
        with h5py.File(path, "r+") as file:
            del file["samples/prefix/ttft_s"]


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("text", "not a readable HDF5 file"),
        ("truncated", "not a readable HDF5 file"),
        ("foreign", "some other HDF5 file"),
        ("future", "expected schema_version 1, found 99"),
        ("column", "samples of prefix"),
    ],
)
def test_what_is_no_result_file_is_named(tmp_path, capsys, kind, complaint):
    path = made.write(tmp_path, made.usual_samples())
    damage(path, kind)
    assert report.main([str(path)]) == 1
    shown = capsys.readouterr()
    assert str(path) in shown.err
    assert complaint in shown.err
    assert shown.out == ""


def test_nothing_there_is_said(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 1
    assert "found none" in capsys.readouterr().err
    assert report.main([str(tmp_path / "gone")]) == 1
    assert "no such file or folder" in capsys.readouterr().err
