"""Evidence on hung and dead runs, made by hand, and a run's loop without training: for tests that start no process."""

import struct
import time
from pathlib import Path

import pytest

from guards import checkpoint
from guards.heartbeat import Beat
from monitor.attempt import Attempt
from monitor.diagnose import causes
from monitor.diagnose.incident import Incident
from monitor.diagnose.ranks import UNKNOWN
from monitor.loop import Loop
from monitor.process import platform
from monitor.recovery import Run
from monitor.run_folder import RunFolder
from monitor.state import AttemptRecord, State, Transition
from monitor.supervisor import turn

LAUNCHER = (  # what accelerate adds to the log of a training that fails; how it ended follows
    "Traceback (most recent call last):\n"
    '  File "/venv/bin/accelerate", line 8, in <module>\n    sys.exit(main())\n'
    '  File "/venv/lib/python3.11/site-packages/accelerate/commands/launch.py", line 800, in simple_launcher\n'
    "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)\n"
    "subprocess.CalledProcessError: Command '['/venv/bin/python', '-m', 'sd_scripts_patches', 'flux_train_network.py']' "
)

HEADER = b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
LORA = struct.pack("<Q", len(HEADER)) + HEADER + bytes(4)


def crash(log: str = "", **values) -> causes.Evidence:
    return causes.Evidence(kind="crash", phase=values.pop("phase", "step"), step=10, log_tail=log, **values)


def hang(stack: str = "", **values) -> causes.Evidence:
    known = values.pop("stacks", {7: stack} if stack else {})
    return causes.Evidence(kind="hang", phase=values.pop("phase", "step"), step=10, stacks=known, **values)


def frames(*names: str, main: bool = True) -> str:
    """A thread of a faulthandler dump with these `file.py:function` frames, innermost first."""
    lines = [f'  File "/x/{name.split(":")[0]}", line 1 in {name.split(":")[1]}' for name in names]
    return f"{'Current thread' if main else 'Thread'} 0x00007f (most recent call first):\n" + "\n".join(lines)


def rank(number: int, step: int = 5, phase: str = "step") -> dict:
    return UNKNOWN | {"rank": number, "pid": 100 + number, "phase": phase, "step": step, "silent_s": 9.0}


def proc(pid: int, state: str, trainer: bool = False, ppid: int = 1, wchan: str = "") -> dict:
    return {"pid": pid, "ppid": ppid, "name": "p", "state": state, "wchan": wchan, "cpu_s": 1.0, "trainer": trainer,
            "command": ""}  # fmt: skip


def beat(number: int = 0, step: int = 5, phase: str = "step", silent: float = 9.0, **values) -> Beat:
    """The heartbeat of a rank that last beat `silent` seconds ago; its pid is 100 + its rank."""
    now_s = time.monotonic()
    known = dict(
        rank=number, world=1, pid=100 + number, request=0, phase=phase, outcome="running", step=step, planned=40,
        epoch=0, done=0, total=0, count=step, loss=0.1, lr=1e-4, beat_s=now_s - silent, phase_s=now_s - silent,
        step_s=now_s - silent, started_s=now_s - 60, note="", intervals=(),
    )  # fmt: skip
    return Beat(**{**known, **values})


def attempt(folder: Path, *beats: Beat, members=None, oom_kills=None) -> Attempt:
    """An attempt that began a minute ago, with these heartbeats and processes; its heartbeats are in `folder`."""
    record = AttemptRecord("", 1, "", str(folder), 0, time.monotonic() - 60, oom_kills=oom_kills or {})
    made = Attempt(RunFolder(folder), record)
    made.beats, made.tree.members = list(beats), members or {}
    return made


def known(kind: str) -> causes.Evidence:
    """What the run knows of a failure before the evidence is collected."""
    return causes.Evidence(kind, step=5, planned=40)


def saved_state(folder: Path, step: int, name: str = "weights") -> Path:
    """A state of this step with one file, as a training writes it."""
    path = folder / f"toy-step{step:08d}-state"
    with checkpoint.writing(path, step, 1) as temporary:
        (temporary / name).write_bytes(b"weights")
    return path


def open_incident(run: Run) -> Incident:
    """The incident of a crash at step 1, which is the run's open one."""
    known = dict(attempt=1, progress_s=0.0, best_step=1, started_at="", detect_s=1.0)
    run.incident = Incident.open(run.folder, crash(), causes.match(crash()), **known)
    return run.incident


@pytest.fixture
def make_loop(tmp_path, monkeypatch):
    """Makes the loop of a run with this spec; "": its script is the user's own. machine: which of several this is."""
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    made = []

    def make(spec: str = 'name = "toy"\n', machine: int | None = None) -> Loop:
        folder = tmp_path / "outputs" / "toy"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(spec)
        run = RunFolder(folder, machine=machine)
        run.own.mkdir(parents=True, exist_ok=True)
        made.append(Loop(run, turn))
        return made[-1]

    yield make
    for loop in made:
        loop.at = Transition(State.FAILED)
        loop.close()


@pytest.fixture
def trained(tmp_path):
    """Makes an attempt of a loop whose processes are gone, with a heartbeat of these values."""

    def make(loop: Loop, **values):
        heartbeat = beat(**{"pid": 2**22 + 1, **values})  # no process has this number
        made = attempt(platform.private_folder("toy", tmp_path), heartbeat)
        made.folder = loop.folder
        return made

    return make
