"""experiments/README.md against files of all drivers, and its code run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys

import h5py
import pytest
import vllm_stand_in

from experiments import (
    exp_fan_out,
    exp_microbench,
    exp_qa_replay,
    exp_trace_replay,
    exp_vllm_ttft,
    record,
)
from experiments.fan_out import tables as fan_out_tables
from experiments.microbench import measure
from experiments.trace_replay import tables as replay_tables
from experiments.vllm_overhead import tables as overhead_tables
from experiments.vllm_ttft import tables as vllm_tables
from ptstore_mpi.testing.launching import find_mpiexec, run_ranks

TOY = [
    "--dataset", "embedded", "--context-tokens", "64", "--documents", "2", "--requests", "4",
    "--batch", "2", "--threads", "1", "--memory-bytes-per-node", "16MiB",
]  # fmt: skip
QUICK = ["--quick", "--repeats", "1"]


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "experiments" / "README.md").read_text()


@pytest.fixture(scope="module")
def results(tmp_path_factory, model_folder):
    """Return a folder with results of all drivers."""
    folder = tmp_path_factory.mktemp("run")
    output = ["--output", str(folder / "results")]
    assert exp_qa_replay.main([*TOY, "--model", str(model_folder), *output]) == 0
    assert exp_trace_replay.main(["--requests", "20", "--nodes", "2", *output]) == 0
    assert exp_fan_out.main(["--nodes", "2", "--loads", "2", *output]) == 0
    short = ["--dataset", "embedded", "--context-tokens", "64", "--model", str(model_folder)]
    stand_in = vllm_stand_in.open_stand_in
    assert exp_vllm_ttft.main([*short, *output], open_engine=stand_in) == 0
    assert exp_microbench.main(["alone", *QUICK, *output]) == 0
    if find_mpiexec() is not None:
        program = ["-m", "experiments.exp_microbench", "messages", *QUICK, *output]
        done = run_ranks(program, ranks=2)
        assert done.returncode == 0, done.stderr
        program = ["-m", "tests.experiments.vllm_overhead_stand_in", *short, *output]
        done = run_ranks(program, ranks=3)
        assert done.returncode == 0, done.stderr
    return folder


def names_before_text(page, *, first, last):
    """Return what stands between backticks from one place of the page to another."""
    part = page[page.index(first) : page.index(last)]
    return set(re.findall(r"`([a-z]\w*)`", part))


def test_the_columns_are_those_of_the_files(page, results):
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w ]+) \|", page, re.MULTILINE)
    samples, batches = record.SAMPLE_COLUMNS, record.BATCH_COLUMNS
    names = ("REQUESTS", "OWNERS", "SERVERS", "DECISIONS", "CEILINGS")
    replayed = [getattr(replay_tables, name) for name in names]
    fan_out = [getattr(fan_out_tables, name) for name in ("RUNS", "NODES", "LOADS")]
    servers, answers = record.SERVER_COLUMNS, vllm_tables.SAMPLE_COLUMNS
    overhead = [overhead_tables.SAMPLE_COLUMNS, overhead_tables.BATCH_COLUMNS]
    tables = [
        samples,
        batches,
        servers,
        answers,
        *overhead,
        *(table.columns for table in (measure.MEASUREMENTS, *replayed, *fan_out)),
    ]
    wanted = [(name, *kind) for table in tables for name, kind in table.items()]
    assert sorted(rows) == sorted(wanted)
    (path,) = (results / "results" / "exp_qa_replay").glob("*.h5")
    with h5py.File(path) as file:
        assert set(file["samples/ptstore"]) == set(samples)
        assert set(file["batches/ptstore"]) == {*batches, "counters"}
        assert set(file["servers/ptstore"]) == {*servers, "counters"}
    (path,) = (results / "results" / "exp_trace_replay").glob("*.h5")
    with h5py.File(path) as file:
        assert [set(file[table.name]) for table in replayed] == [set(t.columns) for t in replayed]
    (path,) = (results / "results" / "exp_fan_out").glob("*.h5")
    with h5py.File(path) as file:
        assert [set(file[table.name]) for table in fan_out] == [set(t.columns) for t in fan_out]
    (path,) = (results / "results" / "exp_vllm_ttft").glob("*.h5")
    with h5py.File(path) as file:
        assert {frozenset(group) for group in file["samples"].values()} == {frozenset(answers)}
    for path in (results / "results" / "exp_vllm_overhead").glob("*.h5"):
        with h5py.File(path) as file:
            tables = ("samples/connector", "batches/connector")
            found = [set(file[name]) - {"counters"} for name in tables]
            assert found == [set(columns) for columns in overhead]


def test_the_attributes_are_those_of_the_files(page, repository, results):
    explained = names_before_text(page, first="## Attributes", last="## Before you believe")
    found = set()
    for path in results.rglob("*.h5"):
        with h5py.File(path) as file:
            found |= set(file.attrs)
    # Some of the words there are values of an attribute, or drivers.
    assert found <= explained
    drivers = {path.stem for path in (repository / "experiments").glob("exp_*.py")}
    assert explained - found <= {*drivers, "local", "none", "true", "unknown"}


def test_the_references_are_those_of_the_microbenchmarks(page, repository, results):
    rows = re.findall(r"^\| `\w+` \| `(\w+)[^|]* \| .* \| (.*) \|$", page, re.MULTILINE)
    for path in (results / "results" / "exp_microbench").glob("*.h5"):
        with h5py.File(path) as file:
            names = [re.match(r"\w+", name)[0] for name in file["measurements/name"].asstr()]
            assert set(zip(names, file["measurements/against"].asstr(), strict=True)) <= set(rows)
    parts = (repository / "experiments" / "microbench").glob("*.py")
    source = "\n".join(path.read_text() for path in parts)
    for name, against in rows:  # those of the parts that were not run too
        assert re.search(rf'"{name}["/]', source)
        assert f'"{against}"' in source


def test_the_code_runs(page, results):
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=results, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^0 +\d+\.\d+$", done.stdout, re.MULTILINE), done.stdout
