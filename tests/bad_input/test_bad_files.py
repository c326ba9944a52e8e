"""Data sets whose lines are not what they should be, and options of the experiments."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import check_refusal, refused

from experiments import exp_microbench
from experiments.common.datasets import WIKIQA_COLUMNS, DatasetError, load_documents
from experiments.common.options import UsageError, parse_options
from experiments.common.workload import Popularity, WorkloadError


def kind(name, *values):
    return pytest.param(*values, id=name)


# -- data sets -----------------------------------------------------------------------------------

GOOD = {"title": "T", "context": "A text.", "qas": [{"question": "Which?"}], "id": "1"}
NAMES = {
    "squad": "squad/squad-dev-v1.1.jsonl.gz",
    "cmu_wiki_qa": "cmu_wiki_qa/cmu-qa-S08.jsonl.gz",
    "wikiqa": "wikiqa/WikiQA-dev.tsv.gz",
}


def without(field):
    return {name: value for name, value in GOOD.items() if name != field}


LINES = [
    kind("no_json", "{not json", "expected one JSON object"),
    kind("two_objects", "{} {}", "expected one JSON object: Extra data"),
    kind("blank", "", "expected one JSON object"),
    kind("list", [1], "expected a JSON object, found list"),
    kind("number", 5, "expected a JSON object, found int"),
    kind("endless_number", f'{{"id": {"9" * 5000}}}', "expected one JSON object: .*digits"),
    kind("endless_nesting", "[" * 100_000, "expected one JSON object: .*recursion"),
    kind("no_title", without("title"), "expected str 'title', found nothing"),
    kind("no_context", without("context"), "expected str 'context', found nothing"),
    kind("no_questions", without("qas"), "expected list 'qas', found nothing"),
    kind("title_number", {**GOOD, "title": 5}, "expected str 'title', found int"),
    kind("context_null", {**GOOD, "context": None}, "expected str 'context', found NoneType"),
    kind("context_surrogate", {**GOOD, "context": "\ud800"}, "'context': expected Unicode text"),
    kind("questions_text", {**GOOD, "qas": "Which?"}, "expected list 'qas', found str"),
    kind("question_text", {**GOOD, "qas": ["?"]}, r"'qas'\[0\]: expected a non-empty 'question'"),
    kind("question_blank", {**GOOD, "qas": [{"question": " "}]}, r".*\[0\]: expected a non-empty"),
    kind("question_number", {**GOOD, "qas": [{"question": 5}]}, r".*\[0\]: expected a non-empty"),
    kind("question_surrogate", {**GOOD, "qas": [{"question": "\udc00"}]}, r".*\[0\]: expected U"),
]
ROW = ("Q1", "What?", "D1", "One", "D1-0", "A text.", "0")
ROWS = [
    kind("too_few", ROW[:6], "expected 7 columns, found 6"),
    kind("too_many", (*ROW, "x"), "expected 7 columns, found 8"),
    kind("blank_row", (), "expected 7 columns, found 0"),
    kind("return_inside", (*ROW[:5], "A\rtext.", "0"), "expected one row: new-line"),
    kind("endless_cell", (*ROW[:5], "x" * 200_000, "0"), "expected one row: field larger"),
]


@pytest.fixture
def write_data(tmp_path, monkeypatch):
    """Return a function that writes a data set of the test's own."""
    monkeypatch.setenv("PTSTORE_DATA", str(tmp_path))
    return lambda name, data: write_dataset(tmp_path, name, data)


def write_dataset(folder, name, data):
    path = folder / NAMES[name]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def jsonl(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["squad", "cmu_wiki_qa"])
@pytest.mark.parametrize(("line", "said"), LINES)
def test_lines(write_data, name, line, said):
    path = write_data(name, gzip.compress(jsonl(GOOD, GOOD, line, GOOD).encode()))
    refused(lambda: load_documents(name, seed=1), DatasetError, f"^{path}: line 3: {said}")


@pytest.mark.parametrize(("row", "said"), ROWS)
def test_rows(write_data, row, said):
    rows = (WIKIQA_COLUMNS, ROW, row)
    text = "".join("\t".join(row) + "\n" for row in rows)
    path = write_data("wikiqa", gzip.compress(text.encode()))
    refused(lambda: load_documents("wikiqa", seed=1), DatasetError, f"^{path}: line 3: {said}")


WHOLE = gzip.compress((jsonl(GOOD) * 500).encode())
CONTAINERS = [
    kind("plain_text", jsonl(GOOD).encode(), "line 1: not readable: Not a gzipped file"),
    kind("truncated", WHOLE[:-9], r"line \d+: not readable"),
    kind("bent", WHOLE[:40] + b"\xff" * 8 + WHOLE[48:], r"line \d+: not readable"),
    kind("latin_1", gzip.compress("{'Zo\xeb'}\n".encode("latin-1")), "line 1: not readable"),
    kind("rubbish_behind", WHOLE + b"rubbish", r"line \d+: not readable"),
]


@pytest.mark.parametrize(("data", "said"), CONTAINERS)
def test_containers(write_data, data, said):
    path = write_data("squad", data)
    refused(lambda: load_documents("squad", seed=1), DatasetError, f"^{path}: {said}")


