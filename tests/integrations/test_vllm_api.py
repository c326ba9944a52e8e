"""The connector's API classes against the sources of the versions of vLLM that they speak to.

Nothing of vLLM is imported: `WHEELS_OF_VLLM` names a folder with its wheels.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

pytest.importorskip("torch")

from vllm_sources import V1, Method, calls_of, open_sources
from vllm_stand_ins import StandInRequest, stand_in_config

import ptstore_mpi.integrations.vllm as connector_package
from ptstore_mpi.integrations.vllm.api import GENERATIONS
from ptstore_mpi.integrations.vllm.versions import generation_of

pytestmark = pytest.mark.vllm

BASE = f"{V1}/base.py"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
OUTPUT = "vllm/v1/core/sched/output.py"
MIXIN = "vllm/v1/worker/kv_connector_model_runner_mixin.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
VERSIONS = [version for api in GENERATIONS.values() for version in (*api.RUN, *api.CHECKED)]
CONNECTORS = {"connector", "kv_connector", "get_kv_transfer_group"}

NOT_CALLED = {"0.11": {"get_block_ids_with_load_errors"}}
"""What generations have in common though one of them never calls it."""


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture
def sources(version):
    return open_sources(version)


@pytest.fixture
def api(version):
    return generation_of(version)


@pytest.fixture
def theirs(sources):
    """Return the methods of the classes that vLLM's part of a connector is made of."""
    return {**sources.methods(BASE, "SupportsHMA"), **sources.methods(BASE, "KVConnectorBase_V1")}


def public_methods(api):
    """Return our methods by name, as the classes have them."""
    found = {}
    for cls in reversed(api.__mro__[:-1]):
        found |= {name: value for name, value in vars(cls).items() if _is_method(value)}
    return {name: value for name, value in found.items() if not name.startswith("_")}


def described(value):
    """Return what one of our methods says of itself."""
    kind = type(value).__name__ if not inspect.isfunction(value) else "method"
    function = value.fget if kind == "property" else getattr(value, "__func__", value)
    parameters = list(inspect.signature(function).parameters.values())
    own = parameters if kind == "staticmethod" else parameters[1:]
    positional = [each for each in own if each.kind == each.POSITIONAL_OR_KEYWORD]
    return Method(
        kind,
        False,
        tuple(each.name for each in positional),
        sum(each.default is not each.empty for each in positional),
        tuple(each.name for each in own if each.kind == each.KEYWORD_ONLY),
        any(each.kind == each.VAR_KEYWORD for each in own),
    )


def _is_method(value):
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


def test_every_version_has_its_generation(version, api):
    assert GENERATIONS[version.rpartition(".")[0]] is api
    assert version in (*api.RUN, *api.CHECKED)


def test_every_abstract_method_is_there(api, theirs):
    abstract = {name for name, method in theirs.items() if method.is_abstract}
    assert len(abstract) >= 7, "vLLM's base class was not read"
    assert not abstract - set(public_methods(api))


def test_methods_can_be_called_as_those_of_the_base(api, theirs):
    for name, value in public_methods(api).items():
        if name not in theirs:
            continue
        ours, base = described(value), theirs[name]
        assert (ours.kind, ours.positional) == (base.kind, base.positional), name
        assert ours.optional_count >= base.optional_count, name
        assert set(base.keyword) <= set(ours.keyword), name
        assert ours.takes_more >= base.takes_more, name


def test_no_method_is_dead(version, api, theirs):
    allowed = NOT_CALLED.get(version.rpartition(".")[0], set())
    assert set(public_methods(api)) - set(theirs) == allowed


def test_private_names_do_not_meet_those_of_the_base(sources, api):
    """`__init__` apart: what we keep in an object must not be what vLLM keeps in it."""
    ours = {name for cls in api.__mro__[:-1] for name in (*vars(cls), *cls.__annotations__)}
    named = {name for name in ours if name.startswith("_") and not name.startswith("__")}
    assert "_link" in named
    assert not named & sources.attributes(BASE, "KVConnectorBase_V1")


