"""Whether a prefix that the store has is worth loading: decided by what both ways took of late.

Owns the two cost models and the verdict. Pure: reads no clock, knows no engine and no MPI; the
engines say what their prefills and loads took.

*Prefill* of n tokens behind c cached ones takes ``a + b n + d n (c + n / 2)`` s: a layer's linear
projections are 2 FLOPs for each weight and token, its attention scores 2 FLOPs for each pair of a
token and an earlier one, times the width of attention (Kaplan et al., arXiv:2001.08361, table 1);
n tokens behind c others make n (c + n / 2) such pairs. *A load* takes, for each source that it has
tokens from, a fixed time and one per token.

Both are fitted by recursive least squares: constant memory, and a machine that changes is followed.
Errors are relative, or long prompts alone would count. A new sample replaces only what is known of
its like (restricted forgetting: Kulhavy, Automatica 23, 1987): after a day of short prefills it is
still known what a long one takes. Outliers are slow ones, mostly: the first sample of each kind is
left out (imports, first touch, connections), and no other is believed beyond `MOST_SURPRISE` times
what was expected.

Doubt is a fetch: what is not measured, or was measured at other sizes only, is never declined. A
decline brings a prefill, which corrects one side, and every `PROBE_EVERY`-th is fetched after
all, which corrects the other. What is not weighed: that a load may leave a replica for others.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi.types import SOURCES, Match, segment_owner

__all__ = ["FetchOrRecompute", "Verdict", "expected_sources"]

PROBE_EVERY = 16
"""Of so many declines of the same sources one is fetched after all."""

LEAST_SAMPLES = 3
"""Before so many samples, beside the first one, nothing counts as measured."""

MEMORY_SAMPLES = 10
"""What is known of a kind of sample weighs as much as so many of them, at most."""

MOST_SURPRISE = 4.0
"""A sample is believed up to so many times what was expected, or down to that part of it."""

SIZE_FACTOR = 2
"""Loads so many times smaller or larger than those that were measured are still like them."""

_LOADED = tuple(source for source in SOURCES if source != "engine")
_BECOMES = {"owned": ("owned", "disk"), "remote": ("remote", "replica", "disk")}
_LEAST_SHARE = 1 / 16
_SHARE_GAIN = 1 / 8
_ROUNDING = 1e-9

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to fetch, and why.

    Attributes
    ----------
    fetch
        Whether to load what was found.
    reason
        ``faster`` than computing it, or ``slower``: declined; ``probe``: slower, fetched to
        measure again; ``unmeasured``; ``off``: always fetch; ``nothing`` was found.
    load_s, saved_s
        What the load and the prefill that it saves are expected to take; None: not measured.
    """

    fetch: bool
    reason: str
    load_s: float | None = None
    saved_s: float | None = None


