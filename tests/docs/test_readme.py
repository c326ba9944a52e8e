"""README's scripts are run as they stand, in one process and as jobs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from readme_scripts import (
    TWO_NODES,
    check_example_in_one_process,
    check_example_on_two_nodes,
    outputs,
    save_script,
)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return save_script("example.py", tmp_path)


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_first_script(tmp_path: Path, ranks: int) -> None:
    first = save_script("first.py", tmp_path)
    assert outputs(sys.executable, first, ranks=ranks) == ["32 tokens back, equal: True"]


def test_in_one_process(example: Path) -> None:
    check_example_in_one_process(outputs(sys.executable, example))


def test_as_a_job(example: Path) -> None:
    lines = outputs(sys.executable, example, ranks=4)
    assert [line[:19] for line in lines] == [f"client {rank}: 96 tokens" for rank in range(3)]


def test_as_a_job_of_two_nodes(example: Path) -> None:
    lines = outputs(sys.executable, example, ranks=4, environment={**os.environ, **TWO_NODES})
    check_example_on_two_nodes(lines)
