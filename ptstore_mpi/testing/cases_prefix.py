"""Conformance cases about prefixes: what is matched, what is loaded, in which shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptstore_mpi.testing.bench import LARGE_LAYOUT, LAYOUT, ODD_LAYOUT, Bench
from ptstore_mpi.testing.buffers import available_kinds

__all__ = ["CASES"]


def cold(bench: Bench) -> None:
    """A prompt nobody stored is a miss, not an error."""
    space = bench.space()
    result = space.expect(bench.tokens(50), 0, "cold")
    assert result.reason == "nothing", result


def short(bench: Bench) -> None:
    """A prompt without a whole block before its last token cannot match."""
    space = bench.space()
    prompt = bench.tokens(40)
    space.put(prompt)
    for count in (1, 3, 4):
        space.expect(prompt[:count], 0, "short")
    space.expect(prompt[:5], 4)
    assert space.put(prompt[:3]).reason == "short", "less than a block was stored"


def whole(bench: Bench) -> None:
    """A stored prompt matches to its last whole block, and one token is always left."""
    space = bench.space()
    prompt = bench.tokens(100)
    stored = space.put(prompt)
    assert (stored.tokens, stored.reason) == (100, "stored"), stored
    space.expect(prompt, 96)
    space.expect(np.append(prompt, 7), 100)
    space.expect(np.append(prompt, [7, 8, 9, 1, 2]), 100, "diverged")
    assert space.put(prompt).reason == "known"
    assert space.put(prompt[:57]).reason == "known"


def diverged(bench: Bench) -> None:
    """A match ends with the last whole block before the first other token."""
    space = bench.space()
    prompt = bench.tokens(96)
    space.put(prompt)
    for where in range(0, 96, 5):
        other = prompt.copy()
        other[where] += 1
        depth = where // 4 * 4
        space.expect(np.append(other, 5), depth, "diverged" if depth else "cold")


def branches(bench: Bench) -> None:
    """Prompts that diverge inside a segment share what they share and nothing else."""
    space = bench.space()
    trunk = bench.tokens(90)
    space.put(trunk)
    prompts = [trunk]
    for cut in (4, 20, 24, 28, 52, 86):
        prompt = np.concatenate([trunk[:cut], bench.tokens(41)])
        stored = space.put(prompt)
        assert stored.tokens == (cut + 41) // 4 * 4 - cut // 4 * 4, (cut, stored)
        prompts.append(prompt)
    for prompt in prompts:
        space.expect(np.append(prompt, 1), len(prompt) // 4 * 4)


def growth(bench: Bench) -> None:
    """A conversation grows by increments of every size; each prefix of it stays loadable."""
    space = bench.space(layout=ODD_LAYOUT)
    text = bench.tokens(400)
    length, step, kept = 0, 0, 0
    while length + step < len(text):
        length += step
        step = step % 29 + 1
        if not length:
            continue
        stored = space.put(text[:length])
        kept += stored.tokens
        assert kept == length // 3 * 3, (length, kept, stored)
        space.expect(np.append(text[:length], 3), kept, "whole" if kept else "short")
    for length in range(4, len(text), 37):
        depth = min((length - 1) // 3 * 3, kept)
        match, _ = space.get(text[:length])
        assert match.tokens == depth, (length, match)


def views(bench: Bench) -> None:
    """KV stored from any kind of memory loads into any other."""
    kinds = available_kinds()
    for number, source in enumerate(kinds):
        space = bench.space(salt=source)
        prompt = bench.tokens(75)
        assert space.put(prompt[:30], kind=source).tokens == 28
        assert space.put(prompt, kind=kinds[number - 1]).tokens == 44
        for target in kinds:
            match, result = space.get(prompt, kind=target)
            assert match.tokens == result.tokens == 72, (source, target, match, result)


def skipping(bench: Bench) -> None:
    """Leading tokens that the engine has are neither loaded nor written, and all counted."""
    space = bench.space()
    prompt = bench.tokens(97)
    space.put(prompt[:50])
    space.put(prompt)
    for skip in (0, 4, 20, 24, 44, 48, 52, 92, 96):
        match, result = space.get(prompt, skip_tokens=skip)
        assert result.tokens == match.tokens == 96, (skip, result)
    longer = np.append(prompt[:96], bench.tokens(14))
    for other, known in ((longer, 96), (bench.tokens(110), 0)):
        for skip in (known, known + 4, 108):
            match, result = space.get(other, skip_tokens=skip)
            assert (match.tokens, result.tokens, result.reason) == (known, skip, "nothing"), result
    for wrong in (1, 6, -4, 100, 1000):
        _expect(ValueError, space.get, prompt, skip_tokens=wrong)


def cutting(bench: Bench) -> None:
    """A match can be cut anywhere, also inside a segment, and loads to there and no further."""
    space = bench.space()
    prompt = bench.tokens(97)
    space.put(prompt[:50])
    space.put(prompt)
    for count in (0, 4, 20, 24, 28, 44, 48, 52, 92, 96):
        match, result = space.get(prompt, cut_tokens=count)
        assert result.tokens == match.tokens == count, (count, match, result)
        assert match.reason == ("cut" if count < 96 else "whole"), match
        again = space.namespace.cut(match, prompt, count // 8 * 4)
        assert again.tokens == count // 8 * 4, again
    match, result = space.get(prompt, cut_tokens=52, skip_tokens=44)
    assert (result.tokens, result.by_source["engine"]) == (52, 44), result
    for wrong in (1, -4, 100):
        _expect(ValueError, space.namespace.cut, space.namespace.match(prompt), prompt, wrong)
    other = np.append(prompt[:95], 1 + prompt[95:])
    for tokens in (prompt[:96], np.append(prompt, 1), other):
        _expect(ValueError, space.namespace.cut, space.namespace.match(prompt), tokens, 52)


def by_layers(bench: Bench) -> None:
    """Who asks hears of the first layers before the last ones are there, and of no wrong one."""
    space = bench.space(layout=LARGE_LAYOUT)
    prompt = bench.tokens(89)
    space.put(prompt[:32])
    space.put(prompt)
    for kind in ("contiguous", "paged"):
        for skip in (0, 16):
            result, told = space.get_by_layers(prompt, kind=kind, skip_tokens=skip)
            assert result.tokens == 88, result
            assert result.by_source["remote"] or told == [2, 6], told
    assert space.get_by_layers(prompt, skip_tokens=88)[1] == []
    assert space.get_by_layers(bench.tokens(30))[1] == []


def by_layers_if_right(bench: Bench) -> None:
    """What is verified block by block is there as a whole when the first layer is."""
    space = bench.space(layout=LARGE_LAYOUT)
    prompt = bench.tokens(89)
    space.put(prompt)
    result, told = space.get_by_layers(prompt)
    assert (result.tokens, told) == (88, [6]), (result, told)


def less_verified(bench: Bench) -> None:
    """What did not load is not built upon: the increment starts at the verified depth."""
    space = bench.space()
    prompt = bench.tokens(120)
    space.put(prompt[:80])
    stored = space.put(prompt, verified_tokens=40)
    assert (stored.tokens, stored.reason) == (80, "stored"), stored
    space.expect(np.append(prompt, 2), 120)
    other = np.append(prompt, bench.tokens(8))
    stored = space.put(other, verified_tokens=0)
    assert stored.tokens == 128, stored
    space.expect(np.append(other, 2), 128)


def tokens_of_all_kinds(bench: Bench) -> None:
    """Token ids come as lists or arrays of any integer type; nothing else is taken."""
    space = bench.space()
    prompt = bench.tokens(33) % 200
    space.put(prompt)
    for kind in (np.uint8, np.int32, np.uint32, np.uint64):
        assert space.namespace.match(prompt.astype(kind)).tokens == 32
    assert space.namespace.match(prompt.tolist()).tokens == 32
    assert space.namespace.match(np.repeat(prompt, 2)[::2]).tokens == 32
    _expect(ValueError, space.namespace.match, [])
    _expect(ValueError, space.namespace.match, [[1, 2], [3, 4]])
    _expect(ValueError, space.namespace.match, [1, -1])
    _expect(ValueError, space.namespace.match, [1 << 32])
    _expect(TypeError, space.namespace.match, [0.5, 1.0])


def namespaces_apart(bench: Bench) -> None:
    """The same tokens are unknown in another namespace, whatever makes it another."""
    prompt = bench.tokens(50)
    halves = LAYOUT.for_attention(layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4)
    spaces = [
        bench.space(),
        bench.space(salt="tenant"),
        bench.space(model="model-2"),
        bench.space(backend="gpu"),
        bench.space(lora="gpu"),
        bench.space(layout=ODD_LAYOUT),
        bench.space(layout=halves, salt="halves"),
        bench.space(layout=LAYOUT, salt="halves"),
    ]
    for number, space in enumerate(spaces):
        assert space.namespace.match(prompt).tokens == 0, number
        assert space.put(prompt).tokens == len(prompt) // space.layout.block_tokens * (
            space.layout.block_tokens
        )
    depths = [space.get(prompt)[1].tokens for space in spaces]
    assert depths == [48, 48, 48, 48, 48, 48, 48, 48], depths
    spaces[1].namespace.clear()
    known = [space.namespace.match(prompt).tokens > 0 for space in spaces]
    assert known == [True, False, True, True, True, True, True, True], known


def equal_everywhere(bench: Bench) -> None:
    """What one client stored every client loads, whoever owns it."""
    space = bench.space(shared=True)
    for turn in bench.my_turn():
        assert turn is None
        space.put(bench.tokens(110, seed=bench.store.client_rank))
    for rank in range(bench.store.client_count):
        space.expect(np.append(bench.tokens(110, seed=rank), 1), 108)


def _expect(error: type[Exception], call: Callable[..., Any], *args: Any, **options: Any) -> None:
    try:
        call(*args, **options)
    except error:
        return
    raise AssertionError(f"{call} accepted {args} {options}; expected {error.__name__}")


CASES: list[tuple[Callable[[Bench], None], dict[str, Any]]] = [
    (cold, {}),
    (short, {}),
    (whole, {}),
    (diverged, {"placement": "random"}),
    (branches, {"placement": "random", "segment_tokens": 24}),
    (growth, {"placement": "random"}),
    (views, {"placement": "random", "verify": "always"}),
    (skipping, {"placement": "random"}),
    (cutting, {"placement": "random"}),
    (by_layers, {"placement": "random", "memory_bytes": 96 << 20}),
    (by_layers_if_right, {"verify": "always", "memory_bytes": 96 << 20}),
    (less_verified, {}),
    (tokens_of_all_kinds, {}),
    (namespaces_apart, {"segment_tokens": 12}),
    (equal_everywhere, {"placement": "local"}),
]
