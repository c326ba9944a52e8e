"""What the version string of an MPI library tells. Pure: starts no MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["known_hang", "netmod", "one_line"]

_CRAY_LAST_BAD = (8, 1, 32)
_NETMOD_VARIABLE = "MPIR_CVAR_CH4_NETMOD"
_HINTS = (
    *("UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "MPIR_CVAR_OFI_USE_PROVIDER"),
    *("MPICH_OFI_NIC_POLICY", "I_MPI_OFI_PROVIDER"),
    *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_osc"),
)
_DEVICE = re.compile(r"MPICH Device:\s*ch4:([\w ,]+)")
_CRAY = re.compile(r"CRAY MPICH version (\d+(?:\.\d+)*)", re.IGNORECASE)


def one_line(library_version: str) -> str:
    """Return name and number out of `MPI_Get_library_version`, without padding and packaging."""
    lines = library_version.strip("\x00 \n").splitlines() or ["not known"]
    name = lines[0].partition(", package:")[0].replace("Version:", " ")
    return " ".join(name.split())


def known_hang(library_version: str) -> str | None:
    """Return why one-sided reads between nodes must not be tried on this library, or None.

    Parameters
    ----------
    library_version
        What `MPI_Get_library_version` says.
    """
    # "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)": the fourth number counts
    # builds. Up to 8.1.32 MPI_Get and MPI_Win_flush between nodes hang *inside* the call over
    # Slingshot, so a probe could only abort the job.
    found = _CRAY.search(library_version)
    if found is None:
        return None
    version = tuple(map(int, found[1].split(".")))[:3]
    if version > _CRAY_LAST_BAD:
        return None
    last = ".".join(map(str, _CRAY_LAST_BAD))
    return f"MPI_Get between nodes is known to hang on cray-mpich up to {last}"


def netmod(library_version: str, environment: Mapping[str, str]) -> str:
    """Return what carries MPI's messages between nodes, as far as it can be told from outside.

    Parameters
    ----------
    library_version
        What `MPI_Get_library_version` says; MPICH names what it was built with.
    environment
        Variables of the process.
    """
    found = _DEVICE.search(library_version)
    built = found[1].replace(",", " ").split() if found else []
    name = environment.get(_NETMOD_VARIABLE) or (built[0] if built else "not known")
    if len(built) > 1 and not environment.get(_NETMOD_VARIABLE):
        name += " (the library's default)"  # the first that it was built with
    hints = [f"{key}={environment[key]}" for key in _HINTS if environment.get(key)]
    return ", ".join([name, *hints])
