"""Traces, read from tiny files and from the real ones, become one stream of requests."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from experiments.common.datasets import DatasetError
from experiments.common.model_presets import MODELS
from experiments.trace_replay.bounds import ceilings_of
from experiments.trace_replay.options import parse_options
from experiments.trace_replay.places import SimPlace
from experiments.traces import TRACES, load_trace, require_trace
from experiments.traces.stream import text_tokens
from ptstore_mpi import Config


@pytest.fixture
def write(tmp_path):
    """Return a function that writes rows as JSON lines and returns the path."""

    def rows(*objects, name="trace.jsonl"):
        path = tmp_path / name
        text = "".join(json.dumps(row) + "\n" for row in objects)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return rows


def shared_tokens(trace, one, other):
    """Return how many tokens two prompts of a trace begin with alike."""
    a, b = (trace.prompt(trace.requests[number]) for number in (one, other))
    length = min(len(a), len(b))
    return int(np.append(a[:length] != b[:length], True).argmax())


def mooncake(time_ms, tokens, *ids):
    return {"timestamp": time_ms, "input_length": tokens, "output_length": 7, "hash_ids": ids}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake(write, name):
    path = write(
        mooncake(0, 1300, 0, 1, 2),  # begins a conversation behind a system prompt, 0
        mooncake(3000, 700, 0, 3),  # another: has the system prompt alone in common
        mooncake(9000, 1600, 0, 1, 4, 5),  # goes on with the first
        mooncake(6000, 1536, 0, 6, 7),
        name=name,
    )
    trace = load_trace("mooncake", path=path)
    assert (trace.unit_tokens, trace.block_tokens) == (512, 512)
    assert [request.time_s for request in trace.requests] == [0.0, 3.0, 6.0, 9.0]
    assert [request.session for request in trace.requests] == [0, 1, 2, 0]
    assert [len(trace.prompt(r)) for r in trace.requests] == [1300, 700, 1536, 1600]
    assert shared_tokens(trace, 0, 1) == shared_tokens(trace, 0, 2) == 512
    assert shared_tokens(trace, 0, 3) == 1024
    assert trace.kept(trace.requests[0]).tolist() == trace.prompt(trace.requests[0]).tolist()
    assert len(load_trace("mooncake", path=path, requests=2).requests) == 2


def conversation(number, *requests, tools=128, system=70):
    return {"id": number, "block_size": 64, "tool_tokens": tools, "system_tokens": system,
            "requests": requests}  # fmt: skip


def turn(t, tokens, keep, *add, out=5):
    return {"t": t, "in": tokens, "out": out, "keep": keep, "add": add}


def test_claude_code(write):
    sub = {"t": 10.0, "sub": [turn(1.0, 130, 0, 50, 2)], "kind": "x", "tool_tokens": 64,
           "system_tokens": 0}  # fmt: skip
    path = write(
        conversation("a", turn(0, 330, 0, 1, 5), sub, turn(30.5, 460, 4, 9, 3)),
        conversation("b", turn(0, 330, 0, 1, 5)),
        conversation("c", turn(0, 330, 0, 1, 5), tools=129),
    )
    trace = load_trace("claude_code", path=path, seed=3)
    assert (trace.unit_tokens, trace.block_tokens) == (64, 512)
    by_session: dict[int, list[int]] = {}
    for number, request in enumerate(trace.requests):
        by_session.setdefault(request.session, []).append(number)
    assert [len(numbers) for _, numbers in sorted(by_session.items())] == [2, 1, 1, 1]
    (first, later), (of_sub,), (other,), (third,) = (by_session[s] for s in range(4))
    assert shared_tokens(trace, first, later) == 4 * 64
    # 198 tokens of tools and system prompt are three blocks, which equal pairs share.
    assert shared_tokens(trace, first, other) == 3 * 64
    assert shared_tokens(trace, first, third) == 0
    assert shared_tokens(trace, first, of_sub) == 0
    times = [trace.requests[number].time_s for number in (first, of_sub, later)]
    assert np.diff(times).tolist() == pytest.approx([11.0, 19.5])
    again = load_trace("claude_code", path=path, seed=3)
    assert again.digest() == trace.digest()
    assert load_trace("claude_code", path=path, seed=4).digest() != trace.digest()


def test_lmcache_agent(write):
    path = write(
        {"agent": "x", "session": "s", "requests": [
            {"ts": 2_000_000, "keep": 0, "add": "Question: why?", "output": " Because."},
            {"ts": 5_500_000, "keep": 14, "add": " Because. And how?", "output": ""},
        ]},
        {"agent": "x", "session": "t", "requests": [
            {"ts": 3_000_000, "keep": 0, "add": "Question: is it?", "output": "No"},
        ]},
        {"agent": "x", "session": "u", "requests": []},
    )  # fmt: skip
    trace = load_trace("lmcache_agent", path=path)
    assert [request.time_s for request in trace.requests] == [0.0, 1.0, 3.5]
    assert [request.session for request in trace.requests] == [0, 1, 0]
    assert [len(trace.prompt(request)) for request in trace.requests] == [3, 4, 8]
    assert shared_tokens(trace, 0, 1) == 2  # "Ques", "tion"; then ": wh" against ": is"
    # The next prompt begins with this one and its answer, 23 characters: five whole tokens.
    kept, following = trace.kept(trace.requests[0]), trace.prompt(trace.requests[2])
    assert kept.tolist() == following[:5].tolist()


def test_generated_conversations_go_on_with_prompt_and_answer():
    trace = load_trace("generated", requests=60, seed=2)
    assert len(trace.requests) == 60
    last: dict[int, np.ndarray] = {}
    continued = 0
    for request in trace.requests:
        prompt = trace.prompt(request)
        if request.session in last:
            before = last[request.session]
            assert prompt[: len(before)].tolist() == before.tolist()
            continued += 1
        last[request.session] = trace.kept(request)
    assert continued > 20
    assert trace.digest() == load_trace("generated", requests=60, seed=2).digest()
    assert trace.digest() != load_trace("generated", requests=60, seed=3).digest()


def test_questions_are_those_of_the_workload():
    trace = load_trace(
        "embedded", requests=30, documents=3, context_tokens=64, popularity="zipf:1", seed=5
    )
    assert {request.session for request in trace.requests} == {0, 1, 2}
    for one, request in enumerate(trace.requests):
        assert request.prompt_tokens == len(trace.prompt(request)) > 64
        for other in range(one):
            same = trace.requests[other].session == request.session
            assert (shared_tokens(trace, one, other) >= 64) == same


def test_tokens_of_units_and_of_texts():
    assert text_tokens("abcdefgh").tolist() == text_tokens("abcdefghi").tolist()
    assert text_tokens("abcd").tolist() == text_tokens("abcdefgh")[:1].tolist()
    assert len(text_tokens("x")) == 1
    assert len({int(text_tokens(text)[0]) for text in ("abcd", "abdc", "bacd", "abc", "abce")}) == 5


def test_a_trace_without_its_files_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.delenv("PTSTORE_DATA", raising=False)
    with pytest.raises(DatasetError, match="--trace generated needs no files"):
        require_trace("mooncake", "")
    with pytest.raises(DatasetError, match="--path: expected a file, given '/nowhere'"):
        require_trace("mooncake", "/nowhere")
    monkeypatch.setenv("PTSTORE_DATA", str(tmp_path))
    with pytest.raises(DatasetError, match=r"expected claude_code_kv/\*.jsonl.gz in .*found none"):
        load_trace("claude_code")
    require_trace("generated", "")


def test_bytes_per_token_are_those_the_models_publish():
    assert {name: model.bytes_per_token for name, model in MODELS.items()} == {
        "smollm2-135m": 22.5 * 1024,
        "mistral-7b": 128 * 1024,  # as the paper says
        "llama-3-70b": 320 * 1024,
        "deepseek-v3": 70_272,  # as DeepSeek's report on the hardware for V3 says (2505.09343)
    }


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "requests", "sessions", "prompt_tokens"),
    [
        ("mooncake", 12_031, 8_067, 144_793_823),
        ("claude_code", 22_892, 394, 2_793_602_165),
        ("lmcache_agent", 873, 44, 2_496_255),
    ],
)
def test_real_traces(data_folder, monkeypatch, name, requests, sessions, prompt_tokens):
    monkeypatch.setenv("PTSTORE_DATA", str(data_folder))
    trace = load_trace(name)
    assert len(trace.requests) == requests
    assert len({request.session for request in trace.requests}) == sessions
    assert sum(request.prompt_tokens for request in trace.requests) == prompt_tokens
    times = [request.time_s for request in trace.requests]
    assert times == sorted(times)
    assert times[0] == 0
    assert name in TRACES


@pytest.mark.data
def test_an_ideal_cache_finds_of_mooncake_what_is_known_of_it(data_folder, monkeypatch):
    monkeypatch.setenv("PTSTORE_DATA", str(data_folder))
    trace = load_trace("mooncake")
    options = replace(parse_options(["--nodes", "1"]), block_tokens=512, segment_tokens=512)
    place = SimPlace(trace, options, Config(segment_tokens=512))
    ceilings = ceilings_of(trace, place.replayers[0].namespace)
    seen: set[int] = set()
    found = 0
    for request in trace.requests:
        ids = request.units.tolist()
        whole = ids[: (request.prompt_tokens - 1) // 512]
        found += sum(unit in seen for unit in whole)
        seen |= set(ids[: request.prompt_tokens // 512])
    assert ceilings.infinite().found_blocks == found
    blocks = sum(len(request.units) for request in trace.requests)
    assert found / blocks == pytest.approx(0.366, abs=5e-4)
