"""Loaders: what they return, and how they name what they cannot read."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from experiments.common import datasets, embedded
from experiments.common.datasets import DatasetError, load_documents

GOOD = {"title": "T", "context": "A text.", "qas": [{"question": "Which?"}], "id": "1"}


@pytest.fixture
def write_data(tmp_path, monkeypatch):
    """Return a function that writes a gzip file into a data folder of the test's own."""
    monkeypatch.setenv("PTSTORE_DATA", str(tmp_path))

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
        return path

    return write


def jsonl(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def test_embedded_has_enough_long_documents_for_a_run():
    documents = load_documents("embedded", seed=1)
    assert len(documents) >= 40
    assert len({document.text for document in documents}) == len(documents)
    assert len({document.id for document in documents}) == len(documents)
    for document in documents:
        assert len(document.text) >= embedded.DOCUMENT_CHARACTERS
        assert len(document.questions) >= 5


def test_embedded_questions_depend_on_the_seed_and_texts_do_not():
    first, again, other = (load_documents("embedded", seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [d.text for d in first] == [d.text for d in other]
    assert sum(a.questions != b.questions for a, b in zip(first, other, strict=True)) > 40


def test_embedded_questions_are_about_words_of_the_section():
    for document in load_documents("embedded", seed=3)[::10]:
        for question in document.questions:
            title, word = re.fullmatch(
                r'What does the section "(.+)" say about "(.+)"\?', question, re.DOTALL
            ).groups()
            assert title in document.text
            assert word in document.text


def test_a_python_without_documentation_is_refused(monkeypatch):
    monkeypatch.setattr(embedded, "_topics", list)
    monkeypatch.setattr(embedded, "_modules", lambda: iter(()))
    with pytest.raises(DatasetError, match="expected 40 documents"):
        load_documents("embedded", seed=1)


@pytest.mark.parametrize("name", ["squad", "wikiqa", "cmu_wiki_qa"])
def test_no_data_folder_says_what_to_set_and_what_works_without(name, monkeypatch):
    monkeypatch.delenv("PTSTORE_DATA", raising=False)
    for call in (lambda: load_documents(name, seed=1), lambda: datasets.require_files(name)):
        with pytest.raises(DatasetError, match=r"export PTSTORE_DATA=.*--dataset embedded"):
            call()


def test_a_data_folder_without_the_file_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PTSTORE_DATA", str(tmp_path))
    with pytest.raises(DatasetError, match=r"expected squad/squad-dev-v1\.1\.jsonl\.gz in"):
        datasets.require_files("squad")
    monkeypatch.setenv("PTSTORE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DatasetError, match=r"must name a folder; given: .*nowhere"):
        datasets.require_files("squad")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DatasetError, match="squad, wikiqa, cmu_wiki_qa, embedded; given: 'squid'"):
        load_documents("squid", seed=1)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("{not json", "expected one JSON object"),
        ("[1, 2]", "expected a JSON object, found list"),
        ({**GOOD, "context": 3}, "expected str 'context', found int"),
        ({"title": "T"}, "expected str 'context', found nothing"),
        ({**GOOD, "qas": [{"question": " "}]}, r"'qas'\[0\]: expected a non-empty 'question'"),
        ({**GOOD, "qas": ["?"]}, r"'qas'\[0\]: expected a non-empty 'question'"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(write_data, bad, complaint):
    path = write_data("squad/squad-dev-v1.1.jsonl.gz", jsonl(GOOD, GOOD, bad))
    with pytest.raises(DatasetError, match=f"{path}: line 3: {complaint}"):
        load_documents("squad", seed=1)


def test_a_truncated_file_is_named(write_data):
    path = write_data("squad/squad-dev-v1.1.jsonl.gz", jsonl(*[GOOD] * 100))
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DatasetError, match=f"{path}: line .*not readable"):
        load_documents("squad", seed=1)


def test_a_file_that_is_not_gzip_is_named(write_data):
    path = write_data("cmu_wiki_qa/cmu-qa-S08.jsonl.gz", "")
    path.write_text("plain text")
    with pytest.raises(DatasetError, match=f"{path}: line 1: not readable"):
        load_documents("cmu_wiki_qa", seed=1)


@pytest.mark.parametrize(
    ("text", "line"),
    [("Q\tD\r\n", 1), ("\t".join(datasets.WIKIQA_COLUMNS) + "\r\nQ1\tWhat?\tD1\r\n", 2)],
)
def test_a_wikiqa_line_with_missing_columns_is_named(write_data, text, line):
    path = write_data("wikiqa/WikiQA-dev.tsv.gz", text)
    with pytest.raises(DatasetError, match=f"{path}: line {line}: expected 7 columns"):
        load_documents("wikiqa", seed=1)


def test_wikiqa_rows_are_grouped_by_document(write_data):
    rows = [
        datasets.WIKIQA_COLUMNS,
        ("Q1", "What?", "D1", "One", "D1-0", 'A "quoted start.', "0"),
        ("Q1", "What?", "D1", "One", "D1-1", "The end.", "1"),
        ("Q2", "Why?", "D1", "One", "D1-0", 'A "quoted start.', "0"),
        ("Q3", "Who?", "D2", "Two", "D2-0", "Other.", "0"),
    ]
    write_data("wikiqa/WikiQA-dev.tsv.gz", "".join("\t".join(row) + "\r\n" for row in rows))
    first, second = load_documents("wikiqa", seed=1)
    assert first.text == 'A "quoted start. The end.'
    assert first.questions == ("What?", "Why?")
    assert (second.id, second.title, second.questions) == ("D2", "Two", ("Who?",))


def test_articles_of_one_text_are_merged(write_data):
    other = {**GOOD, "id": "2", "qas": [{"question": "Which?"}, {"question": "Whose?"}]}
    write_data("cmu_wiki_qa/cmu-qa-S08.jsonl.gz", jsonl(GOOD, other))
    (document,) = load_documents("cmu_wiki_qa", seed=1)
    assert document.questions == ("Which?", "Whose?")


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "documents", "questions"),
    [("squad", 48, 10_000), ("wikiqa", 2_800, 3_000), ("cmu_wiki_qa", 70, 1_500)],
)
def test_the_real_data_sets_are_read_whole(data_folder, name, documents, questions):
    datasets.require_files(name)
    found = load_documents(name, seed=1)
    assert documents <= len(found) <= documents * 1.05
    assert sum(len(document.questions) for document in found) >= questions
    if name == "squad":
        bowl = found[0]
        assert bowl.title == "Super_Bowl_50"
        assert bowl.text.startswith("Super Bowl 50 was an American football game")
        assert "Which NFL team won Super Bowl 50?" in bowl.questions
