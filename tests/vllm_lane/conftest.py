"""Fixtures of the vLLM tests: a tiny model, a store, and engines that are built once."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytest.register_assert_rewrite("vllm_engines")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("vllm")
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM, torch and SWIG warn
            item.add_marker(
                pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
            )
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(300))  # an engine takes seconds to a minute


@pytest.fixture(scope="session")
def environment():
    """Let vLLM run in this process, and leave the environment as it was."""
    from ptstore_mpi.integrations.vllm import prepare_process

    before = dict(os.environ)
    prepare_process()
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Return the folder of the tiny model."""
    from vllm_model import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def attachment(environment):
    """Return a store of one process with vLLM attached to it."""
    import ptstore_mpi
    from ptstore_mpi import Config
    from ptstore_mpi.integrations.vllm import attach

    job = ptstore_mpi.launch(Config(memory_bytes=128 << 20, segment_tokens=128, copy_threads=1))
    with attach(job.client) as attachment:
        yield attachment
    job.close()


@pytest.fixture(scope="session")
def engine_of(model, attachment):
    """Return a function that returns the engine of these settings, built once."""
    from vllm_engines import Engine

    built = {}

    def engine_of(connector, *, model=model, **arguments):
        key = repr((connector, str(model), sorted(arguments.items())))
        if key not in built:
            built[key] = Engine(model, attachment, connector, **arguments)
        return built[key]

    yield engine_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)  # five times a second's work at each end
        for engine in built.values():
            engine.close()


@pytest.fixture(scope="session")
def plain(engine_of):
    """Return the engine without a connector: what is right."""
    return engine_of(None, prefix_caching=False)


@pytest.fixture(params=["async", "layered", "verified"])
def engine(request, engine_of):
    """Return an engine of each load mode that has nothing in its own cache."""
    engine = engine_of({"load": request.param, "fetch": "always"})
    engine.forget()
    yield engine
    engine.check_idle()


@pytest.fixture(params=["async", "layered", "verified"])
def small(request, engine_of):
    """Return an engine whose own cache has room for two requests; it stores what it decodes."""
    connector = {"load": request.param, "fetch": "always", "save": "all", "save_slice_tokens": 32}
    engine = engine_of(connector, kv_cache_bytes=24 * 48 << 10, max_model_len=512)
    engine.forget()
    yield engine
    engine.check_idle()


@pytest.fixture
def tokens(request):
    """Return a function that draws ``n`` tokens, others for every test."""
    import zlib

    import numpy as np
    from vllm_model import VOCABULARY

    rng = np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
    return lambda n: rng.integers(3, VOCABULARY, n).tolist()