def test_the_constructor_takes_what_the_factory_gives(sources, api, theirs):
    create = sources.functions(FACTORY)["create_connector"]
    given = [
        [ast.unparse(argument) for argument in node.args]
        for node in ast.walk(create)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "connector_cls"
    ]
    parameters = inspect.signature(api).parameters
    most = max(given, key=len)
    assert most in (["config", "role"], ["config", "role", "kv_cache_config"])
    assert len(parameters) == len(most)
    assert tuple(parameters) == theirs["__init__"].positional
    if "kv_cache_config" in most:  # `supports_kw`, or it counts as one of two arguments
        kind = parameters["kv_cache_config"].kind
        assert kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def test_all_calls_of_vllm_fit(sources, api):
    seen = set()
    for path in (SCHEDULER, MIXIN, RUNNER):
        for name, call in calls_of(sources.tree(path), CONNECTORS):
            value = public_methods(api).get(name)
            if not inspect.isfunction(value):
                continue
            seen.add(name)
            starred = [arg for arg in call.args if isinstance(arg, ast.Starred)]
            assert not starred, ast.unparse(call)
            keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            inspect.signature(value).bind(None, *call.args, **keywords)
    assert {"get_num_new_matched_tokens", "build_connector_meta", "start_load_kv"} <= seen


def test_a_request_may_be_asked_for_again(sources):
    """By position, and None means later."""
    ((_, call),) = [
        (name, call)
        for name, call in calls_of(sources.tree(SCHEDULER), CONNECTORS)
        if name == "get_num_new_matched_tokens"
    ]
    assert len(call.args) == 2
    assert not call.keywords
    (target,) = [
        node.targets[0].elts[0].id
        for node in ast.walk(sources.tree(SCHEDULER))
        if isinstance(node, ast.Assign) and node.value is call
    ]
    assert f"if {target} is None:" in sources.text(SCHEDULER)


def test_the_order_of_a_step(sources, version, api):
    functions = sources.functions(MIXIN)
    order = [
        name
        for name, _ in calls_of(
            functions["_get_kv_connector_output"], {*CONNECTORS, "KVConnectorModelRunnerMixin"}
        )
    ]
    finished = "get_transfer_results" if "get_transfer_results" in order else "get_finished"
    expected = ["bind_connector_metadata", "start_load_kv", "wait_for_save", finished]
    if api.REPORTS_LOAD_ERRORS:
        expected.append("get_block_ids_with_load_errors")
    expected += ["get_kv_connector_stats", "clear_connector_metadata"]
    assert [name for name in dict.fromkeys(order) if name in expected] == expected
    if finished == "get_transfer_results":
        base = sources.functions(BASE)[finished]
        assert [name for name, _ in calls_of(base, {"self"})] == ["get_finished"]


def test_load_errors_are_asked_for_where_loads_may_fail(sources, api):
    assert ("get_block_ids_with_load_errors" in sources.text(MIXIN)) == api.REPORTS_LOAD_ERRORS
    assert ("get_block_ids_with_load_errors" in sources.text(BASE)) == api.REPORTS_LOAD_ERRORS
    has_policy = "kv_load_failure_policy" in sources.attributes(
        "vllm/config/kv_transfer.py", "KVTransferConfig"
    )
    assert has_policy == api.REPORTS_LOAD_ERRORS


def test_who_keeps_the_blocks_of_a_request_that_ends_in_a_load(sources, api):
    """Either vLLM frees them when the load is reported, or it must hear of a save."""
    finish = sources.functions(SCHEDULER)["_update_from_kv_xfer_finished"]
    received = next(
        node
        for node in ast.walk(finish)
        if isinstance(node, ast.For) and "finished_recving" in ast.unparse(node.iter)
    )
    assert ("_free_blocks" in ast.unparse(received)) == api.KEEPS_ORPHANS


def test_steps_say_what_the_plan_is_made_of(sources, api):
    cached = {"req_ids", "new_block_ids", "num_computed_tokens"}
    cached.add("resumed_req_ids" if api.REPORTS_LOAD_ERRORS else "resumed_from_preemption")
    assert cached <= sources.attributes(OUTPUT, "CachedRequestData")
    new = {"req_id", "block_ids", "num_computed_tokens"}
    assert new <= sources.attributes(OUTPUT, "NewRequestData")
    step = {"num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"}
    step.add("total_num_scheduled_tokens")
    assert step <= sources.attributes(OUTPUT, "SchedulerOutput")


