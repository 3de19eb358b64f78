"""The fault matrix: a fault is a row of faults.toml, and `play` plays one on a real run.

The monitor, the launcher and the trainer are real; the model is tiny, at 50 ms a step. The same seed injects at the
same step. The row says when and what is done, from inside (benchmarks/injector.py) or from outside (fault_actions.py),
and what must be seen afterwards in the monitor's own files (`check`); no code here knows a fault by name.

The caches and the model of the undisturbed run are copied, so that a run starts in five seconds instead of eight.
"""

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import fault_actions
import pytest
import tiny_runs
import tomllib
from monitor_helpers import events, wait_for
from run_facts import incidents, report, status
from runs_helpers import PROJECT

from benchmarks.injector import INJECTED, WRITERS, doubled
from benchmarks.trial import TOKEN, kill_all, limits_toml, living, read_end, read_lines, waits
from monitor.resume import checkpoints

Row = dict[str, Any]
PACE_S = 0.05
DETECT_S = 10.0
PATIENCE_S = 400.0
SHIMS = PROJECT / "tests/support/shims"
WITHOUT = {"standby": {"tries_count": 0}, "restart": {"snapshots_bytes": 0}}  # limits that turn both off
MEMORY, EARLY = "a snapshot in memory", "which had been started early"  # in the events of attempts


