"""All clients store, load, drop and clear the same few texts at once, in arenas that are too small.

usage: chaos.py SECONDS [FIELD=VALUE ...]     fields of Config

Nothing is known beforehand about any outcome; every loaded byte is checked, and at the end
nothing may be leased, reserved or lost.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import ptstore_mpi
from ptstore_mpi import Config, Match, Store
from ptstore_mpi.testing.bench import Bench, Space, Tokens

HELD_COUNT = 6


def settings() -> dict[str, Any]:
    given = dict(argument.split("=") for argument in sys.argv[2:])
    return {name: number(value) for name, value in given.items()}


def number(text: str) -> Any:
    """Return an int or a float where the text is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def prompt_of(bench: Bench) -> Tokens:
    """Return a text that others use too, cut and turned somewhere."""
    text = bench.tokens(160, seed=int(bench.rng.integers(3)))
    length = int(bench.rng.integers(5, 160))
    turn = int(bench.rng.integers(length + 40))
    other = bench.tokens(160, seed=int(bench.rng.integers(3, 6)))
    return np.concatenate([text[:turn], other])[:length]


def step(bench: Bench, space: Space, held: list[tuple[Tokens, Match]]) -> None:
    prompt = prompt_of(bench)
    match bench.rng.choice(["ask"] * 12 + ["held"] * 4 + ["drop"] * 3 + ["clear"]):
        case "ask":
            hit, got = space.get(prompt)
            space.put(prompt, verified_tokens=got.tokens)
            held[int(bench.rng.integers(len(held)))] = (prompt, hit)
        case "held":
            prompt, hit = held[int(bench.rng.integers(len(held)))]
            out = space.oracle.blank(40)
            got = space.namespace.load(hit, out)
            bench.remote_bytes += got.by_source["remote"] * space.layout.bytes_per_token
            space.oracle.check(prompt, out, until_tokens=got.tokens)
        case "drop":
            space.namespace.drop_tail(space.namespace.match(prompt))
        case "clear":
            space.namespace.clear()


def main(store: Store) -> None:
    bench = Bench(store)
    space = bench.space(shared=True)
    first = prompt_of(bench)
    held = [(first, space.namespace.match(first))] * HELD_COUNT
    steps = 0
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        step(bench, space, held)
        steps += 1
    bench.check_settled()
    bench.check_conservation()
    bench.everyone()
    space.namespace.clear()
    bench.check_settled()
    assert bench.server_total("owned_bytes") == 0
    print(f"client {store.client_rank}: {steps} steps, {store.stats()['reasons']}", flush=True)


ptstore_mpi.run(
    main,
    Config(**{"memory_bytes": 256 << 10, "segment_tokens": 24, "staging_bytes": 1 << 20,
              "get_bytes": 16 << 10, "placement": "random", "copy_threads": 1, **settings()}),
)  # fmt: skip