class FetchOrRecompute:
    """Decides between loading a prefix and computing it. Threads may share it.

    Parameters
    ----------
    is_on
        False: everything is fetched; it is measured all the same.
    """

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._lock = threading.Lock()
        self._prefill = _Fit(("fixed_s", "s_per_token", "s_per_token_pair"))
        self._prefill_count = -1
        self._load = _Fit(("fixed_s", "s_per_token") * len(_LOADED))
        self._load_count: dict[str, int] = dict.fromkeys(_LOADED, -1)
        self._sizes: dict[str, tuple[int, int]] = {}
        self._share: dict[str, float] = {}
        self._declined: Counter[frozenset[str]] = Counter()
        self._verdicts: Counter[str] = Counter()

    def note_prefill(self, tokens: int, seconds: float, *, cached_tokens: int = 0) -> None:
        """Tell what a prefill took.

        Parameters
        ----------
        tokens, seconds
            What was computed, and the time; without either it says nothing.
        cached_tokens
            Tokens before these that were there already.
        """
        _check(tokens=tokens, seconds=seconds, cached_tokens=cached_tokens)
        if not tokens or not seconds:
            return
        with self._lock:
            self._prefill_count += 1
            if self._prefill_count:
                settled = self._prefill_count > LEAST_SAMPLES
                self._prefill.add(_prefill_row(tokens, cached_tokens), seconds, settled=settled)

    def note_load(self, by_source: Mapping[str, int], seconds: float) -> None:
        """Tell what a load took.

        Parameters
        ----------
        by_source
            Tokens that it brought, by source; ``engine`` does not count. Of a load that brought
            none in all of its time: those that were expected.
        seconds
            The time.
        """
        tokens = _loaded_tokens(by_source)
        _check(seconds=seconds)
        if not tokens or not seconds:
            return
        with self._lock:
            self._note_shares(tokens)
            known = all(self._load_count[source] >= 0 for source in tokens)
            settled = all(self._load_count[source] >= LEAST_SAMPLES for source in tokens)
            if known:
                self._load.add(_load_row(tokens), seconds, settled=settled)
            for source, count in tokens.items():
                if known:
                    least, most = self._sizes.get(source, (count, count))
                    self._sizes[source] = min(least, count), max(most, count)
                    self._load_count[source] += 1
                else:
                    self._load_count[source] = max(self._load_count[source], 0)

    def judge(
        self,
        *,
        prompt_tokens: int,
        have_tokens: int,
        found_tokens: int,
        expected: Mapping[str, int],
    ) -> Verdict:
        """Decide whether to load what the store has of a prompt.

        Parameters
        ----------
        prompt_tokens
            Length of the prompt.
        have_tokens
            Leading tokens that the engine has anyway.
        found_tokens
            Length of the prefix that the store has.
        expected
            Tokens to be loaded by their likely source, as `expected_sources`. What only a lease
            tells, replicas and files, is reckoned with as often as it came about of late.
        """
        _check(prompt_tokens=prompt_tokens, have_tokens=have_tokens, found_tokens=found_tokens)
        if found_tokens > prompt_tokens:
            raise ValueError(
                f"found_tokens: expected at most the {prompt_tokens} of the prompt, "
                f"got {found_tokens}"
            )
        tokens = _loaded_tokens(expected)
        with self._lock:
            if found_tokens <= have_tokens:
                verdict = Verdict(False, "nothing")
            else:
                load_s = self._load_s(tokens)
                saved_s = self._saved_s(prompt_tokens, have_tokens, found_tokens)
                verdict = self._verdict(frozenset(tokens), load_s, saved_s)
            self._verdicts[verdict.reason] += 1
            return verdict

    def as_dict(self) -> dict[str, Any]:
        """Return what was measured and decided, as plain nested dictionaries."""
        with self._lock:
            loads = np.split(self._load.coefficients, len(_LOADED))
            return {
                "is_on": self.is_on,
                "prefill": {
                    **self._prefill.as_dict(),
                    "measured_count": max(self._prefill_count, 0),
                },
                "load": {
                    source: {
                        "fixed_s": float(fixed_s),
                        "s_per_token": float(s_per_token),
                        "measured_count": max(self._load_count[source], 0),
                        "tokens_share": self._share.get(source, 0.0),
                    }
                    for source, (fixed_s, s_per_token) in zip(_LOADED, loads, strict=True)
                },
                "verdicts": dict(self._verdicts),
            }

    def _verdict(
        self, sources: frozenset[str], load_s: float | None, saved_s: float | None
    ) -> Verdict:
        if not self.is_on:
            return Verdict(True, "off", load_s, saved_s)
        if load_s is None or saved_s is None:
            return Verdict(True, "unmeasured", load_s, saved_s)
        if load_s <= saved_s:
            return Verdict(True, "faster", load_s, saved_s)
        self._declined[sources] += 1
        is_probe = self._declined[sources] % PROBE_EVERY == 0
        return Verdict(is_probe, "probe" if is_probe else "slower", load_s, saved_s)

    def _saved_s(self, prompt_tokens: int, have_tokens: int, found_tokens: int) -> float | None:
        if self._prefill_count < LEAST_SAMPLES:
            return None
        without_s, with_s = (
            self._prefill.cost_s(_prefill_row(prompt_tokens - cached, cached))
            for cached in (have_tokens, found_tokens)
        )
        return without_s - with_s

    def _load_s(self, tokens: Mapping[str, int]) -> float | None:
        load_s = 0.0
        for expected, count in tokens.items():
            for source, share in self._outcomes(expected).items():
                least, most = self._sizes.get(source, (0, 0))
                is_near = least <= SIZE_FACTOR * count and count <= SIZE_FACTOR * most
                if self._load_count[source] < LEAST_SAMPLES or not is_near:
                    return None
                load_s += share * self._load.cost_s(_load_row({source: count}))
        return load_s if tokens else None

    def _note_shares(self, tokens: Mapping[str, int]) -> None:
        gain = _SHARE_GAIN if self._share else 1.0
        total = sum(tokens.values())
        for source in _LOADED:
            share = self._share.get(source, 0.0)
            self._share[source] = share + gain * (tokens.get(source, 0) / total - share)

    def _outcomes(self, source: str) -> dict[str, float]:
        """Return what tokens of an expected source turned out to be of late, by share of them."""
        shares = {name: self._share.get(name, 0.0) for name in _BECOMES.get(source, (source,))}
        if not any(share for name, share in shares.items() if name != "disk"):
            return {source: 1.0}
        least = _LEAST_SHARE * sum(shares.values())
        common = {name: share for name, share in shares.items() if share >= least}
        return {name: share / sum(common.values()) for name, share in common.items()}