def table() -> dict[str, Row]:
    """The rows by name, in order, with what the table's head says of keys that are missing."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for name, row in rows.items():
        want = {"state": "completed", "code": 0, "incidents": [], **row.get("expect", {})}
        causes = want["incidents"]
        want.setdefault("restarts", causes if isinstance(causes, int) else len(causes))
        row |= {"name": name, "expect": want, "trainer": row.get("trainer", "built-in")}
        if "inject" in row:
            row["inject"] = {"step": [23, 28], "phase": "step", "every": False, **row["inject"]}
    return rows


def without_recovery(row: Row) -> Row:
    """The row in a run that has neither snapshots in memory nor a standby attempt."""
    limits = dict(row.get("limits", {}))
    for section, values in WITHOUT.items():
        limits[section] = {**limits.get(section, {}), **values}
    expect = {**row["expect"], "memory": False, "early": False, **row.get("without", {})}
    return {**row, "name": f"{row['name']}-off", "limits": limits, "expect": expect}


def missing(*needs: str) -> str:
    """Why these needs of a row are not met on this machine; "" when they are."""
    conditions = {
        "linux": (sys.platform.startswith("linux"), "Linux only"),
        "root": (hasattr(os, "geteuid") and os.geteuid() == 0, "only root may mount a file system"),
        "pids": (os.access("/proc/sys/kernel/ns_last_pid", os.W_OK), "process numbers cannot be chosen here"),
        "loop": (Path("/dev/loop-control").exists(), "no loop devices, so no file system can be frozen"),
        "recovery": (True, ""),
    }
    found = (conditions.get(need) or (shutil.which(need), f"{need} is not installed") for need in needs)
    return next((why for met, why in found if not met), "")


def fault_step(row: Row, seed: int) -> int:
    """The step at which the row's fault occurs, drawn from the row's range by its name and the seed."""
    return random.Random(f"{row['name'].removesuffix('-off')}/{seed}").randint(*row["inject"]["step"])


class Scenario:
    """A row's run, its monitors, and its processes. `code`: the exit code of the last monitor that ended."""

    def __init__(self, row: Row, seed: int, root: Path, scratch: Path):
        text = json.dumps(row).replace("{root}", str(root)).replace("{python}", sys.executable)
        self.row = row = json.loads(text)
        self.seed, self.root, self.token = seed, root, secrets.token_hex(8)
        self.python, self.code = sys.executable, -1
        self.monitors: list[subprocess.Popen[bytes]] = []
        self.trainer = tiny_runs.TRAINERS[row["trainer"]]
        self.undisturbed = tiny_runs.undisturbed(row["trainer"], seed, **row.get("spec", {}))
        self.data = root / ("disk" if "tmpfs" in row else "data")
        self.folder = self.new_run(self.data)
        self.environment = self.trainer.environment(self.data) | self.variables(scratch)
        if "shim" in row:
            self.environment["PYTHONPATH"] = f"{SHIMS / row['shim']}{os.pathsep}{self.environment['PYTHONPATH']}"

    def new_run(self, data: Path) -> Path:
        """A run as the row describes it, in data root `data`; its folder."""
        data.mkdir(exist_ok=True)
        folder = self.trainer.create(data, self.seed, **self.row.get("spec", {}))
        if self.row["trainer"] == "built-in":
            shutil.copytree(self.undisturbed.data / "models", data / "models")
            images = Path("datasets", folder.name)
            for made in [] if self.row.get("cold") else self.undisturbed.data.glob(f"{images}/.*-cache"):
                shutil.copytree(made, data / images / made.name)
        if "script" in self.row:
            script, added = folder / "train.sh", self.row["script"].splitlines()
            lines = script.read_text(encoding="utf-8").splitlines()
            starts = ('"$python" ', '"$launcher" ')  # the last of them trains; those before it fill the caches
            at = [i for i, line in enumerate(lines) if line.removeprefix("exec ").startswith(starts)][-1]
            script.write_text("\n".join([*lines[:at], *added, *lines[at:]]) + "\n", encoding="utf-8")
        return folder

    def variables(self, scratch: Path) -> dict[str, str]:
        """The monitor's: the injector and its fault, tighter limits where the row has some."""
        row, writers = self.row, self.root / "writers"
        writers.mkdir()
        found = {TOKEN: self.token, "TMPDIR": str(scratch), WRITERS: str(writers)}
        found |= {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_PACE_S": str(PACE_S)}
        found |= {name: str(value) for name, value in row.get("env", {}).items()}
        if inject := row.get("inject"):
            fault = {"": inject["fault"], "_STEP": fault_step(row, self.seed), "_PHASE": inject["phase"]}
            fault |= {"_EVERY": int(inject["every"]), "_ARG": inject.get("arg", self.seed)}
            found |= {f"HANGPROOF_FAULT{name}": str(value) for name, value in fault.items()}
        if "slow" in row:
            found["HANGPROOF_SLOW"] = f"{row['slow']['from']}:{row['slow']['s']}:{self.root / 'go'}"
        if "limits" in row:
            (self.root / "limits.toml").write_text(limits_toml(row["limits"]), encoding="utf-8")
            found["HANGPROOF_LIMITS"] = str(self.root / "limits.toml")
        if "shm" in row:
            found["HANGPROOF_SHM"] = str(self.root / "shm")
        return found

    def command(self, *words: str, folder: Path | str = "", env: dict | None = None) -> subprocess.Popen[bytes]:
        """Start `python -m monitor WORDS FOLDER`; its output is added to monitor.txt."""
        command = (self.python, "-m", "monitor", *words, str(folder or self.folder))
        how = {"env": env or self.environment, "stdin": subprocess.DEVNULL, "start_new_session": True}
        with open(self.root / "monitor.txt", "ab") as out:
            return subprocess.Popen(command, cwd=PROJECT, stdout=out, stderr=out, **how)

    def monitor(self) -> subprocess.Popen[bytes]:
        self.monitors.append(self.command("run"))
        return self.monitors[-1]

    def finish(self) -> None:
        self.code = self.monitors[-1].wait(self.row.get("patience_s", PATIENCE_S))

    def until(self, what: str, met, patience_s: float = 240.0) -> Any:
        return wait_for(met, patience_s, what)

    def wait(self) -> None:
        """Wait until the moment of the action has come, however long that takes: the row's `wait`."""
        what = self.row.get("wait", "")
        if what == "step":
            self.until_step(self.row["slow"]["from"])
        elif what == "ready":
            self.until_ready()
        elif what == "standby":
            self.until("a standby that starts", lambda: self.standby().get("pid"))
        elif what:
            self.until(f"the event {what!r}", lambda: events(self.folder, what))

    def until_ready(self, but: int = 0) -> None:
        """Wait until a standby waits at its gate, another one than that whose shell is process `but`."""
        ready = lambda: self.standby().get("state") == "ready" and self.standby()["pid"] != but  # noqa: E731
        self.until("a standby attempt that is ready", ready)

    def until_step(self, step: int) -> None:
        """Wait until that step is complete (in metrics.jsonl, which the trainer itself writes)."""
        self.until(f"step {step}", lambda: self.steps()[-1]["step"] >= step)

    def go(self) -> None:
        """The action has done its part: the row's `slow` steps end."""
        (self.root / "go").touch()

    def standby(self) -> dict[str, Any]:
        return status(self.folder).get("standby") or {}

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.folder / "metrics.jsonl") if line["kind"] == "step"]

    def ours(self) -> dict[int, str]:
        return living(self.token)

    def trainers(self, at_gate: bool = False) -> list[int]:
        """Living training processes of the built-in trainer and what they forked; or those at the gate."""
        found = [pid for pid, line in self.ours().items() if " trainer " in f"{line} " and "launch" not in line]
        return [pid for pid in found if waits(pid) == at_gate]

    def logs(self) -> str:
        """What a failure is understood from."""
        files = [self.folder / "status.json", self.folder / "monitor.log", self.folder / "training.log"]
        return "\n".join(f"--- {path}\n{read_end(path)}" for path in [*files, self.root / "monitor.txt"])


