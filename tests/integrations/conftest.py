"""Fixtures of the engine tests, imported lazily: the modules skip where the engine is missing."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def engine(request):
    from tiny_model import tiny_llama

    from ptstore_mpi.integrations.transformers import TransformersEngine

    return TransformersEngine(tiny_llama(request.param), model_id="tiny")


@pytest.fixture
def tokens():
    """Return a function that draws `n` reproducible tokens."""
    from tiny_model import VOCABULARY

    def draw(n, seed=1):
        return np.random.default_rng(seed).integers(0, VOCABULARY, n).tolist()

    return draw


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes vLLM's two sides over a store of one process."""
    from vllm_stand_ins import engines

    with engines(monkeypatch) as make:
        yield make


@pytest.fixture
def held(monkeypatch):
    """Hold saves until they are released, however long that takes."""
    from ptstore_mpi.integrations.vllm import store_thread

    monkeypatch.setattr(store_thread, "LONGEST_HOLD_S", 60.0)
