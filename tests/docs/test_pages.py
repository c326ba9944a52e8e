"""What README and the other pages name exists: commands, options, settings, files."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
from readme_scripts import ROOT

import ptstore_mpi
from ptstore_mpi import Config

PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "experiments/README.md")}
PAGES["jobs/README.md"] = (ROOT / "jobs" / "README.md").read_text()
EVERYTHING = "\n".join(PAGES.values())
# Every command of a page stands in a block of code, or between backticks.
CODE = re.findall(
    r"```\n(.*?)```|`([^`\n]+)`",
    re.sub(r"```python\n.*?```", "", EVERYTHING, flags=re.DOTALL),
    re.DOTALL,
)
LINES = [line.partition("#")[0] for pair in CODE for line in "".join(pair).splitlines()]
OTHER_VARIABLES = {"PTSTORE_CONFIG", "PTSTORE_DATA", "PTSTORE_CACHE"}


def modules() -> dict[tuple[str, ...], set[str]]:
    """Return the options that the pages give to each module, with its first word if it has one."""
    found: dict[tuple[str, ...], set[str]] = {}
    for line in LINES:
        line = line.replace("ptstore doctor", "python -m ptstore_mpi doctor")
        line = line.replace("-m mpi4py", "")  # what starts the others
        for module, rest in re.findall(r"python +-m ([\w.]+)(.*)", line):
            words = [word for word in rest.split() if not word.startswith("-")][:1]
            options = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", rest))
            found.setdefault((module, *words), set()).update(options)
    return found


@pytest.mark.parametrize(("what", "options"), modules().items(), ids=str)
def test_modules_exist_and_take_these_options(what: tuple[str, ...], options: set[str]) -> None:
    module, *words = what
    assert importlib.util.find_spec(module) is not None
    if not options:
        return
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert options <= set(re.findall(r"--?[a-z][\w-]*", done.stdout)) | {"--help"}


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (phony,) = re.findall(r"^\.PHONY:(.*)", makefile, re.MULTILINE)
    asked = [re.match(r"(?:[A-Z_]+=\S+ )*make ((?:\S+ ?)+)", line) for line in LINES]
    targets = {word for found in asked if found for word in found[1].split() if "=" not in word}
    assert {"setup", "demo", "test", "dist", "test-dist"} <= targets
    assert targets <= set(phony.split())


def test_variables_are_settings() -> None:
    named = set(re.findall(r"PTSTORE_[A-Z][A-Z_]*", EVERYTHING)) - OTHER_VARIABLES
    assert named
    settings = {f"PTSTORE_{name.upper()}" for name in Config.__struct_fields__}
    assert named <= settings


def test_settings_have_these_defaults() -> None:
    table = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", PAGES["README.md"], re.MULTILINE)
    assert len(table) >= 10
    given = {f"PTSTORE_{name.upper()}": value for name, value in table}
    assert Config.load(environment=given) == Config()


@pytest.mark.parametrize("page", PAGES)
def test_links_and_scripts_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGES[page])
    assert [link for link in links if not (folder / link).exists()] == []
    scripts = re.findall(r"(?<!/)jobs/[\w/]+\.\w+", PAGES[page])
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_the_citation_is_of_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [ptstore_mpi.__version__]