def run(*command: str, check: bool = True) -> None:
    """Run a short command without its output. subprocess.CalledProcessError where `check` is set and it fails."""
    subprocess.run(command, check=check, capture_output=True, timeout=60)


def loop_disk(at: Path, size_bytes: int) -> None:
    """Mount a disk of its own there: an ext4 in a sparse file."""
    image = at.with_suffix(".image")
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    run("mkfs.ext4", "-q", str(image))
    at.mkdir()
    run("mount", "-o", "loop", str(image), str(at))


@contextlib.contextmanager
def prepared(row: Row, seed: int, root: Path):
    """The row's scenario in `root`. Afterwards its processes are dead, and its file systems are unmounted.

    A file system that stays frozen would hang `sync` for all.
    """
    root.mkdir(parents=True)
    # Short and of its own: the loader's workers make sockets there, and a socket's path has at most 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="fault-"))
    scenario = None
    try:
        for name, size in (("shm", row.get("shm")), ("disk", row.get("tmpfs"))):
            if size:
                (root / name).mkdir()
                run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(root / name))
        if row.get("frozen"):
            loop_disk(root / "frozen", 16 << 20)
        scenario = Scenario(row, seed, root, scratch)
        yield scenario
    finally:
        thaw = lambda: fault_actions.unfreeze(root / "frozen")  # noqa: E731
        left = kill_all(scenario.token, thaw) if scenario else []
        for at in (root / name for name in ("frozen", "disk", "shm")):
            if at.is_mount():
                run("umount", "--lazy", str(at), check=False)  # it goes away as soon as nobody uses it
        shutil.rmtree(scratch, ignore_errors=True)
        assert not left, f"processes cannot be killed: {left}"


def play(row: Row, seed: int, root: Path, slack_s: float) -> None:
    """Play a row. AssertionError, with the logs: something else was seen. What failed stays in `root`.

    slack_s: what a busy machine may add to the seconds that the row requires.
    """
    if why := missing(*row.get("needs", [])):
        pytest.skip(why)
    with prepared(row, seed, root) as scenario:
        try:
            action = row.get("action", "")
            if action not in fault_actions.STARTS_IT:
                scenario.monitor()
                scenario.wait()
            if action:
                getattr(fault_actions, action)(scenario)
            scenario.go()
            scenario.finish()
            check(scenario, slack_s)
        except Exception as problem:
            problem.add_note(f"{row['name']}, seed {seed}\n{scenario.logs()}")
            raise
        found = [incident.get("recover_s") for incident in incidents(scenario.folder)]
        print(f"{row['name']}: recovered in {found} s")
    shutil.rmtree(root)


def check(scenario: Scenario, slack_s: float) -> None:
    """What was seen is what the row requires."""
    folder, row = scenario.folder, scenario.row
    want, now = row["expect"], status(folder)
    seen = (now["state"], scenario.code)
    assert seen == (want["state"], want["code"]), f"state and exit code are {seen}: {now.get('message')!r}"
    restarts = want["restarts"]
    least, most = restarts if isinstance(restarts, list) else (restarts, restarts)
    assert least <= now["restarts"] <= most, f"{now['restarts']} restarts, expected {restarts}"
    changes = now.get("changes", [])
    assert len(changes) == want.get("changes", len(changes)), f"changes of the run: {changes}"
    if "inject" in row:
        assert INJECTED in read_end(folder / "training.log", 50_000_000), "the fault was never injected"
    for mark in want.get("used", []):
        assert (scenario.root / f"{mark}-used").exists(), f"{mark} was never called, so nothing was tested"
    assert want.get("log", "") in read_end(folder / "monitor.log", 50_000_000), f"monitor.log has no {want['log']!r}"
    times = [datetime.fromisoformat(event["t"]).timestamp() for event in events(folder)]
    moved_s = times[-1] - times[0] - row.get("jump_s", 0.0)
    assert abs(moved_s) < 1800, f"the wall clock's jump and the monitor's events differ by {moved_s:.0f} s"
    check_incidents(scenario, want, slack_s)
    check_checkpoints(folder, want)
    check_starts(scenario, want)
    if want["state"] == "completed":
        found, wanted = scenario.trainer.outcome(folder), scenario.undisturbed.outcome
        if want.get("encoded_again"):
            assert found["steps"].keys() == wanted["steps"].keys() and found["lora"], "steps or the LoRA are missing"
            # The steps that are trained twice may have the image that is encoded again.
            until = next(event["step"] for event in events(folder) if event["kind"] == "restarted")
            found, wanted = ({n: of["steps"][n] for n in range(1, until + 1)} for of in (found, wanted))
        assert found == wanted, "the run is not the undisturbed one"
    else:
        assert not (folder / f"{folder.name}.safetensors").exists(), "a LoRA, although the training did not finish"
    if want["state"] != "unkillable":
        wait_for(lambda: not scenario.ours(), slack_s, "the end of all its processes")


