"""Job scripts and the commands of jobs/README.md against the queues of Polaris."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job_directives import DirectiveError, complaints, directives, request_of

JOBS = Path(__file__).resolve().parents[2] / "jobs"
COMMANDS = re.findall(r"^qsub .*$", (JOBS / "README.md").read_text(), re.MULTILINE)
GOOD = "qsub -A P jobs/polaris/qa_replay.pbs"


def script_of(command: str) -> str:
    return (JOBS.parent / command.split()[-1]).read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_asks_for_what_its_queue_takes(command):
    request = request_of(script_of(command), command)
    assert complaints(request) == []
    assert request.options["k"] == "doe"
    counts = re.findall(r"JOB_NODE_COUNTS=([\d:]+)", command)
    assert all(int(count) <= request.nodes for found in counts for count in found.split(":"))


def test_the_readme_submits_every_script():
    assert {command.split()[-1] for command in COMMANDS} == {
        f"jobs/polaris/{path.name}" for path in (JOBS / "polaris").glob("*.pbs")
    }


def test_the_first_job_is_small_and_the_main_job_is_the_papers():
    first = request_of((JOBS / "polaris" / "first_job.pbs").read_text())
    main = request_of((JOBS / "polaris" / "qa_replay.pbs").read_text())
    assert (first.options["q"], first.nodes, first.walltime_min) == ("debug", 2, 30)
    assert (main.options["q"], main.nodes, main.walltime_min) == ("debug-scaling", 8, 60)
    assert complaints(main) == ["no project to charge: -A"]  # nobody's project is in the file


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("-q prod", "prod takes 10 to 496 nodes, not 8"),
        ("-q prod -l select=10:system=polaris -l walltime=04:00:00", "prod takes 5 to 180 min"),
        ("-q prod -l select=25:system=polaris -l walltime=07:00:00", "prod takes 5 to 360 min"),
        ("-l select=11:system=polaris", "debug-scaling takes 1 to 10 nodes, not 11"),
        ("-l walltime=01:00:01", "debug-scaling takes 5 to 60 min"),
        ("-l walltime=00:04:00", "debug-scaling takes 5 to 60 min, not 4"),
        ("-q preemptable", "-r y"),
        ("-q small", "no queue 'small'"),
        ("-l place=free", "place=scatter"),
        ("-l filesystems=eagle", "filesystems with home"),
        ("-l select=8", "system=polaris"),
    ],
)
def test_what_polaris_would_refuse_is_found(options, complaint):
    request = request_of(script_of(GOOD), GOOD.replace("-A P", f"-A P {options}"))
    (found,) = complaints(request)
    assert complaint in found


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/bash -l\n#PBS -q debug  # the small one\n",
        "#!/bin/bash -l\n#PBS -q debug\n# a comment\n#PBS -r y\n",
        "#!/bin/bash -l\nset -e\n#PBS -q debug\n",
        "#!/bin/bash\n#PBS -q debug\n",
        "#!/bin/bash -l\n#PBS -q\n",
    ],
)
def test_directives_that_pbs_would_misread_are_found(text):
    with pytest.raises(DirectiveError):
        request_of(text)


@pytest.mark.parametrize("path", sorted((JOBS / "slurm").glob("*.sbatch")), ids=lambda p: p.name)
def test_slurm_directives_are_one_block_and_name_no_site(path):
    given = dict(
        words[0].split("=") for words in directives(path.read_text(), "#SBATCH") if "=" in words[0]
    )
    assert given.keys() == {"--job-name", "--nodes", "--time"}
    assert int(given["--nodes"]) == (2 if path.stem == "first_job" else 8)
