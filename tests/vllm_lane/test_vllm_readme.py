"""README's script for vLLM is run as it stands, on two nodes, with the embedded model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.timeout(400)
def test_what_one_node_computed_the_other_loads(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    from readme_scripts import TWO_NODES, outputs, save_script

    from ptstore_mpi.integrations import smollm2

    script = save_script("ask.py", tmp_path)
    environment = {**os.environ, **TWO_NODES}
    lines = outputs(sys.executable, script, smollm2.prepare(), ranks=4, environment=environment)
    computed, loaded = (line for line in lines if line.startswith("client "))
    assert "'reason': 'cold'" in computed
    assert "'remote_tokens': 1152, 'disk_tokens': 0, 'recomputed_tokens': 49" in loaded
