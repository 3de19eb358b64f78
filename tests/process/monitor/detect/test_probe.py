"""The probe of a run without progress: stacks, what two samples prove together, and what cannot be read."""

import builtins
import errno
import io
import os
import subprocess
import sys
import tempfile
import time
from unittest.mock import Mock

import pytest
from monitor_evidence import beat, frames
from monitor_helpers import wait_for
from proc_helpers import error, linux

from guards.heartbeat import stacks_path
from monitor import config
from monitor.detect import probe
from monitor.detect.probe import ProcessSample, Sample
from monitor.detect.progress import SUSPECT
from monitor.process import platform
from monitor.process.spawned import TOKEN, Tree
from monitor.state import Signals, Verdict

GUARDED = """import os, sys, time
from guards import crash, heartbeat
os.environ["HANGPROOF_HEARTBEAT"] = sys.argv[1]
crash.install(heartbeat.Heartbeat(None))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def guarded(tmp_path, spawn):
    """A process of ours that writes its stacks on SIGUSR2."""
    child = spawn(sys.executable, "-c", GUARDED, str(tmp_path))
    assert child.stdout.readline() == "ready\n"
    return child


def key(child: subprocess.Popen) -> tuple[int, float]:
    return child.pid, platform.process_info(child.pid).start


def test_names_and_places_are_read_from_faulthandler_and_from_py_spy():
    text = frames("threading.py:wait", "loop.py:one_step")
    assert [frame.name for frame in probe.frames(text)] == ["threading.py:wait", "loop.py:one_step"]
    assert probe.where(text) == "wait (threading.py:1)"
    spy = 'Thread 7 (idle): "MainThread"\n    wait (threading.py:327)\n    one_step (trainer/loop.py:80)\n'
    assert [frame.name for frame in probe.frames(spy)] == ["threading.py:wait", "loop.py:one_step"]
    assert probe.where(spy) == "wait (threading.py:327)"
    assert probe.where("py-spy is not installed") == ""
    other = 'Thread 0x00007e (most recent call first):\n  File "/x/selectors.py", line 415 in select\n\n'
    assert probe.where(other + text) == "wait (threading.py:1)"
    assert probe.where(other) == "", "cut off before the main thread"


@linux
@pytest.mark.parametrize("reused", [False, True])
def test_no_signal_is_sent_to_a_process_that_has_no_handler_for_it(child, tmp_path, reused):
    """SIGUSR2 would kill it. Fault 15: the stacks file of a former process is there, another program has its pid."""
    if reused:
        stacks_path(tmp_path, child.pid).write_text("stacks of the process that had this pid\n")
    assert probe.dump(tmp_path, [key(child)], 0.2) == {}
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)


@linux
def test_a_guarded_process_answers_with_its_stacks(guarded, tmp_path):
    found = probe.dump(tmp_path, [key(guarded)], 20.0)
    assert probe.frames(found[guarded.pid])[-1].name == "<string>:<module>", "which may still be in its print"
    assert guarded.poll() is None


@pytest.fixture
def py_spy(tmp_path, monkeypatch):
    """Puts this shell script in the place of py-spy."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def write(script: str) -> None:
        (tmp_path / "bin" / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / "py-spy").chmod(0o755)

    return write


def test_py_spy_is_killed_when_the_probe_ends(py_spy, tmp_path, child):
    py_spy(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    spy = probe.PySpy(60.0)
    spy.begin(*key(child))
    pid = int(wait_for(lambda: (tmp_path / "pid").read_text().strip()))
    spy.close()
    wait_for(lambda: (info := platform.process_info(pid)) is None or info.dead)
    assert not spy.poll()


@linux
@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("sleep 60", "timed out"),
        ("echo 'Permission Denied: Try running again with elevated permissions'; exit 1", "Permission Denied"),
        ("kill -STOP $4; echo 'Thread 1: MainThread'", "MainThread"),
        (None, "not installed"),
    ],
)
def test_py_spy_that_hangs_is_denied_missing_or_leaves_its_target_stopped(py_spy, child, script, answer):
    if script:
        py_spy(script)
    spy = probe.PySpy(timeout_s=0.5 if script == "sleep 60" else 60)
    spy.begin(*key(child))
    wait_for(lambda: not spy.poll())
    assert answer in spy.texts[child.pid]
    wait_for(lambda: platform.process_info(child.pid).state == "S", what="the target runs again")


CONFIG = config.load()
TRAINER, WORKER = (1, 10.0), (2, 11.0)


def sample(at: float, trainer: ProcessSample, worker: ProcessSample | None = None, **more) -> Sample:
    processes = {TRAINER: trainer} | ({WORKER: worker} if worker else {})
    return Sample(at, processes, **{"stacks": "same", **more})


def one(state: str = "S", cpu: float = 0.0, **more) -> ProcessSample:
    return ProcessSample(1, 10.0, 0, state, "python", cpu, more.pop("faults", 0), **more)


