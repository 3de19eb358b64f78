"""Machines with addresses of their own: network namespaces on one bridge, whose links can be cut.

Decision: namespaces of the kernel, not a proxy that drops packets: a cut link looks to a program exactly as a pulled cable does.
Linux only, as root, with iproute2.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

COMMAND_S = 30.0


@dataclass(frozen=True)
class Node:
    """One namespace: its name and address, and its port of the bridge in the namespace `switch`."""

    name: str
    address: str
    switch: str
    port: str

    @property
    def enter(self) -> tuple[str, ...]:
        """The words that start a command on this machine."""
        return ("ip", "netns", "exec", self.name)

    def link(self, up: bool) -> None:
        """Plug its cable in, or pull it at the bridge: what it sends is lost, and no error says so. RuntimeError: refused."""
        _ip("-n", self.switch, "link", "set", self.port, "up" if up else "down")


def missing() -> str:
    """Why namespaces cannot be made here, "" where they can."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "network namespaces need Linux and the program ip (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(1):
            return ""
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Node]]:
    """`count` machines on one bridge, 10.77.0.1 and up; all are gone afterwards. RuntimeError: the kernel refuses."""
    token = secrets.token_hex(3)
    switch = f"hp{token}"
    nodes = [Node(f"{switch}-{i}", f"10.77.0.{i}", switch, f"port{i}") for i in range(1, count + 1)]
    with contextlib.ExitStack() as after:
        _ip(
            "netns", "add", switch
        )  # the bridge has a namespace of its own: nothing of this machine's network is touched
        after.callback(_ip, "netns", "delete", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for node in nodes:
            _ip("netns", "add", node.name)
            after.callback(_ip, "netns", "delete", node.name)
            _ip("-n", switch, "link", "add", node.port, "type", "veth", "peer", "name", "eth0", "netns", node.name)
            _ip("-n", switch, "link", "set", node.port, "master", "bridge")
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", node.name, "link", "set", device, "up")
            node.link(up=True)
        yield nodes


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
