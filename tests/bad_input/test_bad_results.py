"""Result files that are truncated, foreign, incomplete or contradict themselves."""

from __future__ import annotations

import importlib
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from refusals import REPOSITORY, check_refusal, refused

h5py = pytest.importorskip("h5py", reason="results are HDF5")
pytest.importorskip("matplotlib", reason="figures need matplotlib")
sys.path.insert(0, str(REPOSITORY / "tests" / "experiments"))
made = importlib.import_module("synthetic_results")
sys.path.pop(0)

from experiments import record, report, report_microbench  # noqa: E402
from experiments.microbench.measure import MEASUREMENTS  # noqa: E402
from plots import plot_microbench, plot_qa_replay  # noqa: E402
from plots.results_file import PlotError  # noqa: E402


def kind(name, *values):
    return pytest.param(*values, id=name)


def write_results(folder):
    return made.write(folder, made.usual_samples(), counters={"rma_bytes": 5.0})


def write_measurements(folder):
    row = {"name": "load", "parameter": "size_bytes", "value": 4096, "repeat": 0, "ours": 2.0,
           "reference": 4.0, "unit": "bytes/s", "against": "memcpy"}  # fmt: skip
    attributes = {"experiment": "exp_microbench", "run": "one"}
    with record.ResultFile(folder, "measured", attributes) as file:
        file.append(MEASUREMENTS, [row, row])
        return file.finish()


def change(path, edit):
    with h5py.File(path, "r+") as file:
        edit(file)


def replace(name, value):
    def edit(file):
        del file[name]
        file[name] = value

    return lambda path: change(path, edit)


def remove(name):
    return lambda path: change(path, lambda file: file.pop(name))


def attribute(name, value):
    return lambda path: change(path, lambda file: file.attrs.__setitem__(name, value))


def foreign(path):
    with h5py.File(path, "w") as file:
        file["numbers"] = [1, 2]


TTFT = "samples/ptstore/ttft_s"
DAMAGES = [
    kind("text", lambda path: path.write_text("no HDF5"), "not a readable HDF5 file"),
    kind("empty", lambda path: path.write_bytes(b""), "not a readable HDF5 file"),
    kind("truncated", lambda path: path.write_bytes(path.read_bytes()[:-5000]), "not a readable"),
    kind("foreign", foreign, "some other HDF5 file|schema_version"),
    kind("future", attribute("schema_version", 99), "schema_version 1, found 99"),
    kind("version_text", attribute("schema_version", "one"), "schema_version 1, found one"),
    kind("version_list", attribute("schema_version", [1, 1]), "schema_version.*found"),
    kind("no_samples", remove("samples"), "samples"),
    kind("samples_are_no_group", replace("samples", [1.0]), "samples"),
    kind("column_missing", remove(TTFT), "ptstore.*ttft_s"),
    kind("column_group", replace(TTFT, h5py.Empty("f8")), "ptstore.*ttft_s"),
    kind("column_long", replace(TTFT, [1.0] * 5), r"equally long columns, found .*'ttft_s': 5"),
    kind("column_2d", replace(TTFT, np.ones((4, 2))), r"ttft_s': expected one axis.*\(4, 2\)"),
    kind("column_scalar", replace(TTFT, 1.0), "ptstore.*ttft_s"),
    kind("column_text", replace(TTFT, ["a"] * 4), "ttft_s': expected one axis"),
    kind("column_complex", replace(TTFT, np.ones(4, complex)), "ttft_s': expected one axis"),
    kind("time_zero", replace(TTFT, [1.0, 0.0, 1.0, 1.0]), r"ttft_s above 0.*found 0\.0"),
    kind("time_nan", replace(TTFT, [1.0, np.nan, 1.0, 1.0]), "ttft_s above 0.*found nan"),
    kind("system_is_no_group", replace("samples/ptstore", [1]), "."),
]
REPORTED = [
    kind("no_rows", lambda path: change(path, lambda file: [file[f"samples/ptstore/{n}"].resize(
        (0,)) for n in record.SAMPLE_COLUMNS]), "expected at least one row"),
    kind("tokens_floats", replace("samples/ptstore/asked_tokens", [100.0] * 4), "type i8.*float64"),
    kind("reason_numbers", replace("samples/ptstore/reason", [1, 2, 3, 4]), "'reason'"),
    kind("tokens_do_not_add_up", replace("samples/ptstore/asked_tokens", [99] * 4), "add up to"),
    kind("no_batches", remove("batches/ptstore"), "batches/ptstore: expected a group, found none"),
    kind("batches_of_other_lengths", replace("batches/ptstore/busy_s", [1.0]), "equally long"),
    kind("counter_text", replace("batches/ptstore/counters/rma_bytes", ["a", "b"]), "rma_bytes"),
    kind("no_systems", attribute("systems", "evo"), r"expected samples of \['evo'\], found none"),
    kind("systems_list", attribute("systems", [1, 2]), "'systems': expected one value"),
    kind("bytes_per_token", attribute("bytes_per_token", "many"), r"number of bytes, found 'many'"),
    kind("of_another_experiment", attribute("experiment", "exp_microbench"), "measurements"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), [*DAMAGES, *REPORTED])
