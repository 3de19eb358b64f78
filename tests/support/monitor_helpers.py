"""A toy training run without torch: a real process tree with a heartbeat, its own checkpoints, and faults on demand.

Its faults are code of the test's own. benchmarks/toy_loop.py, which takes snapshots and waits at the gate, has those
of benchmarks/injector.py and is one file for every contender.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tomllib
from run_facts import status, step_of, trainers

from benchmarks.trial import read_lines
from guards import step_requests
from monitor import config
from monitor.process import platform

ROOT = Path(__file__).resolve().parents[2]

# A step is a sleep; the weights are a number that depends on every step, so that a wrong resume shows in the result. It
# reads what a script of the user's own gets from the monitor.
TOY = """
import hashlib, json, os, signal, struct, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from guards import checkpoint, crash
from guards.heartbeat import Heartbeat, REQUEST_STOP

STEPS, PACE, EVERY = {steps}, {pace}, {every}
run = Path(os.environ["HANGPROOF_RUN"])
attempt = int(os.environ.get("HANGPROOF_ATTEMPT", "1"))
hb = Heartbeat.from_env()
crash.install(hb)

def save(step, weight):
    hb.phase("save")
    with checkpoint.writing(run / f"{{run.name}}-step{{step:08d}}-state", step, 1) as folder:
        (folder / "weight.json").write_text(json.dumps(weight))
    for old in list(checkpoint.states(run))[3:]:
        checkpoint.retire(old)
    hb.phase("step")

def fault(step):
    pass
{faults}

hb.phase("load")
weight, step = "seed", 0
if resume := os.environ.get("HANGPROOF_RESUME"):
    weight = json.loads(Path(resume, "weight.json").read_text())
    step = checkpoint.guard_of(Path(resume))["step"]
hb.plan(STEPS)
hb.phase("first_step")
while step < STEPS:
    time.sleep(PACE)
    step += 1
    weight = hashlib.sha256(f"{{weight}} {{step}}".encode()).hexdigest()
    hb.step(step, 1, 1.0 / step, 1e-4)
    print("step", step, flush=True)
    if step % EVERY == 0:
        save(step, weight)
    if hb.request == REQUEST_STOP:
        save(step, weight)
        hb.end("stopped")
        crash.exit_now(3)
    fault(step)
hb.phase("end")

tensor = {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
header = json.dumps({{"__metadata__": {{"weight": weight}}, "tensor": tensor}}).encode()
checkpoint.atomic_write(run / f"{{run.name}}.safetensors", struct.pack("<Q", len(header)) + header + bytes(4))
hb.end("done")
crash.exit_now(0)
"""


def toy(faults: str = "", steps: int = 60, pace: float = 0.05, every: int = 20) -> str:
    """The toy's program. `faults` is Python that redefines `fault(step)`; it sees `attempt`, `run`, `hb`, `os`…"""
    return TOY.format(root=str(ROOT), steps=steps, pace=pace, every=every, faults=faults)


def toy_run(folder: Path, faults="", steps=60, pace=0.05, every=20, start="exec") -> Path:
    """A run folder with a toy script. start: "exec", or "" for a trainer that is a child of the script's shell."""
    folder.mkdir(parents=True)
    (folder / "toy.py").write_text(toy(faults, steps, pace, every), encoding="utf-8")
    (folder / "train.sh").write_text(f"cd {folder}\n{start} {sys.executable} toy.py\n", encoding="utf-8")
    return folder


QUICK = {"end.grace_s": 0.5, "end.stop_grace_s": 1.0}  # a toy has nothing to do between SIGTERM and SIGKILL


def limits_file(folder: Path, text: str = "") -> Path:
    """A limits file beside the run, for a toy that has none of the guards' own limits."""
    path = folder.parent / "limits.toml"
    values = {**QUICK, **dict(config._flat(tomllib.loads(text)))}
    lines = "".join(f"{key} = {value}\n" for key, value in values.items())
    path.write_text("allow_below_guards = true\n" + lines, encoding="utf-8")
    return path


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a monitor under test: its temporary files and data root are the test's own."""
    scratch = folder.parent / "tmp"
    scratch.mkdir(exist_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("HANGPROOF_")}
    own = {"TMPDIR": str(scratch), "HANGPROOF_SHM": str(scratch), "HANGPROOF_DATA": str(folder.parent)}
    own["HANGPROOF_LOCKS"] = str(scratch)
    return env | own | {"HANGPROOF_GPUS": ""} | more


def monitor(folder: Path, *words: str, limits: str | None = None, **env: str) -> subprocess.Popen:
    """`python -m monitor run FOLDER`, or another command, as a real process. limits: a limits file's text."""
    path = folder.parent / "limits.toml"
    if limits is not None or (folder.is_dir() and not path.exists()):
        limits_file(folder, limits or "")
    if path.exists():
        env = {"HANGPROOF_LIMITS": str(path), **env}
    command, pipe = [sys.executable, "-m", "monitor", *(words or ("run",)), str(folder)], subprocess.PIPE
    environ = environment(folder, **env)
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True, encoding="utf-8")


