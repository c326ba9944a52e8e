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
