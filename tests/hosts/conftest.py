"""The small model of the tests of the experiments, which is a fixture there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "conftest_of_experiments", Path(__file__).parents[1] / "experiments" / "conftest.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_EXPERIMENTS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_EXPERIMENTS)
model_folder = _EXPERIMENTS.model_folder
