"""The checkers can fail: every rule that is taken away is missed within the seeds of CI."""

from __future__ import annotations

import pytest
from engine_gets import gets_into_the_engine
from mutations import MUTATIONS

from ptstore_mpi.sim.observer import InvariantError
from ptstore_mpi.sim.run import SeedFailed, run_seed
from ptstore_mpi.sim.workloads import WORKLOADS

CI_SEEDS = 1000


def first_caught(workloads=tuple(WORKLOADS)):
    """Return (seed, workload, what a checker said) of the first run that one fails.

    A crash is not a catch: what only crashes is noticed by nobody.
    """
    for seed in range(CI_SEEDS):
        for workload in workloads:
            try:
                run_seed(workload, seed)
            except SeedFailed as error:
                cause = error.__cause__
                if isinstance(cause, InvariantError):
                    return seed, workload, str(cause)
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name.replace(" ", "-"))
def test_a_missing_rule_is_caught(mutation):
    with mutation.planted():
        caught = first_caught(mutation.workloads)
    assert caught is not None, f"{CI_SEEDS} seeds did not notice: {mutation.name}"


@pytest.mark.timeout(600)
def test_a_get_that_lands_in_the_engine_is_caught():
    """P13, CE 2: nothing may write into an engine's memory after its load has returned."""
    with gets_into_the_engine():
        caught = first_caught()
    assert caught is not None
    assert "written after its load returned" in caught[2]


def test_counterexamples_are_all_there():
    """Those that are rules of the protocol; 2 is a test of its own."""
    named = {
        int(number)
        for mutation in MUTATIONS
        for part in mutation.rule.split(", ")
        if part.startswith("CE ")
        for number in [part.removeprefix("CE ")]
    }
    assert named | {2} == set(range(1, 23))
