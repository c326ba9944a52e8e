"""Seeds of CI: every invariant in every run, every fault fired, same seed and same decisions."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from mutations import MUTATIONS

from ptstore_mpi.sim.__main__ import main
from ptstore_mpi.sim.faults import FAULTS, SITUATIONS, FaultPlan
from ptstore_mpi.sim.run import run_seed
from ptstore_mpi.sim.workloads import WORKLOADS

CI_SEEDS = 2000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_invariant_holds_in_every_run(capsys):
    status = main(["--seeds", str(CI_SEEDS)])
    text = capsys.readouterr().out
    assert status == 0, text
    assert f"{CI_SEEDS * len(WORKLOADS)} runs" in text
    counted = dict(re.findall(r"^ +(\w+) +(\d+)$", text, re.MULTILINE))
    assert set(counted) == {*FAULTS, *SITUATIONS}
    never = [name for name, count in counted.items() if not int(count)]
    assert not never, f"these never happened: {never}"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_same_seed_gives_the_same_run(workload):
    """Invariant 8, in one process and in another with other hashes."""
    seeds = range(5)
    here = [run_seed(workload, seed).decisions for seed in seeds]
    assert len(set(here)) == len(here)
    assert [run_seed(workload, seed).decisions for seed in seeds] == here
    program = (
        "from ptstore_mpi.sim.run import run_seed\n"
        f"print(*(run_seed({workload!r}, seed).decisions for seed in {list(seeds)}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == here


@pytest.mark.parametrize("workload", WORKLOADS)
def test_counted_bytes_decide_as_real_ones_do(workload):
    for seed in range(5):
        plan = FaultPlan(lose=0.05, duplicate=0.1, reorder=0.2, stall=0.01, pause=0.01)
        real = run_seed(workload, seed, plan=plan)
        counted = run_seed(workload, seed, plan=plan, counts_only=True)
        assert counted.decisions == real.decisions


def test_without_faults_nothing_goes_wrong():
    for workload in WORKLOADS:
        outcome = run_seed(workload, 1, plan=FaultPlan())
        assert not set(outcome.fired) & {*FAULTS, "reply_after_giving_up", "read_past_lease"}


def test_a_failing_seed_says_how_to_replay_it(capsys):
    (mutation,) = (each for each in MUTATIONS if each.name == "an id is enough")
    with mutation.planted():
        assert main(["--workload", "tiny", "--seeds", "20", "--processes", "1"]) == 1
        told = capsys.readouterr().out
        assert "1: client" in told
        assert "was given wrong bytes" in told
        assert re.search(r"^ +\d+\.\d+ s  client \d +begins to load", told, re.MULTILINE)
        replay = re.search(r"replay: python -m ptstore_mpi.sim (.*)", told)
        assert replay is not None
        assert main(replay[1].split()) == 1
        assert "was given wrong bytes" in capsys.readouterr().out
    assert main(replay[1].split()) == 0, "with the rule, the same seed is clean"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--seeds", "0"], "at least 1"),
        (["--workload", "nothing"], "invalid choice"),
        (["--plan", '{"losse": 1}'], "losse"),
        (["--plan", "lose"], "JSON"),
        (["--plan", '{"lose": 2}'], "from 0 to 1, got 2"),
        (["--plan", '{"delay_s": -1}'], "from 0 to inf, got -1"),
        (["--seeds", "abc"], "'abc'"),
    ],
)
def test_a_wrong_command_line_is_told(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err
