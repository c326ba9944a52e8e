"""Traces whose lines are not what they should be, options and results of the trace replay."""

from __future__ import annotations

import gzip
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import check_refusal, refused

h5py = pytest.importorskip("h5py", reason="results are HDF5")
pytest.importorskip("matplotlib", reason="figures need matplotlib")

from experiments import exp_trace_replay, report  # noqa: E402
from experiments.common.datasets import DatasetError  # noqa: E402
from experiments.common.options import UsageError  # noqa: E402
from experiments.trace_replay.options import parse_options  # noqa: E402
from experiments.traces import load_trace  # noqa: E402
from plots import plot_trace_replay  # noqa: E402
from plots.results_file import PlotError  # noqa: E402


def kind(name, *values):
    return pytest.param(*values, id=name)


TURN = {"t": 0.0, "in": 100, "out": 1, "keep": 0, "add": [1, 1]}
GOOD = {
    "mooncake": {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]},
    "claude_code": {
        "id": "a", "block_size": 64, "tool_tokens": 64, "system_tokens": 0, "requests": [TURN]
    },
    "lmcache_agent": {
        "agent": "a", "session": "s",
        "requests": [{"ts": 0, "keep": 0, "add": "A text.", "output": ""}],
    },
}  # fmt: skip


def changed(name, **changes):
    """Return a good row with other values; of a request where the name of a value is ``r_...``."""
    row = json.loads(json.dumps(GOOD[name]))
    for key, value in changes.items():
        target = row["requests"][0] if key.startswith("r_") else row
        target[key.removeprefix("r_")] = value
    return row


WHOLE = "expected a whole number in"
LINES = [
    kind("mooncake_ids_missing", "mooncake", {"timestamp": 0}, "expected list 'hash_ids'"),
    kind("mooncake_few_ids", "mooncake", changed("mooncake", hash_ids=[0]),
         "expected 2 ids of 512 tokens for 'input_length' 600, found 1"),
    kind("mooncake_id_text", "mooncake", changed("mooncake", hash_ids=[0, "1"]),
         r"'hash_ids'\[1\]: expected a whole number .*found '1'"),
    kind("mooncake_id_huge", "mooncake", changed("mooncake", hash_ids=[0, 2**32]), r"\[1\]"),
    kind("mooncake_id_bool", "mooncake", changed("mooncake", hash_ids=[True, 1]), r"\[0\].*True"),
    kind("mooncake_length_0", "mooncake", changed("mooncake", input_length=0),
         f"'input_length': {WHOLE} 1 .*found 0"),
    kind("mooncake_length_huge", "mooncake", changed("mooncake", input_length=10**9), WHOLE),
    kind("mooncake_length_float", "mooncake", changed("mooncake", input_length=6e2), WHOLE),
    kind("mooncake_time", "mooncake", changed("mooncake", timestamp=-1), "'timestamp': expected"),
    kind("mooncake_time_nan", "mooncake", changed("mooncake", timestamp=float("nan")), "found nan"),
    kind("mooncake_output", "mooncake", changed("mooncake", output_length=None), "'output_length'"),
    kind("claude_keep", "claude_code", changed("claude_code", r_keep=1),
         "request 0: 'keep': expected at most 0, found 1"),
    kind("claude_add_odd", "claude_code", changed("claude_code", r_add=[1]), "pairs of start"),
    kind("claude_add_text", "claude_code", changed("claude_code", r_add="11"), "pairs of start"),
    kind("claude_add_start", "claude_code", changed("claude_code", r_add=[-1, 1]), "'start'"),
    kind("claude_add_far", "claude_code", changed("claude_code", r_add=[10**7, 1]), "ids below"),
    kind("claude_in", "claude_code", changed("claude_code", r_in=128),
         "expected 2 blocks of 64 tokens for 'in' 128, found 1"),
    kind("claude_time", "claude_code", changed("claude_code", r_t="0"), "'t': expected a time"),
    kind("claude_tools", "claude_code", changed("claude_code", tool_tokens=-1), "'tool_tokens'"),
    kind("claude_size", "claude_code", changed("claude_code", block_size=0), "'block_size'"),
    kind("claude_other_size", "claude_code", changed("claude_code", block_size=32),
         "'block_size': expected 64 as before, found 32"),
    kind("claude_request", "claude_code", changed("claude_code", requests=[5]), "an object"),
    kind("claude_sub", "claude_code",
         changed("claude_code", requests=[{"t": 0, "sub": 5}]), "expected list 'sub', found int"),
    kind("lmcache_keep", "lmcache_agent", changed("lmcache_agent", r_keep=3), "at most 0, found 3"),
    kind("lmcache_add", "lmcache_agent", changed("lmcache_agent", r_add=3), "expected str 'add'"),
    kind("lmcache_empty", "lmcache_agent", changed("lmcache_agent", r_add=""), "an empty text"),
    kind("lmcache_surrogate", "lmcache_agent", changed("lmcache_agent", r_add="\ud800"), "Unicode"),
    kind("lmcache_output", "lmcache_agent", changed("lmcache_agent", r_output=None), "'output'"),
    kind("lmcache_request", "lmcache_agent", changed("lmcache_agent", requests=[[]]), "an object"),
    kind("no_json", "mooncake", "{", "expected one JSON object"),
    kind("list", "claude_code", [], "expected a JSON object, found list"),
]  # fmt: skip


