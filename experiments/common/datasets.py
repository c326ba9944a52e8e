"""Documents with questions, from files of the user's or from what every Python ships.

Owns the readers of the published data sets, their error, and what `experiments.traces` reads with.
Never downloads, never tokenizes, never looks anywhere but in the folder that the environment
variable ``PTSTORE_DATA`` names.

=============  ==========================================  =================================
name           a document is                               files below ``PTSTORE_DATA``
=============  ==========================================  =================================
``squad``      an article: its paragraphs joined           ``squad/squad-dev-v1.1.jsonl.gz``
``wikiqa``     the sentences of one DocumentID             ``wikiqa/WikiQA-*.tsv.gz``
``cmu_wiki_qa``  a whole article                           ``cmu_wiki_qa/cmu-qa-*.jsonl.gz``
``embedded``   pages of Python's own documentation         none
=============  ==========================================  =================================
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA_VARIABLE = "PTSTORE_DATA"
EMBEDDED_HINT = "--dataset embedded needs no files"
WIKIQA_COLUMNS = (
    "QuestionID", "Question", "DocumentID", "DocumentTitle", "SentenceID", "Sentence", "Label",
)  # fmt: skip


class DatasetError(ValueError):
    """A data set is absent or a line of it cannot be read; names the file and the line."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the questions that can be asked about it."""

    id: str
    title: str
    text: str
    questions: tuple[str, ...]


def load_documents(name: str, *, seed: int) -> list[Document]:
    """Read a data set in the order of its files.

    Parameters
    ----------
    name : str
        A key of `DATASETS`.
    seed : int
        Only ``embedded`` uses it, for its generated questions.

    Returns
    -------
    list of Document
        Every text differs from every other; every document has at least one question.

    Raises
    ------
    DatasetError
        Unknown name, no data folder, a missing file, a malformed line or no document at all.
    """
    if name not in DATASETS:
        raise DatasetError(f"--dataset must be one of {', '.join(DATASETS)}; given: {name!r}")
    documents = _without_repeated_texts(DATASETS[name](seed))
    if not documents:
        raise DatasetError(f"{name}: expected a document with a text and a question, found none")
    return documents


def require_files(name: str) -> None:
    """Raise `DatasetError` now if the files of a data set are not there (cheap, reads nothing)."""
    if name not in DATASETS:
        raise DatasetError(f"--dataset must be one of {', '.join(DATASETS)}; given: {name!r}")
    for pattern in _PATTERNS.get(name, ()):
        find_files(pattern)


def _data_folder(hint: str) -> Path:
    value = os.environ.get(DATA_VARIABLE, "")
    if not value:
        raise DatasetError(
            f"this data set is read from the folder that {DATA_VARIABLE} names, and it is not set: "
            f"export {DATA_VARIABLE}=/path/to/data; {hint}"
        )
    folder = Path(value)
    if not folder.is_dir():
        raise DatasetError(
            f"{DATA_VARIABLE} must name a folder; given: {value!r}, which is none. {hint}"
        )
    return folder


def find_files(pattern: str, hint: str = EMBEDDED_HINT) -> list[Path]:
    """Return the files of the data folder that fit a pattern, at least one; ``hint``: what else.

    Raises
    ------
    DatasetError
        There is none, or no data folder.
    """
    folder = _data_folder(hint)
    found = sorted(folder.glob(pattern))
    if not found:
        raise DatasetError(f"expected {pattern} in {DATA_VARIABLE}={folder}, found none; {hint}")
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of a text file, of a gzip file where it is called ``*.gz``.

    A broken file is a `DatasetError`.
    """
    number = 0
    opener = gzip.open if path.suffix == ".gz" else Path.open
    try:
        with opener(path, "rt", encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DatasetError(f"{path}: line {number + 1}: not readable: {error}") from error


def read_records(path: Path, fields: Mapping[str, type]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file: line n", object) of a JSON-lines file whose fields have the given types."""
    for number, line in _lines(path):
        where = f"{path}: line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, too long a number, too deep
            raise DatasetError(f"{where}: expected one JSON object: {error}") from error
        if not isinstance(value, dict):
            raise DatasetError(f"{where}: expected a JSON object, found {type(value).__name__}")
        for field, kind in fields.items():
            if not isinstance(value.get(field), kind):
                found = type(value[field]).__name__ if field in value else "nothing"
                raise DatasetError(f"{where}: expected {kind.__name__} {field!r}, found {found}")
            if kind is str:
                check_text(f"{where}: {field!r}", value[field])
        yield where, value