def finish(process: subprocess.Popen, timeout_s: float = 180.0) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); a process that outlives the time is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):  # the monitor, the training
            child.kill()
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{(err or out)[-4000:]}") from None
    return process.returncode, out, err


def supervise(folder: Path, limits: str | None = None, **env: str) -> tuple[int, str, str]:
    return finish(monitor(folder, limits=limits, **env))


def started(folder: Path, step: int = 5, **env) -> subprocess.Popen:
    """The monitor of a run that has passed this step."""
    process = monitor(folder, **env)
    wait_for(lambda: step_of(folder) > step, what=f"step {step}")
    return process


def cli(folder: Path, *words: str, **env: str) -> str:
    """What `python -m monitor WORDS` prints on a data root; `folder` is one of its runs."""
    command = [sys.executable, "-m", "monitor", *words]
    how = {"cwd": ROOT, "env": environment(folder, **env), "timeout": 120}
    return subprocess.run(command, **how, capture_output=True, text=True, check=True).stdout


def kill_monitor(process: subprocess.Popen, folder: Path) -> None:
    """SIGKILL the monitor and the process that would restart it; the training lives on."""
    process.kill()
    psutil.Process(status(folder)["monitor_pid"]).kill()
    finish(process)


def stop(folder: Path, *words: str, **env: str) -> None:
    """`monitor stop`; fails with its own words when it cannot ask."""
    code, out, err = finish(monitor(folder, "stop", *words, **env))
    assert code == 0, f"stop: exit code {code}: {out}{err}"


def events(folder: Path, kind: str | None = None) -> list[dict]:
    return [event for event in read_lines(folder / "events.jsonl") if kind in (None, event["kind"])]


# What status.json says of a run that trains.
STATUS = {
    "name": 'my "lora"', "state": "running", "alive": True, "step": 12, "planned_steps": 100, "step_s": 0.5,
    "loss": 0.25, "eta_s": 44.0, "attempt": 2, "restarts": 1, "incidents": 1, "phase": "step", "epoch": 1,
    "last_progress_at": "2026-01-02T03:04:05.500Z", "updated_at": "2026-01-02T03:04:06.000Z", "message": "",
}  # fmt: skip


def wait_for(condition, timeout_s: float = 120.0, what: str = "") -> object:
    """Wait until `condition()` is true; its value."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            value = condition()
        except (OSError, ValueError, LookupError):
            value = None  # a file that is not there yet, half written, or without this value
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what or condition}")


@pytest.fixture
def spawn():
    """Starts a process with these variables, `sleep 60` by default, in a session of its own; killed at the end."""
    made = []

    def start(*command: str, **env: str) -> subprocess.Popen:
        how = {"cwd": ROOT, "env": os.environ | env, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        made.append(subprocess.Popen(command or ("sleep", "60"), **how))
        for name, value in env.items() if sys.platform.startswith("linux") else ():  # in mid-exec there is none
            wait_for(lambda name=name, value=value: platform.environ_of(made[-1].pid).get(name) == value)
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


@pytest.fixture
def folder(tmp_path):
    """Where a toy run is made; nothing of it is alive afterwards."""
    yield tmp_path / "toy"
    clean_up(tmp_path / "toy")


def clean_up(folder: Path) -> None:
    """Kill what is left of a run: a test that failed must leave nothing behind."""
    with contextlib.suppress(OSError, ValueError):
        for name in ("keeper_pid", "monitor_pid"):
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                psutil.Process(status(folder)[name]).kill()
    for pid in trainers(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


ASKED = "sample@2,state@4,save@7"  # the step after which each is requested


def asking(folder, asked=ASKED):
    """The environment of a training in which the requests are made."""
    asks = {"HANGPROOF_INJECT": "request_injectors:ask", "REQUESTS": asked}
    return asks | {"HANGPROOF_RUN": str(folder), "HANGPROOF_HEARTBEAT": str(folder / "beats")}


def answers(folder):
    """{kind: event} of the requests; each has one answer, and none waits."""
    found = events(folder, step_requests.EVENT)
    assert len({event["id"] for event in found}) == len(found) and not step_requests.waiting(folder)
    return {event["request"]: event for event in found}