def test_requests_have_what_is_asked_of_them(sources, version):
    """The stand-in of our tests has nothing that vLLM's request has not."""
    stand_in = set(vars(StandInRequest("r", [1])))
    assert {"num_preemptions", "prompt_embeds", "cache_salt", "kv_transfer_params"} <= stand_in
    missing = stand_in - sources.attributes("vllm/v1/request.py", "Request")
    if version.startswith("0.11."):  # the one is looked for with `getattr`; the other see below
        missing -= {"skip_reading_prefix_cache", "num_preemptions"}
    assert not missing


def test_configurations_have_what_is_asked_of_them(sources):
    files = {
        "parallel_config": ("parallel.py", "ParallelConfig"),
        "model_config": ("model.py", "ModelConfig"),
        "cache_config": ("cache.py", "CacheConfig"),
        "load_config": ("load.py", "LoadConfig"),
        "kv_transfer_config": ("kv_transfer.py", "KVTransferConfig"),
        "compilation_config": ("compilation.py", "CompilationConfig"),
        "device_config": ("device.py", "DeviceConfig"),
    }
    for part, (path, name) in files.items():
        stand_in = set(vars(getattr(stand_in_config(), part)))
        missing = stand_in - sources.attributes(f"vllm/config/{path}", name)
        assert missing <= {"prefill_context_parallel_size"}, part  # looked for with `getattr`


def test_images_and_adapters_are_named_as_we_read_them(sources):
    feature = sources.attributes("vllm/multimodal/inputs.py", "MultiModalFeatureSpec")
    assert {"identifier", "mm_position"} <= feature
    place = sources.attributes("vllm/multimodal/inputs.py", "PlaceholderRange")
    assert {"offset", "length"} <= place
    adapter = sources.attributes("vllm/lora/request.py", "LoRARequest")
    assert {"lora_name", "lora_int_id", "lora_path"} <= adapter


def test_ranks_find_their_group(sources):
    functions = sources.functions("vllm/distributed/parallel_state.py")
    assert {"get_tp_group", "get_tensor_model_parallel_rank"} <= set(functions)
    group = sources.attributes("vllm/distributed/parallel_state.py", "GroupCoordinator")
    assert "cpu_group" in group
    assert '"external_launcher"' in sources.text("vllm/config/parallel.py")


def test_the_packing_of_the_cpu_is_asked_as_it_answers(sources, api):
    found = sources.functions("vllm/v1/attention/backends/cpu_attn.py").get("_get_attn_isa")
    assert (found is not None) == api.REPORTS_LOAD_ERRORS
    if found is not None:
        assert [each.arg for each in found.args.args[:2]] == ["dtype", "block_size"]
        assert len(found.args.args) - len(found.args.defaults) == 2


def test_kinds_of_attention_are_named_as_we_read_them(sources):
    assert {"FullAttentionSpec", "MLAAttentionSpec"} <= set(
        sources.classes("vllm/v1/kv_cache_interface.py")
    )
    assert {"num_blocks", "kv_cache_groups"} <= sources.attributes(
        "vllm/v1/kv_cache_interface.py", "KVCacheConfig"
    )


def test_statistics_have_every_abstract_method(sources):
    written = Path(connector_package.__file__).with_name("connector_stats.py").read_text()
    (ours,) = [node for node in ast.parse(written).body if isinstance(node, ast.ClassDef)]
    names = {node.name for node in ours.body if isinstance(node, ast.FunctionDef)}
    methods = sources.methods(f"{V1}/metrics.py", "KVConnectorStats")
    assert names == set(methods) - {"to_dict", "__post_init__"}


def test_sources_of_hits_are_named_as_we_name_them(sources, api):
    path = "vllm/v1/metrics/cache_hit_source.py"
    assert sources.has(path) == ("get_external_cache_hit_sources" in public_methods(api))
    if sources.has(path):
        assert {"HOST", "P2P"} <= {
            target.id
            for node in sources.classes(path)["CacheHitSource"].body
            if isinstance(node, ast.Assign)
            for target in node.targets
        }


def test_preemptions_are_told_before_blocks_are_written(sources, api):
    """In the order of the runner's text; the oldest generation is told nothing."""
    calls = [name for name, _ in calls_of(sources.tree(RUNNER), CONNECTORS)]
    assert ("handle_preemptions" in calls) == ("handle_preemptions" in public_methods(api))
    execute = sources.functions(RUNNER)["execute_model"]
    if "handle_preemptions" in calls:
        text = ast.unparse(execute)
        assert text.index("handle_preemptions") < text.index("maybe_get_kv_connector_output")