def compare(first: Sample, second: Sample, **more) -> Signals:
    return probe.compare(first, second, [1], **more)


RUNS, RAN = sample(0, one("R")), one("R", cpu=2.0)
HOT = {"utilization": 99, "throttle": "too hot"}
SPILLED = {"utilization": 99, "spill": True, "memory_used": 99, "memory_total": 100}
BUSY = sample(2, one("R", cpu=0.8, starved_s=1.2))
TORCH = '  File "/x/site-packages/torch/'
PROVES = {  # two samples: the kind of evidence, and what it says
    "asleep": (sample(0, one()), sample(2, one()), "stuck", "same stack twice"),
    "asleep on changing stacks": (sample(0, one()), sample(2, one(), stacks="other"), None, ""),
    "a busy loop": (RUNS, sample(2, RAN), "busy", "1.0 processor cores"),
    "a stopped worker": (sample(0, one("R"), one("T")), sample(2, RAN, one("T")), "stuck", "stopped by a signal"),
    "reads files": (sample(0, one("D")), sample(2, one("D", disk_bytes=10_000_000)), "slow", "MB/s"),
    "a dead disk": (sample(0, one("D")), sample(2, one("D", wchan="folio_wait_bit")), "stuck", "folio_wait_bit"),
    "swaps": (RUNS, sample(2, one("R", cpu=1.0, faults=500), swapped_pages=5000), "slow", "swapping"),
    "throttled": (RUNS, sample(2, RAN, gpu=(HOT,)), "slow", "throttled"),
    "spills": (RUNS, sample(2, RAN, gpu=(SPILLED,)), "slow", "spills"),
    "compiles": (RUNS, sample(2, RAN, stacks=TORCH + '_inductor/graph.py", line 9'), "slow", "compiles the model"),
    "runs what is compiled": (RUNS, sample(2, RAN, stacks=TORCH + '_dynamo/eval_frame.py", line 9'), "busy", "in use"),
    "a busy machine": (RUNS, BUSY, "slow", "keep the processor busy"),
}


@pytest.mark.parametrize("what", PROVES)
def test_two_samples_prove_together(what):
    first, second, kind, says = PROVES[what]
    found = compare(first, second)
    assert kind is None or any(says in sentence for sentence in getattr(found, kind)), found
    assert (bool(found.stuck), bool(found.slow)) == (kind == "stuck", kind == "slow"), found


def test_a_disk_that_others_keep_busy_is_slow_and_one_that_is_dead_is_stuck():
    def waiting(at: float, disks: dict, wchan: str = "folio_wait_bit_common") -> Sample:
        return sample(at, one("D", wchan=wchan), disks=disks)

    before = {"vda": (1000, 10.0), "vda1": (900, 9.0)}
    busy = compare(waiting(0, before), waiting(2, {"vda": (21000, 11.9), "vda1": (900, 9.0)}))
    assert busy.slow == ("waits for a busy disk: vda, 5.1 MB/s for all programs together",)
    dead = compare(waiting(0, before), waiting(2, {"vda": (1000, 12.0), "vda1": (900, 9.0)}))
    assert any("uninterruptible" in s for s in dead.stuck) and not dead.slow, "at work all the time, and nothing done"
    frozen = {"vda": (21000, 11.9)}
    assert not compare(waiting(0, before, "percpu_rwsem_wait"), waiting(2, frozen, "percpu_rwsem_wait")).slow


def test_a_process_that_waits_for_a_core_or_whose_bytes_cannot_be_read_is_not_asleep():
    """Thirty programs on two cores leave a busy loop 3 % of one, on the same stack."""
    assert compare(RUNS, sample(2, one("R", cpu=0.06, starved_s=1.9)), enough_cpu=True).stuck == ()
    assert compare(RUNS, BUSY, enough_cpu=True).slow == (), "it had the time of many steps"
    unknown = one("D", io_known=False)
    assert not any("nothing read" in s for s in compare(sample(0, unknown), sample(2, unknown)).stuck)
    assert compare(sample(0, unknown, stacks=""), sample(2, unknown, stacks="")).stuck == ()


@linux
def test_samples_of_living_processes_tell_a_sleeper_from_a_spinner(spawn):
    ready = "print('ready', flush=True)\n"
    programs = {"sleeps": f"import time\n{ready}time.sleep(600)", "spins": f"{ready}while True: pass"}
    found = {}
    for name, code in programs.items():
        child = spawn(sys.executable, "-c", code)
        child.stdout.readline()
        first = probe.take([key(child)], probe.Missing())
        time.sleep(0.5)
        found[name] = probe.compare(first, probe.take([key(child)], probe.Missing()), [child.pid], enough_cpu=True)
    assert any("no CPU time used" in s for s in found["sleeps"].stuck)
    assert found["spins"].stuck == found["spins"].slow == ()