def write(folder, *rows):
    path = folder / "trace.jsonl.gz"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    return str(path)


@pytest.mark.parametrize(("name", "row", "said"), LINES)
def test_lines(tmp_path, name, row, said):
    path = write(tmp_path, GOOD[name], row)
    refused(lambda: load_trace(name, path=path), DatasetError,
            f"^{re.escape(path)}: line 2: .*{said}")  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_trace_without_requests(tmp_path, name):
    path = write(tmp_path)
    refused(lambda: load_trace(name, path=path), DatasetError, f"{name}: expected a request")


def test_sub_agents_without_end(tmp_path):
    nested = {"t": 0, "tool_tokens": 0, "system_tokens": 0, "sub": [TURN]}
    for _ in range(20):
        nested = {"t": 0, "tool_tokens": 0, "system_tokens": 0, "sub": [nested]}
    path = write(tmp_path, changed("claude_code", requests=[nested]))
    refused(
        lambda: load_trace("claude_code", path=path), DatasetError, "line 1: .*at most 8 nested"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=150)
@given(name=st.sampled_from(list(GOOD)), data=st.data())
def test_any_line(tmp_path_factory, name, data):
    """A trace, or an error that names the file and the line."""
    row = changed(name)
    target = row["requests"][0] if "requests" in row and data.draw(st.booleans()) else row
    target[data.draw(st.sampled_from(list(target)))] = data.draw(JSON)
    folder = tmp_path_factory.getbasetemp() / "any-trace"
    folder.mkdir(exist_ok=True)
    path = write(folder, row)
    try:
        trace = load_trace(name, path=path)
    except DatasetError as error:
        check_refusal(error, f"^({re.escape(path)}: line 1|{name}: expected a request)")
    else:
        assert all(len(trace.prompt(each)) == each.prompt_tokens for each in trace.requests)


OPTIONS = [
    kind("trace", ["--trace", "moon"], "--trace: invalid choice: 'moon'"),
    kind("path", ["--path", "x"], "--path is for --trace mooncake.*given with 'generated'"),
    kind("popularity", ["--popularity", "zipf:1"], "--popularity is for --trace squad"),
    kind("documents", ["--trace", "mooncake", "--documents", "3"], "--documents is for --trace"),
    kind("nodes", ["--transport", "mpi", "--nodes", "3"], "--nodes is for --transport sim only"),
    kind("nodes_0", ["--nodes", "0"], "--nodes: .*at least 1.*given '0'"),
    kind("memory_both", ["--memory-tokens", "1", "--memory-bytes", "1"], "not allowed with"),
    kind("memory_endless", ["--memory-tokens", "9" * 12], "at most .*bytes on a node, given 9999"),
    kind("model", ["--model", "gpt"], "--model: invalid choice: 'gpt'"),
    kind("model_both", ["--model", "mistral-7b", "--bytes-per-token", "4"], "not allowed with"),
    kind("bytes", ["--bytes-per-token", "0"], "--bytes-per-token: .*at least 1"),
    kind("routing", ["--routing", "sorted"], "--routing: invalid choice: 'sorted'"),
    kind("requests", ["--requests", "-1"], "--requests: .*at least 1.*given '-1'"),
]


