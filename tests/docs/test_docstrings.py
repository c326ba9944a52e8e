"""Everything public has a docstring that names each of its parameters, fields and attributes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ptstore_mpi
from ptstore_mpi import Config, KVLayout, TensorSpec
from ptstore_mpi.topology import Topology
from ptstore_mpi.types import SegmentRef

# The last two are no names of the package, but attributes of what is.
PUBLIC = [*(getattr(ptstore_mpi, name) for name in ptstore_mpi.__all__), Topology, SegmentRef]
CLASSES = [each for each in PUBLIC if inspect.isclass(each)]
SECTION = r"^{}\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)"


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions of the package, and the methods of its classes with their class."""
    for each in PUBLIC:
        if inspect.isfunction(each):
            yield each.__name__, each
    for owner in CLASSES:
        for name, member in vars(owner).items():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not name.startswith("_"):
                yield f"{owner.__name__}.{name}", function


CALLABLES = list(public_callables())
# Whoever calls these must know which other ranks have to call them too.
OF_A_JOB = [
    function
    for name, function in CALLABLES
    if name.partition(".")[0] in ("Job", "Namespace", "Store", "launch", "run")
]


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def section(text: str, title: str) -> list[str]:
    """Return the names that a section of a numpydoc docstring explains."""
    found = re.search(SECTION.format(title), text, re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^\S.*$", found[1], re.MULTILINE) if found else []
    return [name for head in heads for name in head.partition(" : ")[0].split(", ")]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize(("name", "function"), CALLABLES)
def test_every_parameter_is_documented(name: str, function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function)
    assert text, "no docstring"
    wanted = parameters(function)
    explained = section(text, "Parameters")
    if explained:
        assert explained == wanted
    elif same := re.search(r"as in `(\w+)`", text):  # of the same class
        owner = vars(ptstore_mpi)[name.partition(".")[0]]
        assert wanted == parameters(vars(owner)[same[1]])
    else:  # a short docstring may explain one in a sentence
        assert len(wanted) <= 1
        assert set(wanted) <= names_in(text)


@pytest.mark.parametrize("function", OF_A_JOB)
def test_it_says_whether_the_call_is_collective(function: Callable[..., Any]) -> None:
    assert re.search(r"[Cc]ollective|as in `", inspect.getdoc(function) or "")


@pytest.mark.parametrize("owner", CLASSES)
def test_every_property_and_field_is_documented(owner: type) -> None:
    assert owner.__doc__
    for name, member in vars(owner).items():
        if isinstance(member, property) and not name.startswith("_"):
            assert member.__doc__, name
    fields = getattr(owner, "__struct_fields__", ()) or getattr(owner, "__dataclass_fields__", ())
    assert set(fields) <= set(section(inspect.getdoc(owner) or "", "Attributes"))


def test_every_attribute_of_a_living_store_is_documented() -> None:
    job = ptstore_mpi.launch(Config(memory_bytes=1 << 20))
    assert job.client is not None
    namespace = job.client.namespace("documented", KVLayout((TensorSpec("kv", 64),), 16))
    for each in (job, job.client, namespace):
        public = {name for name in vars(each) if not name.startswith("_")}
        assert public <= set(section(inspect.getdoc(each) or "", "Attributes"))
    job.close()
