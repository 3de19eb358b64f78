"""Machines for tests: each with a network and processes of its own (Linux namespaces), joined by a bridge.

    with netns.machines(2) as (first, second):
        process = first.popen([...], env=...)
        second.link(False)

A machine's processes are in a PID namespace: when its first process is killed the kernel kills the others, as when the
power fails, and no process of one machine sees those of another. The bridge has a namespace of its own, too: when an
interface of this machine comes or goes, a browser drops all its requests (net::ERR_NETWORK_CHANGED), and with them the
page of another test. `leave nothing`: the namespaces, links and processes are removed at the end, also after an error.
Needs root, `ip` and `unshare`; `missing()` says what is not there.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field

import psutil

NETWORK = "10.213.{bridge}.{number}"
PREFIX = "hpt"


@functools.cache
def missing() -> str:
    """Why there can be no such machines here, "" when there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with machines(1) as (one,):
            subprocess.run(one.command(["true"]), check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made: {error}"
    return ""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass
class Machine:
    name: str
    address: str
    interface: str  # in the namespace
    outside: str  # its end on the bridge
    switch: str  # the bridge's namespace
    started: list[subprocess.Popen] = field(default_factory=list)

    def command(self, words: list[str]) -> list[str]:
        """`words` as a command that runs on this machine, in a PID namespace that ends with it."""
        return ["ip", "netns", "exec", self.name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *words]

    def popen(self, words: list[str], env, **more: object) -> subprocess.Popen:
        process = subprocess.Popen(self.command(words), env={**env, "GLOO_SOCKET_IFNAME": self.interface}, **more)
        self.started.append(process)
        return process

    def link(self, up: bool) -> None:
        """Cut the machine's cable, or plug it in."""
        _ip("-n", self.switch, "link", "set", self.outside, "up" if up else "down")

    def processes(self) -> list[int]:
        """The living processes of this machine, as numbers of this (the outer) PID namespace."""
        return self.find("")

    def find(self, text: str) -> list[int]:
        """Those whose command line contains `text`, the program first: `text` of a shell's script does not count."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=30)
        found = []
        for pid in map(int, done.stdout.split()):
            with contextlib.suppress(psutil.Error):
                one = psutil.Process(pid)
                if one.status() != psutil.STATUS_ZOMBIE and text in " ".join(one.cmdline()):
                    found.append(pid)
        return found

    def power_off(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


@contextlib.contextmanager
def machines(number: int):
    """So many machines that reach each other."""
    mark = os.getpid()
    switch, network = f"{PREFIX}{mark}-switch", mark % 250 + 1
    made: list[Machine] = []
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for i in range(number):
            name, outside = f"{PREFIX}{mark}-{i}", f"{PREFIX}{mark}o{i}"
            machine = Machine(name, NETWORK.format(bridge=network, number=i + 1), "eth0", outside, switch)
            made.append(machine)
            _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", outside, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield tuple(made)
    finally:
        for machine in made:
            machine.power_off()
            with contextlib.suppress(OSError):
                _ip("netns", "del", machine.name)
        with contextlib.suppress(OSError):
            _ip("netns", "del", switch)