def check_incidents(scenario: Scenario, want: Row, slack_s: float) -> None:
    """Their causes, their reports, and how soon hangs were declared."""
    found, causes = incidents(scenario.folder), want["incidents"]
    seen = [incident["cause"] for incident in found]
    if isinstance(causes, int):
        assert len(seen) == causes, f"incidents: {seen}, expected {causes} of them"
    elif causes != ["any"]:
        same = len(seen) == len(causes) and all(map(re.fullmatch, causes, seen))
        assert same, f"incidents: {seen}, expected {causes}"
    # On a busy machine the steps before the fault were slow, so the learned limit is longer; while others keep the
    # processor busy, the monitor waits eight times the limit (detect/progress.py).
    busy = any("keep the processor busy" in event["message"] for event in events(scenario.folder, "slow"))
    for number, incident in enumerate(found, 1):
        budget_s = (8 if busy else 2) * incident["evidence"].get("budget_s", 0.0)
        within_s = max(want.get("detect_s", DETECT_S), budget_s + slack_s)
        late = incident["kind"] == "hang" and incident["detect_s"] > within_s
        assert not late, f"the hang was declared after {incident['detect_s']:.1f} s, expected within {within_s:.1f}"
        text = report(scenario.folder, number)
        for words in (incident["title"], "## Likely cause", "## Cost"):
            assert words in text, f"report.md of incident {number} has no {words!r}"
        assert "{" not in text.partition("The last lines of the log")[0], f"a placeholder is left in report {number}"
        back = incident.get("resumed_from")
        named = not back or re.search(rf"(checkpoint|snapshot in memory) of step {back}\b", text)
        assert named, f"report.md of incident {number} does not name the restart from step {back}"


def check_checkpoints(folder: Path, want: Row) -> None:
    """Each that was set aside is named, with the reason, and kept under another name."""
    if "set_aside" in want:
        messages = [event["message"] for event in events(folder, "checkpoint_bad")]
        assert len(messages) == len(want["set_aside"]), f"checkpoints set aside: {messages}"
        for word in want["set_aside"]:
            assert any(word in message for message in messages), f"no bad checkpoint is {word!r}: {messages}"
        assert list(folder.glob("*-state.bad*")), "the bad checkpoint was not kept under another name"


def check_starts(scenario: Scenario, want: Row) -> None:
    """How attempts began, and that no two of them trained at the same time or left anything in memory."""
    texts = [event["message"] for kind in ("started", "restarted") for event in events(scenario.folder, kind)]
    again = [text for text in texts if " from step " in text or " from the start" in text][1:]
    for word, wanted in ((MEMORY, want.get("memory")), (EARLY, want.get("early"))):
        same = wanted is None or all((word in text) == wanted for text in again)
        assert same, f"restarted: {again}, expected {'all' if wanted else 'none'} with {word!r}"
    assert not doubled(scenario.root / "writers"), f"two writers: {doubled(scenario.root / 'writers')}"
    attempts = [step["attempt"] for step in scenario.steps()]
    assert attempts == sorted(attempts), "two writers: a step of an earlier attempt follows one of a later attempt"
    place = Path(scenario.environment.get(checkpoints.PLACE, checkpoints.memory()))
    ours, found = f"{scenario.folder}\n", place.glob(f"*/*/{checkpoints.OWNER}")
    owners = [path for path in found if read_end(path).startswith(ours)]
    assert not owners or want["state"] not in ("completed", "failed"), f"snapshots are left in memory: {owners}"