@pytest.mark.parametrize(("arguments", "said"), OPTIONS)
def test_options(arguments, said):
    refused(lambda: parse_options(arguments), UsageError, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--segment-tokens", "100"], "--segment-tokens: expected whole blocks of 16 tokens"),
        (["--memory-bytes", "100"], "memory_bytes = 100 is less than a page"),
        (["--trace", "embedded", "--documents", "9999"], "--documents 9999 expected at most"),
    ],
)
def test_what_cannot_be_run_is_said_and_ends_it(arguments, said, tmp_path, capsys):
    assert exp_trace_replay.main([*arguments, "--output", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert not list(tmp_path.rglob("*.h5*"))


@pytest.fixture(scope="module")
def good_result(tmp_path_factory):
    """Return the bytes of a result."""
    folder = tmp_path_factory.mktemp("replayed")
    arguments = ["--requests", "20", "--nodes", "2", "--json", "--output", str(folder)]
    assert exp_trace_replay.main(arguments) == 0
    (path,) = folder.rglob("*.h5")
    return path.read_bytes()


def replace(name, value):
    def edit(file):
        del file[name]
        file[name] = value

    return edit


def attribute(name, value):
    return lambda file: file.attrs.__setitem__(name, value)


ASKED = "samples/replay/asked_tokens"
DAMAGES = [
    kind("no_column", lambda file: file.pop(ASKED), "asked_tokens"),
    kind("column_text", replace(ASKED, ["a"] * 20), "asked_tokens': expected one axis"),
    kind("column_long", replace(ASKED, [9] * 21), "equally long"),
    kind("asked_0", replace(ASKED, [0] * 20), "ask for a token|asked_tokens above 0"),
    kind("per_token_0", attribute("bytes_per_token", 0), "bytes_per_token'?: expected a number"),
    kind("nodes_text", attribute("nodes_count", "two"), "nodes_count'?: expected a number"),
    kind("ceilings", lambda file: file["ceilings"].pop("usable_prefix"), "usable_prefix"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_damaged_results(good_result, tmp_path, capsys, damage, said):
    path = tmp_path / "damaged.h5"
    path.write_bytes(good_result)
    with h5py.File(path, "r+") as file:
        damage(file)
    assert report.main([str(path), "--json"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(str(path))
    assert re.search(said, shown.err), shown.err
    refused(lambda: plot_trace_replay.choose([path]), PlotError, f"^{re.escape(str(path))}", said)


def test_results_that_contradict_themselves(good_result, tmp_path, capsys):
    for name, values, said in (
        ("samples/replay/owned_tokens", np.full(20, 7), "add up to"),
        ("owners/server", np.full(1, 9), "equally long|servers below 2"),
    ):
        path = tmp_path / "damaged.h5"
        path.write_bytes(good_result)
        with h5py.File(path, "r+") as file:
            replace(name, values)(file)
        assert report.main([str(path)]) == 1
        assert re.search(said, capsys.readouterr().err)


def test_results_of_another_experiment_are_not_drawn(good_result, tmp_path):
    path = tmp_path / "other.h5"
    path.write_bytes(good_result)
    with h5py.File(path, "r+") as file:
        file.attrs["experiment"] = "exp_qa_replay"
    refused(lambda: plot_trace_replay.choose([path]), PlotError, "expected results of exp_trace")
