"""What `make dist` built: its contents, and the wheel in a venv of its own, far from here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from readme_scripts import (
    ROOT,
    TWO_NODES,
    check_example_in_one_process,
    check_example_on_two_nodes,
    lines_of,
    outputs,
    save_script,
)

import ptstore_mpi

DIST = ROOT / "dist"
DOCTOR = ["-m", "ptstore_mpi", "doctor"]
# What would lead back to the repository or change the settings.
NOT_TAKEN_ALONG = ("PTSTORE_", "PYTHON", "VIRTUAL_ENV", "PMI_", "PMIX_", "HYDRA_", "OMPI_")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(NOT_TAKEN_ALONG)}

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def asked_for(request: pytest.FixtureRequest) -> None:
    if "dist" not in request.config.option.markexpr:
        pytest.skip("make test-dist builds what is looked into here")


@pytest.fixture(scope="module")
def source_files() -> set[str]:
    (path,) = DIST.glob(f"ptstore_mpi-{ptstore_mpi.__version__}.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return {name for name in names if name != "PKG-INFO" and ".egg-info/" not in name}


@pytest.fixture(scope="module")
def wheel() -> Path:
    (path,) = DIST.glob(f"ptstore_mpi-{ptstore_mpi.__version__}-*.whl")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder outside the repository, where everything is run."""
    path = tmp_path_factory.mktemp("elsewhere")
    assert not path.is_relative_to(ROOT)
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, folder: Path) -> Path:
    """Return the interpreter of a fresh venv with the wheel and MPICH."""
    found = folder / "venv" / "bin" / "python"
    pip = [found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", found.parent.parent],
        [*pip, "-c", ROOT / "constraints.txt", f"{wheel}[mpich]"],
    ):
        subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True)
    return found


def test_the_source_distribution_holds_what_git_tracks(source_files: set[str]) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout to compare with")
    command = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"]
    assert source_files == {name for name in lines_of(command) if (ROOT / name).exists()}


def test_the_wheel_holds_the_package_and_its_licence(wheel: Path, source_files: set[str]) -> None:
    info = f"ptstore_mpi-{ptstore_mpi.__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        licence = archive.read(f"{info}licenses/LICENSE")
    package = {name for name in names if not name.startswith(info)}
    (native,) = (name for name in package if name.endswith(".so"))
    assert native.startswith("ptstore_mpi/_native.")
    assert {"ptstore_mpi/py.typed", "ptstore_mpi/_native.pyi"} < package
    assert package - {native} == {name for name in source_files if name.startswith("ptstore_mpi/")}
    assert licence == (ROOT / "LICENSE").read_bytes()


def test_it_is_imported_from_anywhere_and_knows_its_version(python: Path, folder: Path) -> None:
    code = (
        "import importlib.metadata as m, ptstore_mpi as p; "
        "print(p.__version__, m.version('ptstore-mpi'), p.__file__)"
    )
    (line,) = outputs(python, "-c", code, folder=folder, environment=ENVIRONMENT)
    version, installed, path = line.split(maxsplit=2)
    assert version == installed == ptstore_mpi.__version__
    assert Path(path).is_relative_to(folder / "venv")


def test_the_example(python: Path, folder: Path) -> None:
    example = save_script("example.py", folder)
    alone = outputs(python, example, folder=folder, environment=ENVIRONMENT)
    check_example_in_one_process(alone)
    environment = {**ENVIRONMENT, **TWO_NODES}
    check_example_on_two_nodes(
        outputs(python, example, ranks=4, folder=folder, environment=environment)
    )


def test_the_doctor(python: Path, folder: Path) -> None:
    command = [python.with_name("ptstore"), "doctor"]
    assert "usable         yes" in lines_of(command, folder=folder, environment=ENVIRONMENT)
    (line,) = outputs(
        python, *DOCTOR, "--json", ranks=4, folder=folder, environment=ENVIRONMENT | TWO_NODES
    )
    report = json.loads(line)
    assert report["usable"], report
    assert report["mpi"]["library"].startswith("MPICH")
    assert report["job"]["node_count"] == 2
