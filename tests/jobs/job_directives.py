"""What a job script and its qsub command line ask for, and what the queue table says to it."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUEUES = Path(__file__).with_name("polaris_queues.toml")
FACTS = ("read", "source")


class DirectiveError(ValueError):
    """A directive cannot be read, or stands where the scheduler does not look."""


@dataclass(slots=True)
class Request:
    """Options by letter (`-l` apart) and resources by name, later ones winning."""

    options: dict[str, str] = field(default_factory=dict)
    resources: dict[str, str] = field(default_factory=dict)

    def add(self, words: list[str]) -> list[str]:
        """Take options off the front of `words`; return what is left (the script)."""
        while words and words[0].startswith("-"):
            if len(words[0]) != 2 or len(words) < 2:
                raise DirectiveError(f"expected an option and its value, given {words}")
            letter, value, *words = words[0][1], *words[1:]
            if letter == "l":
                self.resources |= dict(part.split("=", 1) for part in value.split(","))
            else:
                self.options[letter] = value
        return words

    @property
    def nodes(self) -> int:
        return int(self.resources["select"].split(":")[0])

    @property
    def chunk(self) -> list[str]:
        return self.resources["select"].split(":")[1:]

    @property
    def walltime_min(self) -> float:
        hours, minutes, seconds = map(int, self.resources["walltime"].split(":"))
        return hours * 60 + minutes + seconds / 60


def directives(text: str, prefix: str) -> Iterable[list[str]]:
    """Yield the words of each directive; they must follow the first line, with nothing between."""
    first, *lines = text.splitlines()
    if first != "#!/bin/bash -l":
        raise DirectiveError(f"expected #!/bin/bash -l, given {first!r}")
    count = next((i for i, line in enumerate(lines) if not line.startswith(prefix)), len(lines))
    for line in lines[:count]:
        if line.count("#") > 1:
            raise DirectiveError(f"a comment beside a directive: {line!r}")
        yield shlex.split(line.removeprefix(prefix))
    if any(line.startswith(prefix) for line in lines[count:]):
        raise DirectiveError("a directive after the end of the block of directives")


def request_of(text: str, command: str = "") -> Request:
    """Return what a script asks for, with the options of a `qsub` command over it."""
    request = Request()
    for words in directives(text, "#PBS"):
        if request.add(words):
            raise DirectiveError(f"more than one option in {words}")
    if command:
        program, *words = shlex.split(command)
        if program != "qsub" or len(request.add(words)) != 1:
            raise DirectiveError(f"expected qsub, options and one script, given {command!r}")
    return request


def read_queues() -> dict[str, Any]:
    """Return the queues by name."""
    table = tomllib.loads(QUEUES.read_text())
    return {name: queue for name, queue in table.items() if name not in FACTS}


def complaints(request: Request) -> list[str]:
    """Return why Polaris would refuse a request, or lose it; empty if it would not."""
    name = request.options.get("q", "")
    queue = read_queues().get(name)
    if queue is None:
        return [f"no queue {name!r}"]
    found = []
    limits = [queue, *queue.get("parts", ())]
    for limit in limits:
        low, high = limit["nodes"]
        if not low <= request.nodes <= high:
            if limit is queue:
                found.append(f"{name} takes {low} to {high} nodes, not {request.nodes}")
            continue
        low, high = limit["walltime_min"]
        if not low <= request.walltime_min <= high:
            found.append(f"{name} takes {low} to {high} min, not {request.walltime_min:g}")
    if queue.get("needs_rerun") and request.options.get("r") != "y":
        found.append(f"{name} kills jobs: -r y")
    if request.chunk != ["system=polaris"]:
        found.append(f"select: expected system=polaris, given {request.chunk}")
    if request.resources.get("place") != "scatter":
        found.append("expected place=scatter")
    if "home" not in request.resources.get("filesystems", "").split(":"):
        found.append("expected filesystems with home")
    if "A" not in request.options:
        found.append("no project to charge: -A")
    return found