@pytest.mark.parametrize("name", NAMES)
def test_a_data_set_without_documents(write_data, name):
    write_data(name, gzip.compress(b""))
    refused(lambda: load_documents(name, seed=1), DatasetError,
            f"{name}: expected a document with a text", "found none")  # fmt: skip


def test_a_folder_in_place_of_a_file(write_data, tmp_path):
    (tmp_path / NAMES["squad"]).mkdir(parents=True)
    refused(lambda: load_documents("squad", seed=1), DatasetError, "line 1: .*Is a directory")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
OBJECTS = st.fixed_dictionaries({name: JSON | st.just(value) for name, value in GOOD.items()})
TEXTS = st.text(max_size=60) | st.lists(OBJECTS, max_size=3).map(lambda rows: jsonl(*rows))
TABS = st.text(st.sampled_from('\t\n\r"\0aQ'), max_size=60)


@settings(max_examples=150)
@given(st.sampled_from(list(NAMES)), st.binary(max_size=60) | TEXTS | TABS, st.booleans())
def test_any_data_set(tmp_path_factory, name, content, header):
    """Documents, or an error that names the file and the line."""
    folder = tmp_path_factory.getbasetemp() / "any-data-set"
    folder.mkdir(exist_ok=True)
    prefix = "\t".join(WIKIQA_COLUMNS) + "\n" if header and name == "wikiqa" else ""
    data = content
    if isinstance(content, str):
        data = gzip.compress((prefix + content).encode(errors="surrogatepass"))
    path = write_dataset(folder, name, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PTSTORE_DATA", str(folder))
        try:
            documents = load_documents(name, seed=1)
        except DatasetError as error:
            check_refusal(error, f"^({path}: line |{name}: expected a document)")
        else:
            assert all(each.text.strip() and each.questions for each in documents)


# -- options -------------------------------------------------------------------------------------

COUNT = "at least 1 and at most 10000000"
OPTIONS = [
    kind("unknown", ["--sead", "1"], "unrecognized arguments: --sead"),
    kind("dataset", ["--dataset", "squid"], "--dataset: invalid choice: 'squid'"),
    kind("context_zero", ["--context-tokens", "0"], f"--context-tokens: .*{COUNT}, given '0'"),
    kind("documents_text", ["--documents", "many"], f"--documents: .*{COUNT}, given 'many'"),
    kind("requests_huge", ["--requests", "9" * 5000], f"--requests: .*{COUNT}, given '999"),
    kind("batch_float", ["--batch", "1.5"], f"--batch: .*{COUNT}, given '1.5'"),
    kind("batch_other_digits", ["--batch", "\u0663"], f"--batch: .*{COUNT}, given '\u0663'"),
    kind("popularity", ["--popularity", "gauss"], "must be power:A.*given: 'gauss'"),
    kind("popularity_infinite", ["--popularity", "zipf:inf"], "at most 100.*given: 'zipf:inf'"),
    kind("routing", ["--routing", "psychic"], "--routing: invalid choice: 'psychic'"),
    kind("seed_negative", ["--seed", "-1"], "--seed: .*at least 0.*given '-1'"),
    kind("threads_huge", ["--threads", "100000"], "--threads: .*at most 256, given '100000'"),
    kind("systems", ["--systems", "evo"], "prefix_node,evostore,ptstore, given 'evo'"),
    kind("systems_none", ["--systems", ","], "prefix_node,evostore,ptstore, given ','"),
    kind("memory", ["--memory-bytes-per-node", "many"], "such as 512MiB.*'many'"),
    kind("memory_zero", ["--memory-bytes-per-node", "0"], "a size above 0, given '0'"),
    kind("memory_endless", ["--memory-bytes-per-node", "9" * 400], "at most .*bytes, got '999"),
    kind("placement", ["--placement", "nearest"], "--placement: invalid choice: 'nearest'"),
    kind("dtype", ["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
    kind("model", ["--model", "/nowhere"], "a folder with config.json, given '/nowhere'"),
]


@pytest.mark.parametrize(("arguments", "said"), OPTIONS)
def test_options(arguments, said):
    refused(lambda: parse_options(arguments), UsageError, said)


def test_a_model_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(lambda: parse_options(["--model", str(tmp_path)]), UsageError,
            "a folder with tokenizer.json", str(tmp_path))  # fmt: skip


@pytest.mark.parametrize("arguments", [["local", "--repeats", "0"], ["local", "--threads", "-1"]])
def test_options_of_the_microbenchmark(arguments, capsys):
    with pytest.raises(SystemExit):
        exp_microbench.main(arguments)
    assert f"whole number of at least 1 and at most {10_000 if '0' in arguments else 256}" in (
        capsys.readouterr().err
    )


@given(st.text(max_size=20) | st.tuples(st.sampled_from(["power:", "zipf:"]), st.floats()).map(
    lambda pair: f"{pair[0]}{pair[1]}"))  # fmt: skip
def test_any_popularity(text):
    try:
        popularity = Popularity.parse(text)
    except WorkloadError as error:
        check_refusal(error)
        return
    if popularity.name != "distinct":
        drawn = popularity.sample(np.random.default_rng(1), documents=4, count=9)
        assert ((drawn >= 0) & (drawn < 4)).all()