def failing_open(monkeypatch, paths: tuple[str, ...], code: int) -> None:
    """Opening a path that begins so fails with this error from now on."""
    real = io.open

    def open_(path, *args, **kwargs):
        if str(path).startswith(paths):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", open_)
    monkeypatch.setattr(io, "open", open_)  # pathlib's


@pytest.fixture
def sleeper(tmp_path, spawn):
    """A sleeping process of a run: its tree and a beat with its pid."""
    child = spawn(**{TOKEN: str(tmp_path)})
    return Tree(str(tmp_path), key(child)), beat(0, 1, pid=child.pid)


def gathered(sleeper, heartbeats, gpu=lambda: ()) -> probe.Probe:
    """A probe that has gone through its life, with the evidence it could read."""
    tree, beat = sleeper
    found = probe.Probe(tree, heartbeats, CONFIG, gpu, [beat], True)
    assert found.due(Verdict(SUSPECT, stalled_s=1.0, budget_s=2.0), time.monotonic()) is False
    found.spy.poll()
    assert isinstance(found.sample_again([beat], 1.0), Signals)
    found.texts()
    found.close()
    return found


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENOSPC, errno.ENOMEM, errno.EACCES])
def test_nothing_leaves_the_probe_when_every_file_and_every_fork_fails(monkeypatch, sleeper, tmp_path, code):
    fails = Mock(side_effect=OSError(code, os.strerror(code)))
    found = gathered(sleeper, tmp_path)  # the last readings, as in a running monitor
    failing_open(monkeypatch, ("/",), code)
    for target, name in ((os, "listdir"), (os, "pidfd_open"), (subprocess, "Popen"), (tempfile, "TemporaryFile"),
                         (os.path, "getsize"), (os, "stat"), (os, "access")):  # fmt: skip
        monkeypatch.setattr(target, name, fails)
    found = gathered(sleeper, tmp_path)
    monkeypatch.undo()
    assert found.missing
    assert all(os.strerror(code) in s or "no answer" in s or "cannot" in s for s in found.missing), found.missing


def test_on_windows_which_has_no_such_signal_none_is_said_to_have_no_answer(monkeypatch, sleeper, tmp_path):
    assert any("SIGUSR2" in sentence for sentence in gathered(sleeper, tmp_path).missing)
    monkeypatch.setattr(probe.platform, "WINDOWS", True)
    assert not any("SIGUSR2" in sentence for sentence in gathered(sleeper, tmp_path).missing)


def test_a_process_that_exits_between_two_readings_is_not_missing_evidence(tmp_path):
    child = subprocess.Popen(["true"])
    known = key(child)
    child.wait()
    missing = probe.Missing()
    assert probe.take([known], missing).processes == {}
    assert not any("PID" in sentence for sentence in missing)


@linux
def test_what_cannot_be_read_is_named_as_missing_evidence_and_stops_nothing(monkeypatch, tmp_path, spawn):
    """gVisor has no /proc/vmstat; memory may be short for py-spy; a driver may be gone."""
    child = spawn(**{TOKEN: str(tmp_path)})
    own, rank, real = f"/proc/{child.pid}/", beat(0, 1, pid=child.pid), probe.read_bytes
    odd = {"/proc/vmstat": error(errno.ENOENT), "/proc/diskstats": b"1 2 3\n", f"{own}io": b"read_bytes\n"}
    odd |= {f"{own}schedstat": error(errno.EACCES), f"{own}wchan": error(errno.EACCES)}

    def read_bytes(path):
        if isinstance(found := odd.get(path), OSError):
            raise found
        return found or real(path)

    monkeypatch.setattr(probe, "read_bytes", read_bytes)
    monkeypatch.setattr(probe.shutil, "which", lambda name, path: "/usr/bin/true")
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=error(errno.ENOMEM)))
    tree, gpu = Tree(str(tmp_path), key(child)), Mock(side_effect=OSError(errno.ENODEV, "no driver"))
    found = probe.Probe(tree, tmp_path, CONFIG, gpu, [rank], True)
    assert found.due(Verdict(SUSPECT, stalled_s=1.0, budget_s=2.0), time.monotonic()) is False
    found.spy.poll()
    found.sample_again([rank], 1.0)
    assert os.strerror(errno.ENOMEM) in found.texts()[child.pid]
    found.close()
    (process,) = found.newest.processes.values()
    assert not process.io_known and found.newest.disks == {}
    beginnings = [f"/proc/PID/{name}: {os.strerror(errno.EACCES)}" for name in ("schedstat", "wchan")]
    beginnings += [f"/proc/{name}: unknown format (" for name in ("diskstats", "PID/io")]
    beginnings += ["/proc/vmstat: No such file", "GPU readings: no driver", f"stacks of process {child.pid}: no answer"]
    assert [begins for begins in beginnings if not any(one.startswith(begins) for one in found.missing)] == []
