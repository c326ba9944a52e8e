"""Put first on PYTHONPATH, refuses every socket of Python that leaves this machine.

Also looking up names of other machines; each attempt is a line of $NO_NETWORK_FOLDER/attempts, so
that one that is caught and survived is seen too, and each process leaves a file process-<pid>.
Addresses of loopback and Unix sockets are free.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["NO_NETWORK_FOLDER"])
OWN_NAMES = {None, "", "localhost", os.uname().nodename}
LOOKUPS = {"socket.getaddrinfo", "socket.gethostbyname"}
SENDS = {"socket.connect", "socket.sendto", "socket.sendmsg"}


def is_local(host: Any) -> bool:
    """Tell whether a name or address is this machine's own."""
    name = host.decode() if isinstance(host, bytes) else host
    if name in OWN_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise if the event would leave this machine (an audit hook)."""
    if event in LOOKUPS:
        host = arguments[0]
    elif event in SENDS and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    if not is_local(host):
        with (FOLDER / "attempts").open("a") as log:
            log.write(f"{event} {host}\n")
        raise OSError(f"there is no network here: {event} {host}")


(FOLDER / f"process-{os.getpid()}").touch()
sys.addaudithook(refuse)
