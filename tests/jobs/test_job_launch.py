"""Job scripts run with stand-ins for the schedulers' launchers: commands, faults, one real job."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import h5py
import pytest

from experiments import report
from ptstore_mpi.testing.launching import find_mpiexec

ROOT = Path(__file__).resolve().parents[2]
TOY = {
    "JOB_CONTEXT_TOKENS": "96",
    "JOB_DOCUMENTS": "3",
    "JOB_REQUESTS_PER_CLIENT": "3",
    "JOB_MEMORY": "16MiB",
}
HOSTS = [f"x3001c0s1b0n{index}" for index in range(8)]


def modules(launches):
    """Return the module of every launch of ranks, and what precedes its arguments."""
    programs = [entry["program"] for entry in launches if "-m" in entry["program"]]
    return [program[program.index("mpi4py") + 2] for program in programs]


def options_of(program):
    words = program[program.index("experiments.exp_qa_replay") + 1 :]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_the_main_job_on_polaris_as_it_is_submitted(machine, model_folder):
    machine.pbs(*HOSTS)
    done = machine.run("jobs/polaris/qa_replay.pbs", JOB_MODEL=str(model_folder))
    assert done.returncode == 0, done.stderr
    stage, doctor, replay, clean = machine.launches()
    assert modules([stage, doctor, replay, clean]) == ["ptstore_mpi", "experiments.exp_qa_replay"]
    assert doctor["options"] == replay["options"]
    bind = "list:0,32:16,48:0,32:16,48:25-31:17-23:9-15:1-7"
    expected = {"-n": "64", "--ppn": "8", "--cpu-bind": bind}
    assert {key: replay["options"][key] for key in expected} == expected
    assert replay["hosts"] == HOSTS
    assert replay["program"][:4] == [
        str(ROOT / "jobs" / "common" / "gpu_affinity.sh"),
        f"{machine.environment['JOB_VENV']}/bin/python", "-m", "mpi4py",
    ]  # fmt: skip
    given = options_of(replay["program"])
    node_folder = clean["program"][-1]
    assert clean["program"][:-1] == ["rm", "-rf"]
    assert given["--model"] == f"{node_folder}/model"
    assert given["--requests"] == str(8 * 4 * 64)
    assert given["--threads"] == "7"
    assert given["--systems"] == "vanilla,prefix,evostore,ptstore"
    assert (given["--engine"], given["--dtype"]) == ("transformers", "float32")
    assert given["--output"] == machine.environment["JOB_RESULTS"]
    for entry in (stage, clean):
        assert (entry["options"]["-n"], entry["options"]["--ppn"]) == ("8", "1")
    environment = replay["environment"]
    told = {
        "HF_HUB_OFFLINE": "1",
        "PTSTORE_STALL_DIR": machine.environment["JOB_RESULTS"],
        "TMPDIR": "/tmp",
        "PTSTORE_SERVERS_PER_NODE": "2",
        "PTSTORE_MEMORY_BYTES": "2GiB",
        "PBS_JOBID": "7.server",
        "MPICH_GPU_SUPPORT_ENABLED": "0",
        "MPICH_OFI_NIC_POLICY": "USER",
        "MPICH_OFI_NIC_MAPPING": "0:0,2,6,7;1:1,3,4,5",
    }
    assert {name: environment[name] for name in told} == told
    assert environment["HF_HOME"].startswith(node_folder)
    assert environment["POOLED_SYSTEMS"] == "2"
    assert doctor["environment"]["PTSTORE_SERVERS_PER_NODE"] == "4"


def test_weak_scaling_is_runs_on_the_first_nodes_with_as_many_requests_per_client(
    machine, model_folder
):
    machine.pbs(*HOSTS)
    settings = {"JOB_NODE_COUNTS": "2:4:8", "JOB_DOCTOR": "0", "JOB_STAGE": "0"}
    done = machine.run("jobs/polaris/qa_replay.pbs", JOB_MODEL=str(model_folder), **settings)
    assert done.returncode == 0, done.stderr
    *runs, _clean = machine.launches()
    assert [run["hosts"] for run in runs] == [HOSTS[:2], HOSTS[:4], HOSTS]
    assert [run["options"]["-n"] for run in runs] == ["16", "32", "64"]
    requests = [options_of(run["program"])["--requests"] for run in runs]
    assert requests == ["512", "1024", "2048"]
    assert options_of(runs[0]["program"])["--model"] == str(model_folder)


def test_settings_from_a_file_and_equal_shares_of_the_cores(machine, model_folder, tmp_path):
    machine.pbs(*HOSTS[:2])
    settings = tmp_path / "mine.sh"
    settings.write_text("JOB_SYSTEMS=vanilla,ptstore\nJOB_ARGS='--seed 5'\nJOB_CPU_BIND=depth\n")
    done = machine.run(
        "jobs/polaris/first_job.pbs", JOB_MODEL=str(model_folder), JOB_SETTINGS=str(settings)
    )
    assert done.returncode == 0, done.stderr
    replay = machine.launches()[2]
    assert (replay["options"]["--depth"], replay["options"]["--cpu-bind"]) == ("5", "verbose,depth")
    given = options_of(replay["program"])
    assert (given["--systems"], given["--seed"]) == ("vanilla,ptstore", "5")


def test_data_goes_to_the_nodes_as_the_model_does(machine, model_folder, tmp_path):
    machine.pbs(*HOSTS[:2])
    (tmp_path / "data" / "squad").mkdir(parents=True)
    data = {"JOB_DATASET": "squad", "PTSTORE_DATA": str(tmp_path / "data")}
    done = machine.run("jobs/polaris/first_job.pbs", JOB_MODEL=str(model_folder), **data)
    assert done.returncode == 0, done.stderr
    model, staged, _doctor, replay, clean = machine.launches()
    node_folder = clean["program"][-1]
    assert model["program"][1:] == [str(model_folder), f"{node_folder}/model"]
    assert staged["program"][1:] == [f"{tmp_path}/data/squad", f"{node_folder}/data/squad"]
    assert replay["environment"]["PTSTORE_DATA"] == f"{node_folder}/data"


def test_staging_follows_links_and_leaves_a_whole_folder_or_none(machine, tmp_path):
    blob = tmp_path / "blob"
    blob.write_text("weights")
    source, target = tmp_path / "snapshot", tmp_path / "node" / "model"
    source.mkdir()
    (source / "model.safetensors").symlink_to(blob)
    for _ in range(2):  # the second finds it there
        done = machine.run("jobs/common/stage_in.sh", str(source), str(target))
        assert done.returncode == 0, done.stderr
        blob.unlink(missing_ok=True)
        (source / "model.safetensors").unlink(missing_ok=True)
    assert (target / "model.safetensors").read_text() == "weights"
    assert not (target / "model.safetensors").is_symlink()
    (source / "lost").symlink_to(blob)
    done = machine.run("jobs/common/stage_in.sh", str(source), str(tmp_path / "node" / "other"))
    assert done.returncode != 0
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["model"]
    machine.log.touch()  # a file where a folder should be
    done = machine.run("jobs/common/stage_in.sh", str(source), f"{machine.log}/x/model")
    assert (done.returncode, "set JOB_SCRATCH, or JOB_STAGE=0" in done.stderr) == (2, True)


def test_another_module_takes_the_place_of_the_experiment(machine, model_folder):
    machine.pbs(*HOSTS[:1])
    done = machine.run(
        "jobs/polaris/launch.sh", "ptstore_mpi", "doctor", "--json",
        JOB_MODEL=str(model_folder), JOB_DOCTOR="0", JOB_STAGE="0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (launch,) = machine.launches()[:-1]
    assert launch["program"][-2:] == ["doctor", "--json"]
    assert launch["options"]["--ppn"] == "6"  # the servers of one system


def test_the_job_on_slurm(machine, model_folder):
    machine.slurm(nodes=2, cpus=32)
    done = machine.run(
        "jobs/slurm/first_job.sbatch",
        JOB_MODEL=str(model_folder), JOB_SRUN_MPI="pmix", SLURM_GPUS_ON_NODE="4",
        STAND_IN_RANKS="", JOB_VERBOSE="0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stage, doctor, replay, clean = machine.launches()
    assert doctor["options"] == replay["options"] == {
        "--mpi": "pmix", "--nodes": "2", "--ntasks": "12", "--ntasks-per-node": "6",
        "--distribution": "block", "--cpus-per-task": "5", "--cpu-bind": "cores",
        "--kill-on-bad-exit": "1", "--export": "ALL",
    }  # fmt: skip
    assert stage["options"]["--ntasks-per-node"] == clean["options"]["--ntasks-per-node"] == "1"
    given = options_of(replay["program"])
    assert (given["--threads"], given["--requests"]) == ("5", str(2 * 4 * 6))
    assert replay["environment"]["JOB_GPUS"] == "0:1:2:3"


def test_the_main_job_with_vllm_and_the_model_of_the_paper(machine, model_folder):
    machine.pbs(*HOSTS)
    venv = machine.folder / "venv-vllm"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(machine.put("python-with-vllm", "#!/bin/bash\nexit 0\n"))
    done = machine.run(
        "jobs/polaris/qa_replay.pbs",
        JOB_MODEL=str(model_folder), JOB_ENGINE="vllm", JOB_DTYPE="bfloat16", JOB_VENV=str(venv),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, replay, clean = machine.launches()
    given = options_of(replay["program"])
    assert (given["--engine"], given["--dtype"]) == ("vllm", "bfloat16")
    assert given["--systems"] == "vanilla,prefix,evostore,ptstore"
    assert replay["program"][1] == f"{venv}/bin/python"
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):  # not in a home that all nodes share
        assert replay["environment"][name].startswith(clean["program"][-1])


@pytest.mark.parametrize(
    ("hosts", "settings", "complaint"),
    [
        (HOSTS[:1], {}, "JOB_NODE_COUNTS asks for a run on 2 nodes, but this allocation has 1"),
        (HOSTS[:1] * 2, {}, "found 1 host(s) in 2 lines: ask for -l select=N:system=polaris -l pl"),
        (HOSTS[:2], {"JOB_MODEL": "/nowhere"}, "JOB_MODEL: expected a folder with config.json"),
        (HOSTS[:2], {"JOB_VENV": "/nowhere"}, "build it on a login node first"),
        (HOSTS[:2], {"JOB_SERVERS": "5"}, "JOB_SERVERS: expected 1 to 4 on a node of Polaris"),
        (HOSTS[:2], {"JOB_CLIENTS": "all"}, "JOB_CLIENTS: expected a whole number of at least 1"),
        (HOSTS[:2], {"JOB_NODE_COUNTS": "2:x"}, "expected a whole number of at least 1, given 'x'"),
        (HOSTS[:2], {"JOB_DATASET": "squad"}, "expected the folder squad in PTSTORE_DATA"),
        (HOSTS[:2], {"JOB_ARGS": "--systems vanilla"}, "JOB_ARGS: how many ranks serve depends"),
        (
            HOSTS[:2],
            {"JOB_ENGINE": "tgi"},
            "JOB_ENGINE: expected transformers or vllm, given 'tgi'",
        ),
        (HOSTS[:2], {"JOB_ENGINE": "vllm"}, "JOB_ENGINE=vllm: vLLM is not installed in "),
        (HOSTS[:2], {"JOB_MODULES": "conda"}, "there is no command 'module'"),
        (HOSTS[:2], {"JOB_SETTINGS": "/nowhere"}, "JOB_SETTINGS: expected a file"),
        (HOSTS[:2], {"PBS_NODEFILE": ""}, "expected to run inside a PBS job"),
        (HOSTS[:2], {"PBS_O_WORKDIR": "/tmp"}, "/tmp is not the top folder of the repository"),
    ],
)
def test_a_job_that_cannot_work_ends_at_once_and_says_why(
    machine, model_folder, hosts, settings, complaint
):
    machine.pbs(*hosts)
    done = machine.run("jobs/polaris/first_job.pbs", **{"JOB_MODEL": str(model_folder), **settings})
    assert done.returncode == 2
    assert complaint in done.stderr
    assert not machine.log.exists()


def test_slurm_says_why_too(machine, model_folder):
    done = machine.run("jobs/slurm/first_job.sbatch", JOB_MODEL=str(model_folder))
    assert (done.returncode, "use sbatch" in done.stderr) == (2, True)
    machine.slurm(nodes=2, cpus=4)
    done = machine.run("jobs/slurm/first_job.sbatch", JOB_MODEL=str(model_folder))
    assert done.returncode == 2
    assert "6 ranks on a node, but this job has only 4 CPU(s)" in done.stderr


def test_a_failing_doctor_ends_the_job_before_the_experiment(machine, model_folder):
    machine.pbs(*HOSTS[:2])
    machine.put("python", "#!/bin/sh\nexit 3\n")
    (machine.folder / "venv").mkdir()
    (machine.folder / "venv" / "bin").symlink_to(machine.bin)
    done = machine.run(
        "jobs/polaris/first_job.pbs",
        JOB_MODEL=str(model_folder), JOB_VENV=str(machine.folder / "venv"), STAND_IN_RANKS="each",
    )  # fmt: skip
    assert done.returncode == 3
    assert modules(machine.launches()) == ["ptstore_mpi"]
    assert machine.launches()[-1]["program"][:2] == ["rm", "-rf"]


@pytest.fixture
def build(machine):
    """Return a function that builds the environment of a copy of jobs/ with recording tools."""
    clone = machine.folder / "clone"
    shutil.copytree(ROOT / "jobs", clone / "jobs")
    for name in ("module", "conda"):
        machine.put(name, f"#!/bin/bash\necho {name} $* >>{machine.log}\n")
    variables = "$MPICC $PIP_NO_BINARY $CC $CXX $OMP_NUM_THREADS"
    machine.put("make", f'#!/bin/bash\necho "make $* : {variables}" >>{machine.log}\n')

    def run(
        *,
        python_status=0,
        library="MPI VERSION    : CRAY MPICH version 9.0.1.0 (ANL 4.1)",
        **settings,
    ):
        machine.put("python3", f"#!/bin/bash\nexit {python_status}\n")
        for venv in (".venv", ".venv-vllm"):
            (clone / venv / "bin").mkdir(parents=True, exist_ok=True)
            pip = f'[[ $2 != pip ]] || {{ echo "{venv} $* : {variables}" >>{machine.log}; exit; }}'
            machine.put("python", f'#!/bin/bash\n{pip}\necho "{library}"\n').rename(
                clone / venv / "bin" / "python"
            )
        del machine.environment["JOB_MODULES"]
        return machine.run(clone / "jobs" / "polaris" / "build_env.sh", **settings)

    return run


def test_the_environment_is_built_with_the_compilers_of_polaris(machine, build):
    done = build()
    assert done.returncode == 0, done.stderr
    assert machine.log.read_text().splitlines() == [
        "module use /soft/modulefiles", "module load PrgEnv-gnu", "module load conda",
        "module unload craype-accel-nvidia80", "conda activate base",
        "make MPI=site PYTHON=python3 setup model : cc mpi4py gcc g++ 4",
    ]  # fmt: skip
    assert "first_job.pbs" in done.stdout


def test_vllm_has_an_environment_of_its_own_over_the_same_mpi(machine, build):
    done = build(JOB_ENGINE="vllm")
    assert done.returncode == 0, done.stderr
    pip = "-m pip install --quiet vllm>=0.32,<0.33 -e .[experiments]"
    assert machine.log.read_text().splitlines()[-1] == f".venv-vllm {pip} : cc mpi4py gcc g++ 4"
    assert done.stdout.count("mpi4py uses: MPI VERSION    : CRAY MPICH") == 2


def test_an_environment_over_another_mpi_or_an_old_python_is_refused(machine, build):
    done = build(library="MPICH Version:      5.0.2")
    assert done.returncode == 2
    assert "expected mpi4py over cray-mpich, got 'MPICH Version:      5.0.2'" in done.stderr
    machine.log.unlink()
    machine.environment["JOB_MODULES"] = "old"
    done = build(python_status=1)
    assert (done.returncode, "expected Python 3.11 or newer" in done.stderr) == (2, True)
    assert "make" not in machine.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec beside this Python or on the PATH")
def test_the_first_job_for_real_on_two_virtual_nodes(machine, model_folder):
    machine.pbs(*HOSTS[:2])
    done = machine.run(
        "jobs/polaris/first_job.pbs",
        JOB_MODEL=str(model_folder), JOB_CLIENTS="1", JOB_SERVERS="1", JOB_THREADS="1",
        STAND_IN_RANKS="mpi", STAND_IN_MPIEXEC=str(find_mpiexec()), timeout_s=280, **TOY,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks          6 on 2 node(s): 4 server(s), 2 client(s)" in done.stdout
    assert "local rank 0: server, GPU none" in done.stdout
    assert "local rank 2: client, GPU 0" in done.stdout
    path = report.find_file(machine.folder / "results")
    assert path.name.endswith("_7.server.h5")
    script = ROOT / "jobs" / "polaris" / "first_job.pbs"
    kept = machine.folder / "results" / "jobs" / "7.server.sh"
    assert kept.read_bytes() == script.read_bytes()
    with h5py.File(path) as file:
        assert file.attrs["job_id"] == "7.server"
        assert file.attrs["job_script_sha256"] == hashlib.sha256(script.read_bytes()).hexdigest()
        assert (file.attrs["servers_count"], file.attrs["clients_count"]) == (4, 2)
        environment = json.loads(file.attrs["environment"])
        assert environment["PTSTORE_SERVERS_PER_NODE"] == "1"
        assert len(file["samples/ptstore/ttft_s"]) == 6
    with report.open_results(path) as file:
        assert all(row["outputs_equal"] for row in report.summarise(file))
    assert list((machine.folder / "scratch").iterdir()) == []  # staged in, and taken away