class _Fit:
    """Seconds as a sum of features with coefficients of 0 or more, fitted one sample at a time.

    ``_spread`` is the covariance of the coefficients, where the relative error of a sample is 1.
    Scaling all seconds scales the coefficients; a sample moves what is expected of its like
    towards it, and never past it.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.coefficients: Floats = np.zeros(len(names))
        # A first sample is put down to its tokens, until others tell its parts apart.
        self._prior: Floats = np.array([1e4 if n == "s_per_token" else 1e2 for n in names])
        self._spread: Floats = np.zeros((len(names), len(names)))

    def cost_s(self, row: Floats) -> float:
        """Return what is expected of a sample with these features."""
        return float(row @ self.coefficients)

    def as_dict(self) -> dict[str, float]:
        """Return the coefficients by name."""
        return dict(zip(self._names, self.coefficients.tolist(), strict=True))

    def add(self, row: Floats, seconds: float, *, settled: bool) -> None:
        """Take in a sample; ``settled``: enough came before to tell when it is an outlier."""
        expected_s = self.cost_s(row)
        scale_s = seconds
        if settled and expected_s > 0:
            seconds = min(max(seconds, expected_s / MOST_SURPRISE), expected_s * MOST_SURPRISE)
            scale_s = min(seconds, expected_s)
        along, doubt = self._look_along(row, scale_s)
        raised = max(doubt, 1 / (MEMORY_SAMPLES - 1))
        gain = raised / (1 + raised)
        step_s = gain * (seconds - expected_s)
        moved = np.maximum(self.coefficients + along * (step_s / (scale_s * doubt)), 0)
        present = row > 0
        moved[present] *= (expected_s + step_s) / float(row @ moved)
        self.coefficients = moved
        self._spread += np.outer(along, along) * ((gain - doubt) / doubt**2)

    def _look_along(self, row: Floats, scale_s: float) -> tuple[Floats, float]:
        """Return how each coefficient varies with this sample's seconds, and their variance."""
        self._enter(row, scale_s)
        along = self._spread @ row / scale_s
        doubt = float(row @ along) / scale_s
        if doubt * scale_s**2 <= _ROUNDING * float(row**2 @ self._spread.diagonal()):
            present = np.flatnonzero(row)  # rounding has eaten what was known of these
            self._spread[present, :] = self._spread[:, present] = 0
            return self._look_along(row, scale_s)
        return along, doubt

    def _enter(self, row: Floats, scale_s: float) -> None:
        new = np.flatnonzero((row > 0) & (self._spread.diagonal() == 0))
        self._spread[new, new] = self._prior[new] * (scale_s / row[new]) ** 2


def expected_sources(
    match: Match, near_servers: Collection[int], block_tokens: int, skip_tokens: int = 0
) -> dict[str, int]:
    """Return the tokens of a match by the source that they would be loaded from.

    ``owned`` or ``remote``, by who owns the segments; that a replica or a file has them is known
    only to a lease.

    Parameters
    ----------
    match
        What was found.
    near_servers
        Servers of this client's node: ``Namespace.near_servers``.
    block_tokens
        Tokens per block of the layout.
    skip_tokens
        Leading tokens that are not to be loaded.
    """
    tokens: Counter[str] = Counter()
    start = 0
    for ref in match.segments:
        end = start + ref.block_count * block_tokens
        source = "owned" if segment_owner(ref.segment) in near_servers else "remote"
        tokens[source] += max(0, end - max(start, skip_tokens))
        start = end
    return dict(+tokens)


def _prefill_row(tokens: int, cached_tokens: int) -> Floats:
    """Return the features of a prefill; computing nothing costs nothing."""
    return np.array([bool(tokens), tokens, tokens * (cached_tokens + tokens / 2)], np.float64)


def _load_row(tokens: Mapping[str, int]) -> Floats:
    """Return the features of a load: for each source, whether it is in it and with how much."""
    parts = [(source in tokens, tokens.get(source, 0)) for source in _LOADED]
    return np.array(parts, np.float64).ravel()


def _loaded_tokens(by_source: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens by source without ``engine`` and zeros; raise for what is none."""
    for source, count in by_source.items():
        if source not in SOURCES:
            raise ValueError(f"expected sources among {', '.join(SOURCES)}, got {source!r:.80}")
        _check(**{source: count})
    return {source: by_source[source] for source in _LOADED if by_source.get(source)}


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < inf:
            raise ValueError(f"{name}: expected a finite number of 0 or more, got {value!r:.80}")
