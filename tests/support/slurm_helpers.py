"""A real Slurm on this machine (munged, slurmctld and a slurmd for each node, without systemd), and a toy run as its job.

Everything of it is in one folder: configuration, spool, keys, logs. `SLURM_CONF` points there, so the machine's own
Slurm, if it has one, is not touched; by the same variable every process of the cluster is found and killed by its
number at the end.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from monitor_helpers import ROOT, environment, wait_for
from run_facts import status, step_of, weight
from toys import undisturbed
from ui_helpers import free_port

PROGRAMS = "munged slurmctld slurmd sbatch srun scontrol squeue scancel sinfo flock setpriv"
SEARCHED = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
CONFIGURATION = (Path(__file__).parent / "data" / "slurm.conf").read_text(encoding="utf-8")
GPUS = "NodeName=g1 Name=gpu Type=a100 File=/dev/null,/dev/zero\n"  # any devices: nothing opens them
NODES = ("n1", "n2", "g1")
SHORT = dict(steps=120, pace=0.05, every=20)


def missing() -> str:
    """Why no Slurm can be started here, "" when one can."""
    if not sys.platform.startswith("linux"):
        return "Slurm: Linux only"
    absent = [name for name in PROGRAMS.split() if shutil.which(name, path=SEARCHED) is None]
    if absent:
        return f"Slurm: {', '.join(absent)} not found; as root: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "Slurm: its daemons start jobs, which takes root"


class Cluster:
    """A running cluster. `environment` is what its commands, and whoever submits jobs, need."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "PATH": SEARCHED, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons, and wait until every node is idle."""
        self.folder.chmod(0o755)  # munged's clients may be anyone
        for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports: set[int] = set()
        while len(ports) <= len(NODES):
            ports.add(free_port())
        text = CONFIGURATION.format(folder=self.folder, ports=[*ports])
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")
        (self.folder / "gres.conf").write_text(GPUS, encoding="utf-8")
        munge = [f"--{name}-file={self.folder}/munge/{name}" for name in ("key", "pid", "seed")]
        self._daemon("munged", "--foreground", "--num-threads=2", f"--socket={self.folder}/munge/socket", *munge)
        self._wait(lambda: (self.folder / "munge/socket").exists(), "munged")
        self.start_controller()
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self._wait(lambda: self.states() == dict.fromkeys(NODES, "idle"), "nodes")

    def start_controller(self) -> None:
        """Start slurmctld, which reads what an earlier one saved."""
        self.controller = self._daemon("slurmctld", "-D")

    def stop(self) -> None:
        """Kill every process of the cluster, jobs included, by its number."""
        until_s = time.monotonic() + 20
        while left := self.processes():
            assert time.monotonic() < until_s, f"still running: {left}"
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=2)
        for daemon in self._daemons:
            daemon.wait(10)

    def processes(self) -> list[psutil.Process]:
        """All processes of this cluster by their environment: daemons, jobs, what they left; and the managers of steps.

        slurmstepd writes its title over its environment; its log is a file of the cluster.
        """
        found, logs = [], f"{self.folder}/"
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if not ours and process.name().startswith("slurmstepd"):
                    ours = any(file.path.startswith(logs) for file in process.open_files())
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return [process for process in found if process.pid != os.getpid()]

    def task(self, word: str = "", **variables: str) -> list[psutil.Process]:
        """Those with these variables, as a task's monitor, its keeper and the training, and this word of a command."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                ours = variables.items() <= process.environ().items() and "slurmstepd" not in process.name()
                if ours and (not word or word in process.cmdline()):
                    found.append(process)
        return found

    def ask(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def clear(self) -> None:
        """Cancel every job, and wait until every node is idle."""
        for node in (name for name, state in self.states().items() if state not in ("idle", "allocated", "mixed")):
            self.ask("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        self.ask("scancel", "--user=root")
        self._wait(lambda: set(self.states().values()) == {"idle"}, "idle nodes")

    def states(self) -> dict[str, str]:
        lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T", check=False).splitlines()
        return dict(line.split() for line in lines)

    def job(self, number: str) -> dict[str, str]:
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_state(self, number: str, *states: str, timeout_s: float = 90.0) -> dict[str, str]:
        """Wait until the job is in one of these states; what is known about it then."""
        self._wait(lambda: self.job(number)["JobState"] in states, f"job {number} in {states}", timeout_s)
        return self.job(number)

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a daemon that dies with this process, however that ends."""
        with open(self.folder / f"{command[0]}.out", "ab") as out:
            words = ["setpriv", "--pdeathsig", "KILL", *command]
            process = subprocess.Popen(words, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self._daemons.append(process)
        return process

    def _wait(self, condition, what: str, timeout_s: float = 60.0) -> None:
        until_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > until_s:
                logs = {path.name: path.read_text(errors="replace")[-1000:] for path in self.folder.glob("*.log")}
                raise AssertionError(f"Slurm: no {what} within {timeout_s:.0f} s: {logs}")
            time.sleep(0.1)


@pytest.fixture(scope="module")
def slurm():
    """A cluster of the nodes n1, n2 and g1 with two GPUs (that nothing can use); gone at the end, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="hangproof-slurm-") as folder:
        running = Cluster(Path(folder))
        try:
            running.start()
            yield running
        finally:
            running.stop()


@pytest.fixture
def cluster(slurm):
    """The same, without a job."""
    yield slurm
    slurm.clear()


# A toy run as a job: submitted, followed, disturbed, and judged at its end.


def launch(cluster, folder, *words, code=0, **env):
    """`python -m launch slurm FOLDER …` on the cluster: its line of JSON, or standard error where it has to fail."""
    command = [sys.executable, "-m", "launch", "slurm", str(folder), "--json", *words]
    env = environment(folder) | {name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")} | env
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else json.loads(done.stdout.splitlines()[-1])


def submit(cluster, folder, *words, **env):
    return launch(cluster, folder, "--partition", "main", "--gpus", "0", "--submit", *words, **env)["job"]


def log(folder, job):
    return (folder / f"slurm-{job}.log").read_text(encoding="utf-8")


def repeated(folder):
    steps = Counter(re.findall(r"^step (\d+)$", (folder / "training.log").read_text(), re.M))
    return sum(count - 1 for count in steps.values())


def at_step(folder, step):
    wait_for(lambda: step_of(folder) >= step, what=f"step {step}")


def completed(cluster, folder, job, starts, steps=SHORT["steps"], timeout_s=120.0):
    """Assert that the job and the run completed with the result of an undisturbed one, and nothing of them is left."""
    now = cluster.wait_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", timeout_s=timeout_s)
    text = log(folder, job)
    assert (now["JobState"], now["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert status(folder)["state"] == "completed" and weight(folder) == undisturbed(steps)
    assert int(now["Restarts"]) == starts - 1, text
    wait_for(lambda: not cluster.task("monitor"), 30, "no monitor left")
    print(f"repeated {repeated(folder)} steps, {starts} starts")


def kill_step(cluster, job):
    """SIGKILL the monitor, its keeper and the training, as a node out of memory may; their process numbers."""
    killed = []
    for process in cluster.task(SLURM_JOB_ID=job, SLURM_STEP_ID="0"):
        with contextlib.suppress(psutil.Error):
            process.kill()
            killed.append(process.pid)
    return killed


def drain(cluster, job, node):
    cluster.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    cluster.ask("scontrol", "requeue", job)


def down(cluster, job, node):
    cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