def check_text(where: str, text: str) -> None:
    """Refuse what JSON can write and no tokenizer reads."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise DatasetError(f"{where}: expected Unicode text, found half of a surrogate pair")


def _questions(where: str, qas: list[Any]) -> list[str]:
    texts = []
    for index, qa in enumerate(qas):
        text = qa.get("question") if isinstance(qa, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise DatasetError(f"{where}: 'qas'[{index}]: expected a non-empty 'question'")
        check_text(f"{where}: 'qas'[{index}]", text)
        texts.append(text.strip())
    return texts


def load_squad(seed: int) -> list[Document]:
    """SQuAD v1.1 dev: an article with its paragraphs joined, and all of its questions."""
    del seed
    paragraphs: dict[str, list[str]] = {}
    questions: dict[str, list[str]] = {}
    for path in find_files(_PATTERNS["squad"][0]):
        for where, row in read_records(path, {"title": str, "context": str, "qas": list}):
            paragraphs.setdefault(row["title"], []).append(row["context"])
            questions.setdefault(row["title"], []).extend(_questions(where, row["qas"]))
    return [
        _document(title, title, "\n\n".join(parts), questions[title])
        for title, parts in paragraphs.items()
    ]


def load_cmu_wiki_qa(seed: int) -> list[Document]:
    """Whole Wikipedia articles with about 18 questions each."""
    del seed
    documents = []
    for path in find_files(_PATTERNS["cmu_wiki_qa"][0]):
        fields = {"id": str, "title": str, "context": str, "qas": list}
        for where, row in read_records(path, fields):
            asked = _questions(where, row["qas"])
            documents.append(_document(row["id"], row["title"], row["context"], asked))
    return documents


def load_wikiqa(seed: int) -> list[Document]:
    """Microsoft WikiQA: the candidate sentences of one DocumentID, and its questions."""
    del seed
    titles: dict[str, str] = {}
    sentences: dict[str, dict[str, str]] = {}
    questions: dict[str, list[str]] = {}
    for path in find_files(_PATTERNS["wikiqa"][0]):
        for number, line in _lines(path):
            where = f"{path}: line {number}"
            # The fields carry quotation marks of their own, so nothing is a quoting character.
            try:
                cells = next(csv.reader([line], delimiter="\t", quoting=csv.QUOTE_NONE), [])
            except csv.Error as error:
                raise DatasetError(f"{where}: expected one row: {error}") from error
            if len(cells) != len(WIKIQA_COLUMNS):
                expected = len(WIKIQA_COLUMNS)
                raise DatasetError(f"{where}: expected {expected} columns, found {len(cells)}")
            if number == 1:
                if tuple(cells) != WIKIQA_COLUMNS:
                    raise DatasetError(f"{where}: expected the header {WIKIQA_COLUMNS}")
                continue
            _, question, document, title, sentence, text, _ = cells
            titles.setdefault(document, title)
            sentences.setdefault(document, {}).setdefault(sentence, text)
            questions.setdefault(document, []).append(question)
    return [
        _document(key, titles[key], " ".join(sentences[key].values()), questions[key])
        for key in titles
    ]


def _load_embedded(seed: int) -> list[Document]:
    from experiments.common.embedded import load_embedded

    return load_embedded(seed)


def _document(key: str, title: str, text: str, questions: list[str]) -> Document:
    return Document(key, title, text, tuple(dict.fromkeys(questions)))


def _without_repeated_texts(documents: list[Document]) -> list[Document]:
    """Merge documents of equal text (the same article in two years), keeping all questions."""
    merged: dict[str, Document] = {}
    for document in documents:
        if not document.questions or not document.text.strip():
            continue
        known = merged.get(document.text)
        if known is not None:
            document = _document(
                known.id, known.title, known.text, [*known.questions, *document.questions]
            )
        merged[document.text] = document
    return list(merged.values())


_PATTERNS = {
    "squad": ("squad/squad-dev-v1.1.jsonl.gz",),
    "wikiqa": ("wikiqa/WikiQA-*.tsv.gz",),
    "cmu_wiki_qa": ("cmu_wiki_qa/cmu-qa-*.jsonl.gz",),
}

DATASETS: dict[str, Callable[[int], list[Document]]] = {
    "squad": load_squad,
    "wikiqa": load_wikiqa,
    "cmu_wiki_qa": load_cmu_wiki_qa,
    "embedded": _load_embedded,
}
