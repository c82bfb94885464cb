"""A real slow link between ranks of one machine: network namespaces on a bridge, each behind a shaped pair of devices.

Needs Linux, the rights of an administrator and iproute2 (`ip`, `tc`). A token bucket (tbf) limits what a rank sends and what it
is sent; delay is the kernel's own. Unlike a link that is simulated, this one costs some processor time, and it is not quite
full-duplex: what TCP acknowledges in one direction waits behind what is sent in the other.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_NETWORK = 0x40000000  # CLONE_NEWNET
_FOLDER = Path("/var/run/netns")
_MTU = 65000  # large packets: small ones cost more processor time than the copy that they make


@contextmanager
def shaped_network(name: str, ranks: int, bandwidth: float) -> Generator[None, None, None]:
    """Namespaces `name`0, `name`1, … which reach each other at so many bytes a second; removed at the end.

    Args:
        name: begins the names of what is made.
        ranks: how many.
        bandwidth: of each, in either direction.

    Raises:
        SystemExit: this machine lets nobody, or not this user, make namespaces or shape links.
    """
    _require()
    hub = f"{name}hub"
    made: list[str] = []
    shape = f"tbf rate {round(8 * bandwidth)}bit burst 128kb limit 4mb"
    try:
        for space in (hub, *(f"{name}{rank}" for rank in range(ranks))):
            _run(f"ip netns add {space}")
            made.append(space)
        _run(f"ip -n {hub} link add bridge0 type bridge")
        _run(f"ip -n {hub} link set bridge0 up")
        for rank in range(ranks):
            own = f"{name}{rank}"
            _run(f"ip -n {hub} link add port{rank} mtu {_MTU} type veth peer name eth0 mtu {_MTU} netns {own}")
            _run(f"ip -n {hub} link set port{rank} master bridge0 up")
            _run(f"ip -n {own} addr add 10.77.0.{rank + 1}/24 dev eth0")
            _run(f"ip -n {own} link set eth0 up")
            _run(f"ip -n {own} link set lo up")
            _run(f"tc -n {own} qdisc add dev eth0 root {shape}")
            _run(f"tc -n {hub} qdisc add dev port{rank} root {shape}")
        yield
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def enter(space: str) -> None:
    """Moves the calling thread, and what it starts later, into a namespace; gloo will use its device."""
    handle = os.open(_FOLDER / space, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, _NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space}")
    finally:
        os.close(handle)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _require() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"--link real needs {' and '.join(missing)} (iproute2): leave the option out for a simulated link")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"--link real: {command!r} failed ({done.stderr.strip()}): it takes an administrator and a kernel with network "
            "namespaces, veth, bridge and tbf; leave the option out for a simulated link"
        )
