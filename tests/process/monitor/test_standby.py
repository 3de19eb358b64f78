"""The standby attempt: the next attempt is started early, and whatever happens to it, a run never has two trainers."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from monitor_helpers import events, finish, members, monitor, status, stop, wait_for

from benchmarks import machines
from guards import gate
from monitor import config
from monitor.attempt import Attempt
from monitor.cli.commands import line
from monitor.detect.durations import Durations
from monitor.process import platform
from monitor.resume.script import STAND_IN
from monitor.run_folder import RunFolder
from monitor.standby import Standby, never
from runs.manage import size_text

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="the standby attempt needs Linux")
STEPS, EVERY = 90, 10


class Run:
    """A toy run as a user makes one."""

    def __init__(self, data: Path, step_s: float = 0.05, limits: str = "", **spec):
        self.data = data
        self.toy = machines.toy(STEPS, EVERY, step_s)
        self.env = self.toy.environment(data)
        self.folder = self.toy.create(data, spec)
        (data / "limits.toml").write_text(f"allow_below_guards = true\n{limits}")
        (data / "done").mkdir()
        self.env |= {"HANGPROOF_LIMITS": str(data / "limits.toml"), "TOY_FAULTS_DONE": str(data / "done")}
        self.env |= {"HANGPROOF_GPUS": "", "TMPDIR": str(data / "tmp"), "HANGPROOF_SHM": str(data / "tmp")}
        (data / "tmp").mkdir()
        # From step 4 on a step takes a second until `hurry` is called, however long a standby needs on a busy machine.
        self.env |= {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_SLOW": f"4:1:{data / 'hurry'}"}

    def start(self, **more: str):
        return monitor(self.folder, **self.env, **more)

    def standby(self) -> dict:
        return status(self.folder)["standby"] if (self.folder / "status.json").exists() else {"state": "none"}

    def finish(self, process, code: int = 0) -> None:
        """Waits for the end of the run, whose steps are short from now on."""
        (self.data / "hurry").touch()
        assert finish(process)[0] == code

    def until_ready(self) -> int:
        """Waits for the standby; the process number of its shell."""
        return wait_for(lambda: self.standby()["state"] == "ready" and self.standby()["pid"], what="a standby")

    def ledger(self) -> list[dict]:
        return [json.loads(line) for line in (self.data / "ledger.jsonl").read_text().splitlines()]

    def check_complete(self, restarts: int) -> None:
        found = status(self.folder)
        assert (found["state"], found["restarts"]) == ("completed", restarts), found["reason"]
        lora = (self.folder / f"{self.folder.name}.safetensors").read_bytes()
        assert hashlib.sha256(lora).hexdigest() == self.toy.expected()
        assert not members(self.folder), "nothing is left behind"
        self.check_one_writer()

    def check_one_writer(self) -> None:
        """The steps of a process are never between those of another one."""
        pids = [line["pid"] for line in self.ledger() if line["what"] == "step"]
        runs = [pid for i, pid in enumerate(pids) if i == 0 or pids[i - 1] != pid]
        assert len(runs) == len(set(runs)), "two processes trained at the same time"

    def restarted(self) -> list[str]:
        return [event["message"] for event in events(self.folder, "restarted")]


EARLY = "which had been started early"


def trainer_of(shell: int) -> psutil.Process:
    return psutil.Process(shell).children(recursive=True)[-1]


def test_a_crash_is_continued_by_the_standby_and_another_one_is_started(tmp_path):
    run = Run(tmp_path)
    process = run.start()
    first = run.until_ready()
    waiting = trainer_of(first).pid
    training = status(run.folder)["trainer_pids"]
    assert waiting not in training
    os.kill(training[0], signal.SIGKILL)
    second = wait_for(lambda: (pid := run.until_ready()) != first and pid, what="the next standby")
    assert status(run.folder)["trainer_pids"] == [waiting] and second != first
    run.finish(process)
    run.check_complete(restarts=1)
    assert EARLY in run.restarted()[0]
    assert not [e for e in events(run.folder, "killed") if "what an earlier attempt left" in e["message"]]
    log = (run.folder / "training.log").read_text()
    assert log.count("attempt 2: train.attempt-2.sh") == 1 and STAND_IN not in log
    assert STAND_IN not in (run.folder / "train.attempt-2.sh").read_text()


@pytest.mark.long
def test_a_standby_that_is_killed_is_replaced_a_few_times_and_the_training_never_notices(tmp_path):
    run = Run(tmp_path, limits="[standby]\ntries_count = 2\n")
    process = run.start()
    first = run.until_ready()
    trainer_of(first).kill()
    second = wait_for(lambda: (pid := run.until_ready()) != first and pid, 60, "the next standby")
    trainer_of(second).kill()
    log = run.folder / "monitor.log"
    wait_for(lambda: "it ended by itself" in log.read_text() and "(2 times)" in log.read_text(), 60, "no more tries")
    run.finish(process)
    run.check_complete(restarts=0)


@pytest.mark.long
def test_a_standby_that_does_not_go_on_is_killed_and_a_cold_start_follows(tmp_path):
    run = Run(tmp_path, limits="[standby]\ngate_s = 0.5\n")
    process = run.start()
    waiting = trainer_of(run.until_ready())
    waiting.suspend()
    os.kill(status(run.folder)["trainer_pids"][0], signal.SIGKILL)
    run.finish(process)
    assert not waiting.is_running() and EARLY not in run.restarted()[0]
    run.check_complete(restarts=1)


@pytest.mark.long
def test_a_monitor_that_is_killed_leaves_no_standby_and_the_next_one_starts_its_own(tmp_path):
    run = Run(tmp_path, step_s=0.1)
    process = run.start()
    shell = run.until_ready()
    waiting = trainer_of(shell)
    training = status(run.folder)["trainer_pids"]
    psutil.Process(status(run.folder)["monitor_pid"]).kill()
    waiting_gone = lambda: not waiting.is_running() or waiting.status() == psutil.STATUS_ZOMBIE  # noqa: E731
    wait_for(waiting_gone, 30, "the end of the standby")
    wait_for(lambda: (pid := run.standby()["pid"]) and pid != shell, 60, "the standby of the next monitor")
    assert status(run.folder)["trainer_pids"] == training, "the training goes on"
    run.finish(process)
    run.check_complete(restarts=0)


def slow_imports(run: Run, command: str) -> None:
    """Whoever starts at the gate runs this shell command before Python."""
    launcher = run.data / "accelerate"
    first, rest = launcher.read_text().split("\n", 1)
    launcher.write_text(f'{first}\n[ -z "$HANGPROOF_GATE" ] || {command}\n{rest}')


def until_starting(run: Run) -> int:
    return wait_for(lambda: run.standby()["state"] == "starting" and run.standby()["pid"], what="a standby that starts")


@pytest.mark.long
def test_a_crash_while_the_standby_imports_is_continued_by_it(tmp_path):
    run = Run(tmp_path)
    slow_imports(run, "timeout 5 sh -c 'while :; do :; done'")
    process = run.start()
    shell = until_starting(run)
    os.kill(status(run.folder)["trainer_pids"][0], signal.SIGKILL)
    wait_for(lambda: run.restarted(), what="the restart")
    assert EARLY in run.restarted()[0] and status(run.folder)["pid"] == shell
    run.finish(process)
    run.check_complete(restarts=1)


@pytest.mark.long
def test_a_standby_that_hangs_in_its_imports_is_not_waited_for(tmp_path):
    run = Run(tmp_path)
    slow_imports(run, "sleep 1000")
    process = run.start()
    shell = psutil.Process(until_starting(run))
    time.sleep(7)  # longer than it takes to see that it uses no processor time
    os.kill(status(run.folder)["trainer_pids"][0], signal.SIGKILL)
    wait_for(lambda: run.restarted(), what="the restart")
    assert EARLY not in run.restarted()[0] and not shell.is_running()
    assert "it hangs in its imports" in (run.folder / "monitor.log").read_text()
    run.finish(process)
    run.check_complete(restarts=1)


@pytest.mark.long
def test_a_standby_that_never_arrives_is_given_up(tmp_path):
    run = Run(tmp_path, limits="[standby]\nstart_s = 1\ntries_count = 1\n")
    slow_imports(run, "sleep 1000")
    process = run.start()
    wait_for(lambda: "its imports took more than 1 s" in run.standby().get("reason", ""), 60, "the end of the standby")
    run.finish(process)
    run.check_complete(restarts=0)


@pytest.mark.long
@pytest.mark.parametrize("killed", ["the monitor", "monitor and training"])
def test_a_monitor_that_is_killed_while_the_standby_starts_leaves_nothing(tmp_path, killed):
    run = Run(tmp_path)
    slow_imports(run, "sleep 1000")  # it never sees the end of the pipe
    process = run.start()
    orphan = psutil.Process(until_starting(run))
    training = status(run.folder)["trainer_pids"]
    psutil.Process(status(run.folder)["monitor_pid"]).kill()
    if killed != "the monitor":
        os.kill(training[0], signal.SIGKILL)
    wait_for(lambda: not orphan.is_running() or orphan.status() == "zombie", 60, "the end of the orphan")
    wait_for(lambda: (pid := run.standby()["pid"]) and pid != orphan.pid, 60, "the standby of the next monitor")
    assert (status(run.folder)["trainer_pids"] == training) == (killed == "the monitor")
    run.finish(process)
    run.check_complete(restarts=0 if killed == "the monitor" else 1)


@pytest.mark.long
def test_while_it_waits_it_uses_no_processor_time_and_is_the_first_that_short_memory_kills(tmp_path):
    run = Run(tmp_path)
    process = run.start(TOY_TORCH="1")
    shell = run.until_ready()
    pids = [shell, *(child.pid for child in psutil.Process(shell).children(recursive=True))]
    found = status(run.folder)
    assert found["standby"]["memory_bytes"] > 20e6, "torch is in it"
    text = line(run.folder, {**found, "alive": True})
    assert f"next attempt ready ({size_text(found['standby']['memory_bytes'])})" in text
    assert [score(pid) for pid in pids] == [1000] * len(pids) and score(found["trainer_pids"][0]) == score(os.getpid())

    before, began_s = used_s(pids), time.monotonic()
    assert before > 0.1, "its imports are counted"
    time.sleep(20)
    share = (used_s(pids) - before) / (time.monotonic() - began_s)
    print(f"the waiting standby uses {share:.4%} of a core and {found['standby']['memory_bytes'] / 1e6:.0f} MB")
    assert share <= 0.001

    os.kill(found["trainer_pids"][0], signal.SIGKILL)
    wait_for(lambda: run.restarted(), what="the restart")
    assert [score(pid) for pid in pids] == [score(os.getpid())] * len(pids)
    run.finish(process)
    run.check_complete(restarts=1)


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def used_s(pids: list[int]) -> float:
    """Processor time of all their threads."""
    files = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


@pytest.mark.long
def test_it_is_off_when_memory_is_short_and_when_it_is_turned_off(tmp_path):
    for name, limits, reason in (
        ("short", f"[standby]\nreserve_bytes = {1 << 60}\n", "memory is short"),
        ("off", "standby = false\n", "turned off"),
    ):
        run = Run(tmp_path / name, step_s=0.01, limits=limits)
        process = run.start()
        wait_for(lambda run=run, reason=reason: reason in run.standby().get("reason", ""), what=reason)
        run.finish(process)
        run.check_complete(restarts=0)


@pytest.mark.long
def test_a_stop_ends_the_standby_at_once(tmp_path):
    run = Run(tmp_path, step_s=0.1)
    process = run.start()
    waiting = trainer_of(run.until_ready())
    stop(run.folder, **run.env)
    run.finish(process, code=3)
    assert not waiting.is_running()
    assert not members(run.folder) and status(run.folder)["state"] == "stopped"


# Without a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A standby that waits, and the folder of its run."""
    monkeypatch.setenv("HANGPROOF_LIMITS", "")
    for name in ("TMPDIR", "HANGPROOF_SHM"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = Run(tmp_path / "data")
    for name, value in run.env.items():
        monkeypatch.setenv(name, value)
    folder = RunFolder(run.folder)
    limits = config.load()
    standby = Standby(folder, limits.standby, limits.end)
    text = (run.folder / "train.sh").read_text().rstrip() + f" --resume {run.folder / STAND_IN}\n"
    attempt = Attempt.prepare(folder, 1, platform.now(), {})
    standby._begin(attempt, text, (), time.monotonic())
    wait_for(standby._became_ready, 60, "a standby")
    assert standby.summary()["state"] == "ready"
    yield standby, run.folder, text
    standby.close()
    attempt.close()


def script_of(folder: Path, text: str, resume: Path) -> Path:
    path = folder / "train.attempt-2.sh"
    path.write_text(text.replace(str(folder / STAND_IN), str(resume)))
    return path


def test_a_mitigation_that_changes_the_script_drops_it(alone):
    standby, folder, text = alone
    state = folder / "toy-step00000010-state"
    pids = standby.pids()
    same = script_of(folder, text, state)
    assert standby.take(2, same, state) is standby.attempt
    changed = script_of(folder, text.replace("--max_train_steps", "--lowered 1 --max_train_steps"), state)
    assert standby.take(2, changed, state) is None
    assert pids and not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
    assert standby.summary()["reason"] == "the failure changes the script"


@pytest.mark.parametrize("other", ["another attempt", "from the start"])
def test_it_is_dropped_where_it_would_train_something_else(alone, other):
    standby, folder, text = alone
    state = folder / "toy-step00000010-state"
    script = script_of(folder, text, state)
    taken = standby.take(3, script, state) if other == "another attempt" else standby.take(2, script, None)
    assert taken is None and not standby.pids() and standby.summary()["state"] == "none"


def test_it_is_dropped_while_it_waits_when_memory_becomes_short(alone, monkeypatch):
    standby, _, _ = alone
    monkeypatch.setattr("guards.memory.available_bytes", lambda: 1 << 20)
    standby._look_after(time.monotonic())
    assert standby.summary()["state"] == "none" and "memory is short" in standby.summary()["reason"]


def test_steps_beside_its_imports_do_not_make_the_limit_of_a_step_longer():
    known, limits = Durations(), config.load()
    known.add([1.0] * 30)
    usual_s = known.budget(limits.phases["step"], limits.watch)
    known.add([9.0], disturbed=True)
    assert known.budget(limits.phases["step"], limits.watch) == usual_s
    known.add([9.0])
    assert known.budget(limits.phases["step"], limits.watch) == 5 * 9.0


def test_a_run_whose_standby_failed_is_not_tried_again_at_once(alone, monkeypatch):
    standby, _, _ = alone
    begun: list[float] = []
    monkeypatch.setattr(standby, "_begin", lambda *_: begun.append(time.monotonic()))
    monkeypatch.setattr("monitor.standby.LOOK_S", 0.5)
    attempt, view = standby.attempt, SimpleNamespace(moment=platform.now(), beats=[SimpleNamespace(count=9)])
    failed_s = time.monotonic()
    standby._failed("it was killed")
    while not begun:
        view.moment = platform.now()
        standby.tick(view, attempt, "text", ())
    assert begun[0] - failed_s >= 0.5


@pytest.mark.parametrize(
    ("spec", "reason"),
    [({"gpus": 2}, "several"), ({"nodes": 2}, "several"), ({"save_dir": "/x"}, "save_dir"), ({"edited": {}}, "edited")],
)
def test_what_a_run_must_be_like_to_have_one(tmp_path, spec, reason):
    folder, limits = RunFolder(tmp_path), config.load().standby
    assert never(folder, limits) == "foreign"
    folder.spec = {"name": "x", **spec}
    assert never(folder, limits) == reason
    folder.spec = {"name": "x"}
    assert never(folder, limits) == ""


def test_the_message_is_written_at_once_or_not_at_all():
    variables = {f"HANGPROOF_SNAPSHOTS_{i}": "x" * 200 for i in range(4)}
    assert len(gate.message("/" + "x" * 1000, variables, "/" + "y" * 1000)) <= 4096
