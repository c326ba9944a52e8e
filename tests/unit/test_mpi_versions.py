"""What the version string of an MPI library tells."""

from __future__ import annotations

import pytest

from ptstore_mpi.transport.mpi_versions import known_hang, netmod, one_line

CRAY = "MPI VERSION    : CRAY MPICH version {} (ANL base 3.4a2)\nMPI BUILD INFO : Sun Feb 26 2023"
OPENMPI = "Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11"
INTEL = "Intel(R) MPI Library 2021.11 for Linux* OS\n"


@pytest.mark.parametrize("version", ["7.7.14", "8.1", "8.1.9", "8.1.28.29", "8.1.32.110"])
def test_cray_mpich_that_hangs(version):
    assert "cray-mpich up to 8.1.32" in known_hang(CRAY.format(version))


@pytest.mark.parametrize(
    "version",
    [
        CRAY.format("8.1.33.4"),
        CRAY.format("8.2.0.1"),
        CRAY.format("9.0.0.113"),
        "MPICH Version:      3.4a2",
        OPENMPI,
        INTEL,
        "",
    ],
)
def test_everything_else_is_probed(version):
    assert known_hang(version) is None


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: today\x00", "MPICH 5.0.2"),
        (OPENMPI, "Open MPI v5.0.11"),
        (CRAY.format("8.1.25.17"), "MPI VERSION : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)"),
        (INTEL, "Intel(R) MPI Library 2021.11 for Linux* OS"),
        ("", "not known"),
    ],
)
def test_one_line(version, line):
    assert one_line(version) == line


BOTH = "MPICH Version: 5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH CC: cc"
ONE = "MPICH Version: 4.3\nMPICH Device:       ch4:ofi\n"


@pytest.mark.parametrize(
    ("version", "environment", "told"),
    [
        (BOTH, {}, "ucx (the library's default)"),
        (BOTH, {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}, "ofi, FI_PROVIDER=tcp"),
        (ONE, {"UCX_TLS": ""}, "ofi"),
        (OPENMPI, {"OMPI_MCA_pml": "ucx"}, "not known, OMPI_MCA_pml=ucx"),
        (INTEL, {}, "not known"),
    ],
)
def test_netmod_as_far_as_it_is_known(version, environment, told):
    assert netmod(version, environment) == told
