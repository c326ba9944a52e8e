"""The data set that needs no files: Python's own documentation, with generated questions.

Owns the choice of texts (the language reference that ``help()`` shows, the docstrings of the
standard library read from its sources, the licence) and the questions about them. Never imports
the modules it reads, so no code of theirs runs. The texts are those of the running Python: two
versions of Python give two different corpora, all ranks of one job the same one.
"""

from __future__ import annotations

import ast
import codecs
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.common.datasets import DatasetError, Document

DOCUMENT_CHARACTERS = 9_500  # about 2,100 to 2,600 tokens of SmolLM2
QUESTIONS_PER_DOCUMENT = 12
ASKED_CHARACTERS = 6_000  # questions are about the front, which a cut at 2,000 tokens keeps
DOCUMENTS_LEAST = 40
QUESTION_STREAM = 11  # own stream of the seed, so that questions and requests are independent

# Modules with prose rather than tables. What a Python does not have is left out.
# fmt: off
MODULES = (
    "abc", "argparse", "ast", "base64", "bdb", "bisect", "bz2", "calendar", "cmd", "code",
    "codecs", "collections", "collections.abc", "concurrent.futures._base", "configparser",
    "contextlib", "copy", "csv", "ctypes.util", "dataclasses", "datetime", "difflib", "dis",
    "doctest", "email.message", "email.policy", "email.utils", "enum", "fileinput", "fractions",
    "ftplib", "functools", "getpass", "gettext", "glob", "graphlib", "gzip", "hashlib", "heapq",
    "hmac", "http.client", "http.cookiejar", "http.cookies", "http.server", "imaplib",
    "importlib.abc", "importlib.util", "inspect", "io", "ipaddress", "json", "json.decoder",
    "json.encoder", "linecache", "locale", "logging", "logging.config", "logging.handlers",
    "lzma", "mailbox", "mimetypes", "multiprocessing.connection", "multiprocessing.managers",
    "multiprocessing.pool", "netrc", "numbers", "operator", "optparse", "os", "pathlib", "pdb",
    "pickle", "pickletools", "pkgutil", "platform", "plistlib", "poplib", "posixpath", "pprint",
    "profile", "pstats", "pyclbr", "pydoc", "queue", "random", "re", "sched", "secrets",
    "selectors", "shelve", "shlex", "shutil", "signal", "smtplib", "socket", "socketserver",
    "sqlite3.dbapi2", "ssl", "statistics", "string", "subprocess", "sysconfig", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "traceback", "turtle",
    "types", "typing", "unittest.case", "unittest.mock", "urllib.parse", "urllib.request",
    "uuid", "venv", "warnings", "wave", "weakref", "webbrowser", "wsgiref.handlers",
    "xml.dom.minidom", "xml.etree.ElementTree", "xml.sax.handler", "xmlrpc.client",
    "xmlrpc.server", "zipapp", "zipfile", "zipimport", "_pydecimal", "_pyio",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Section:
    """One titled piece of documentation."""

    title: str
    text: str


def load_embedded(seed: int) -> list[Document]:
    """Cut the documentation of the running Python into documents with generated questions.

    Parameters
    ----------
    seed : int
        The same seed gives the same questions; the texts do not depend on it.

    Raises
    ------
    DatasetError
        This Python ships too little of its documentation (a build without sources).
    """
    pages = list(_pages([*_topics(), *_modules(), *_plain_texts()]))
    if len(pages) < DOCUMENTS_LEAST:
        raise DatasetError(
            f"--dataset embedded expected {DOCUMENTS_LEAST} documents in this Python's "
            f"documentation, found {len(pages)}: use a Python with its standard library's sources, "
            "or set PTSTORE_DATA and name another --dataset"
        )
    documents = []
    for number, sections in enumerate(pages):
        text = "\n\n".join(f"{section.title}\n\n{section.text}" for section in sections)
        random = np.random.default_rng([seed, QUESTION_STREAM, number])
        documents.append(
            Document(
                id=f"python-{number:03d}",
                title=sections[0].title,
                text=text,
                questions=tuple(_generate_questions(sections, random)),
            )
        )
    return documents


def _pages(sections: list[Section]) -> Iterator[list[Section]]:
    """Group sections in order into pages of at least `DOCUMENT_CHARACTERS` characters."""
    page: list[Section] = []
    size = 0
    for section in sections:
        for part in _split(section):
            page.append(part)
            size += len(part.text)
            if size >= DOCUMENT_CHARACTERS:
                yield page
                page, size = [], 0


def _split(section: Section) -> Iterator[Section]:
    """Cut a long section at paragraph ends into parts of about `DOCUMENT_CHARACTERS`."""
    if len(section.text) <= DOCUMENT_CHARACTERS:
        yield section
        return
    part: list[str] = []
    number = 1
    for paragraph in section.text.split("\n\n"):
        part.append(paragraph)
        if sum(map(len, part)) >= DOCUMENT_CHARACTERS:
            yield Section(f"{section.title} (part {number})", "\n\n".join(part))
            part, number = [], number + 1
    if part:
        yield Section(f"{section.title} (part {number})", "\n\n".join(part))


def _topics() -> list[Section]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [Section(f"Language reference: {name}", topics[name].strip()) for name in sorted(topics)]


def _modules() -> Iterator[Section]:
    root = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        base = root.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                yield from _docstrings(name, path)
                break


def _docstrings(module: str, path: Path) -> Iterator[Section]:
    """Yield the module's own text, then one section for each documented class or function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # other people's escape sequences
        tree = ast.parse(path.read_text(encoding="utf-8"))
    own = ast.get_docstring(tree)
    if own:
        yield Section(f"Module {module}", own.strip())
    pending: list[tuple[str, ast.stmt]] = [(module, node) for node in reversed(tree.body)]
    while pending:
        prefix, node = pending.pop()
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{prefix}.{node.name}"
        text = ast.get_docstring(node)
        if text and not node.name.startswith("_"):
            yield Section(name, text.strip())
        if isinstance(node, ast.ClassDef):
            pending.extend((name, child) for child in reversed(node.body))


def _plain_texts() -> Iterator[Section]:
    root = Path(sysconfig.get_path("stdlib"))
    licence = root / "LICENSE.txt"
    if licence.is_file():
        text = licence.read_text(encoding="utf-8", errors="replace").strip()
        yield Section("The Python licence", text)
    zen = root / "this.py"
    if zen.is_file():
        # The module prints when imported, so its text is taken from the source (rot13).
        match = re.search(r'"""(.*?)"""', zen.read_text(encoding="utf-8"), re.DOTALL)
        if match:
            yield Section("The Zen of Python", codecs.decode(match.group(1), "rot13"))


def _generate_questions(sections: list[Section], random: np.random.Generator) -> list[str]:
    """Ask for a word that occurs in a section, long words first; no question twice."""
    starts = np.cumsum([0, *(len(section.text) for section in sections[:-1])])
    front = [s for s, start in zip(sections, starts, strict=True) if start < ASKED_CHARACTERS]
    questions: dict[str, None] = {}
    for _ in range(4 * QUESTIONS_PER_DOCUMENT):
        section = front[int(random.integers(len(front)))]
        words = sorted(set(re.findall(r"[A-Za-z][a-z]{4,}", section.text)))
        words.sort(key=len, reverse=True)
        words = words[:40] or [section.title]
        word = words[int(random.integers(len(words)))]
        questions[f'What does the section "{section.title}" say about "{word}"?'] = None
        if len(questions) == QUESTIONS_PER_DOCUMENT:
            break
    return list(questions)