def test_results_that_cannot_be_reported(tmp_path, capsys, damage, said):
    path = write_results(tmp_path)
    damage(path)
    assert report.main([str(path)]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(str(path))
    assert re.search(said, shown.err), shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


DRAWN = [
    kind("share_negative", replace("samples/ptstore/match_s", [1.0, 1.0, 1.0, -1.0]), "match_s"),
    kind("share_infinite", replace("samples/ptstore/load_s", [1.0, 1.0, 1.0, np.inf]), "load_s"),
    kind("no_system_known", attribute("schema_version", 1), "expected samples of vanilla"),
]


@pytest.mark.parametrize(("damage", "said"), [*DAMAGES, *DRAWN])
def test_results_that_cannot_be_drawn(tmp_path, damage, said):
    path = write_results(tmp_path)
    if "vanilla" in said:
        for name in ("vanilla", "prefix", "ptstore"):
            remove(f"samples/{name}")(path)
    damage(path)
    refused(lambda: plot_qa_replay.read(path), PlotError, f"^{re.escape(str(path))}", said)


OURS = "measurements/ours"
MEASURED = [
    kind("truncated", lambda path: path.write_bytes(path.read_bytes()[:-900]), "not a readable"),
    kind("foreign", foreign, "some other HDF5 file|schema_version"),
    kind("column_missing", remove(OURS), "measurements.*'ours'"),
    kind("column_long", replace(OURS, [1.0] * 3), "equally long columns"),
    kind("column_text", replace(OURS, ["a", "b"]), "'ours': expected one axis"),
    kind("nothing_measured", replace(OURS, [1.0, 0.0]), "ours.*above 0"),
    kind("names_numbers", replace("measurements/name", [1, 2]), "'name'"),
]
UNKNOWN = kind("parameter", replace("measurements/parameter", ["pages", "pages"]), "found .'pages'")


@pytest.mark.parametrize(("damage", "said"), [*MEASURED, UNKNOWN])
def test_measurements_that_cannot_be_reported(tmp_path, capsys, damage, said):
    path = write_measurements(tmp_path)
    damage(path)
    assert report.main([str(path)]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(str(path))
    assert re.search(said, shown.err), shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(("damage", "said"), MEASURED)
def test_measurements_that_cannot_be_drawn(tmp_path, damage, said):
    path = write_measurements(tmp_path)
    damage(path)
    refused(lambda: plot_microbench.read(path), PlotError, f"^{re.escape(str(path))}", said)


def test_a_broken_neighbour_does_not_stop_the_report_of_a_run(tmp_path, capsys):
    """Other files of the folder are looked at: what is broken there is said, and left out."""
    path = write_measurements(tmp_path)
    (tmp_path / "broken.h5").write_text("no HDF5")
    assert report_microbench.files_of_run(path) == [path]
    assert plot_microbench.read(tmp_path) == {"load": {4096: [0.5, 0.5]}}
    shown = capsys.readouterr().err
    assert shown.count("broken.h5") == 2


COLUMNS = ("ttft_s", "match_s", "asked_tokens", "owned_tokens", "reason", "request", "same_token")
SHAPES = arrays.array_shapes(min_dims=0, max_dims=2, max_side=5)
DATA = st.one_of(
    arrays.arrays(st.sampled_from(["f8", "f4", "i8", "u1", "i1", "?", "c16", "S3"]), SHAPES),
    arrays.arrays("f8", 4),
    arrays.arrays("i8", 4),
    st.just(None),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the bytes of a good result file, and where a changed one can be put."""
    folder = tmp_path_factory.mktemp("any-results")
    path = write_results(folder)
    return path.read_bytes(), path


def reported_or_refused(path):
    for read in (summaries, plot_qa_replay.read):
        try:
            read(path)
        except (report.ReportError, PlotError) as error:
            check_refusal(error, str(path))


def summaries(path):
    with report.open_results(path) as file:
        return report.summarise(file)


@settings(max_examples=80)
@given(length=st.floats(0, 1))
def test_any_truncated_file(written, length):
    data, path = written
    path.write_bytes(data[: int(length * (len(data) - 1))])
    reported_or_refused(path)


@settings(max_examples=80)
@given(system=st.sampled_from(["vanilla", "ptstore"]), name=st.sampled_from(COLUMNS), values=DATA)
def test_any_column(written, system, name, values):
    data, path = written
    path.write_bytes(data)
    full = f"samples/{system}/{name}"
    (remove(full) if values is None else replace(full, values))(path)
    reported_or_refused(path)


ATTRIBUTES = ("schema_version", "experiment", "systems", "dtype", "bytes_per_token", "complete")
VALUES = st.one_of(
    st.integers(-9, 9), st.floats(), st.text(st.characters(codec="ascii", exclude_characters="\0")),
    arrays.arrays("f8", SHAPES), st.booleans(),
)  # fmt: skip


@settings(max_examples=60)
@given(name=st.sampled_from(ATTRIBUTES), value=VALUES)
def test_any_attribute(written, name, value):
    data, path = written
    path.write_bytes(data)
    attribute(name, value)(path)
    reported_or_refused(path)
