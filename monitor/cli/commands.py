"""The commands beside `run`: start a monitor in the background, show, stop, pause, diagnose, continue what was
interrupted.

Sample images and checkpoints are requested of the training itself (guards/step_requests.py), between two steps. The
functions with a folder are also those of the page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from guards import step_requests
from guards.checkpoint import atomic_write
from guards.reading import read_json, read_text
from monitor.attempt import Attempt
from monitor.ledger import Ledger
from monitor.phrases import PHASES, count, duration
from monitor.process import platform, spawned
from monitor.process.platform import LOCK, is_held
from monitor.process.spawned import ROOT, Tree, helper_environment
from monitor.resume.next_attempt import CHECKED, START, UNCHECKED, start_problems
from monitor.run_folder import EVENTS, LOG, STATUS, STOP, MonitorError, RunFolder, all_folders, find, wake_queue
from monitor.state import FINAL, WATCHED, AttemptRecord, RunState, State, is_abandoned, nothing_left, read_status
from presets.terminal import plain
from runs.files import unwritable
from runs.growing import json_objects
from runs.manage import size_text
from runs.paths import outputs_dir

START_S = 20.0
APART_S = 2.0  # between the two samples of `diagnose`
EVENT_BYTES = 256 << 10  # the end of events.jsonl, in which an answer is looked for
POLL_S = 0.2
Answer = tuple[int, Any]  # of a command: its exit code, and what `--json` adds; None for nothing


def start(args: argparse.Namespace) -> Answer:
    """Start a monitor for the run; print its process number, or that nothing is left to train."""
    folder = find(args.run)
    done = "" if is_held(folder / LOCK) else nothing_left(folder)
    answer = {"folder": str(folder), "pid": None, "already": False} if done else launch(folder)
    print(f"{folder}: {done or 'already ' * bool(answer['already']) + 'watched by process ' + str(answer['pid'])}")
    return 0, answer


def launch(folder: Path, how: str = START) -> dict[str, Any]:
    """Start a detached monitor for `folder`: {"folder", "pid", "already"}. how: START, or "resume": no person asks.

    Raises:
        MonitorError: the run cannot be started, or the monitor ended at once; the message says why.
    """
    if is_held(folder / LOCK):
        return {"folder": str(folder), "pid": (read_json(folder / STATUS) or {}).get("monitor_pid"), "already": True}
    run_folder, log = RunFolder(folder), folder / LOG
    if RunState.load(run_folder).current is None and not refuse_unready(run_folder):
        how += UNCHECKED
    before = log.stat().st_size if log.exists() else 0
    command = [sys.executable, "-m", "monitor", "run", str(folder)]
    env = helper_environment() | {"HANGPROOF_QUIET": "1", CHECKED: how}
    null = subprocess.DEVNULL
    with open(log, "ab") as out:
        keeper = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=out, cwd=ROOT, env=env, **platform.detached()
        )
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        known = read_json(folder / STATUS) or {}
        if spawned.is_python_of(keeper, known.get("keeper_pid")):
            return {"folder": str(folder), "pid": known["monitor_pid"], "already": False}
        if keeper.poll() is not None:
            if is_held(folder / LOCK):  # started twice at the same moment: the other one watches it
                return launch(folder, how)
            lines = log.read_bytes()[before:].decode("utf-8", "replace").strip().splitlines()
            said = lines[-1].removeprefix("monitor: ") if lines else unwritable(folder)  # as the log is
            raise MonitorError(said or f"{folder}: the monitor ended at once")
        time.sleep(0.02)
    if is_held(folder / LOCK):  # it watches the run; a full disk takes no status.json
        return {"folder": str(folder), "pid": keeper.pid, "already": False}
    raise MonitorError(f"{folder.name}: the monitor does not respond within {START_S:.0f} s; see {log}")


def refuse_unready(folder: RunFolder) -> bool:
    """Whether the run can be started; False: a busy machine did not say in time, and the monitor looks again.

    Raises:
        MonitorError: it cannot; the message says why.
    """
    try:
        missing = start_problems(folder, START_S, time.sleep)
    except OSError:
        return False
    if missing:
        raise MonitorError(f"{folder.name} cannot be started: {'; '.join(missing)}")
    return True


def status(args: argparse.Namespace) -> Answer:
    """Show what one run or every run is doing."""
    folders = [find(args.run)] if args.run else all_folders()
    if args.watch:
        return watch(folders), None
    found = [(folder, read_status(folder)) for folder in folders]
    if not found:
        print(f"no runs in {outputs_dir()}")
    for folder, values in found:
        print(line(folder, values))
    if args.run and "ledger" in (values := found[0][1] or {}):
        print(f"  {Ledger.of(values).line()}")
    for text in spawned.orphans() if not args.run else []:
        print(text)
    shown = [
        {**values, "ledger": Ledger.of(values).values()} if values else {"folder": str(folder), "state": None}
        for folder, values in found
    ]
    return 0, shown[0] if args.run else shown


def line(folder: Path, values: dict[str, Any] | None) -> str:
    """One run in one line. A status that is damaged, by a hand or a disk, costs this line only."""
    try:
        return f"{folder.name}: {_about(values) if values else 'not started'}"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"{folder.name}: {STATUS} is damaged ({error!r}); a start of the run writes it again"


def _about(values: dict[str, Any]) -> str:
    state = values["state"] + (" (not watched; start it again)" if is_abandoned(values) else "")
    state += f" ({values['stale']})" if values.get("stale") else ""
    if values["state"] in FINAL:
        message = values["message"]  # such as "stopped at step 20"
        return message if message.startswith(state) else f"{state}. {message}"
    steps = f"step {values['step']}" + (f" of {values['planned_steps']}" if values["planned_steps"] else "")
    phase = f" ({PHASES[values['phase']]})" if values.get("phase") else ""
    eta = f", {duration(values['eta_s'])} left" if values.get("eta_s") else ""
    restarts = f", {count(values['restarts'], 'restart')}" if values["restarts"] else ""
    message = f". {m}" if (m := values["message"]) else ""
    if slow := values.get("slow"):
        message += f". {slow['title']}. {slow['pace']}. {slow['explanation']} {slow['advice']}"
    ready = _ready(values) if values["state"] in WATCHED else ""
    return f"{state}{phase}, {steps}{eta}{restarts}{_store(values)}{ready}{message}"


def _ready(values: dict[str, Any]) -> str:
    """The newest snapshot in memory and the next attempt, which is started early, or why there is none."""
    known, next_one = values.get("snapshots") or {}, values.get("standby") or {}
    text = f", snapshots in memory are off: {known['off']}" if known.get("off") else ""
    if not text and known.get("step") is not None:
        often = "at every step" if known.get("every", 1) <= 1 else f"every {known['every']:,} steps"
        text = f", snapshot of step {known['step']} in memory ({size_text(known['bytes'])}, {often})"
    if next_one.get("state") == "ready":
        return f"{text}, next attempt ready ({size_text(next_one['memory_bytes'])})"
    if next_one.get("state") == "starting":
        return f"{text}, next attempt starting"
    return text + (f", no standby attempt: {next_one['reason']}" if next_one.get("reason") else "")


def _store(values: dict[str, Any]) -> str:
    """What the store has of a run; "" for a run without one."""
    store = values.get("store") or {}
    step = f", step {store['step']} in the store" if store.get("step") is not None else ""
    return step + (f", store: {store['error']}" if store.get("error") else "")


def watch(folders: list[Path], every_s: float = 1.0) -> int:
    """Show the runs, a line each, until every run has ended; Ctrl-C leaves the runs alone."""
    from rich.console import Console
    from rich.live import Live
    from rich.markup import escape

    with Live(console=Console(file=getattr(sys.stdout, "stream", sys.stdout)), refresh_per_second=4) as live:
        alive = True
        while alive:
            found = [(folder, read_status(folder)) for folder in folders]
            live.update("\n".join(escape(plain(line(folder, values))) for folder, values in found))
            alive = any(values is not None and values["alive"] for _, values in found)
            time.sleep(every_s * alive)
    return 0


def ask_to_end(folder: Path, how: dict[str, bool]) -> bool:
    """Ask the run's monitor to end it: `how` has "now" or "pause".

    Without one, a new monitor adopts the living training, so that it stops like any other. False: its monitor left no
    record, and the processes were killed here.

    Raises:
        MonitorError: nothing of it runs.
        OSError: the request cannot be written.
    """
    if not is_held(folder / LOCK):
        if not (left := spawned.with_environment(spawned.RUN, str(folder.resolve()))):
            raise _not_running(folder)
        if _current(RunFolder(folder)) is None:
            result = spawned.kill(Tree("", members={p.pid: p for p in left}), 3.0, 10.0)
            if result.survivors:
                pids = ", ".join(str(p.pid) for p in result.survivors)
                raise MonitorError(f"{folder.name}: cannot be killed: pid {pids}")
            print(f"{folder.name}: killed {count(len(result.killed), 'process')} that no monitor watched")
            return False
        launch(folder)
    try:
        atomic_write(folder / STOP, json.dumps(how))
    except OSError:  # a full disk takes no request: Ctrl-C, which its monitor understands, too, needs no file
        if platform.WINDOWS or "pause" in how:
            raise
        its = re.compile(rf" --child .* {re.escape(str(folder))}$")
        monitors = [one for one in platform.scan().values() if its.search(platform.command_of(one.pid))]
        if not any([platform.send(one.pid, one.start, signal.SIGINT) for one in monitors]):
            raise
    return True


def stop(args: argparse.Namespace) -> Answer:
    """`monitor stop|pause RUN`: ask the run's monitor to end it. A pause is a stop with another name for its end."""
    folder, pauses = find(args.run), args.command == "pause"
    known = read_status(folder)
    if pauses and known is not None and known["state"] == State.PAUSED and not known["alive"]:
        print(f"{folder.name}: {known['reason']} already")
    elif ask_to_end(folder, {"pause": True} if pauses else {"now": args.now}):
        print(f"{folder.name}: {args.command} requested")
    else:
        return 0, {"folder": str(folder), "state": (read_status(folder) or {}).get("state")}
    until = time.monotonic() + args.wait
    while time.monotonic() < until and is_held(folder / LOCK):
        time.sleep(0.1)
    state = (read_status(folder) or {}).get("state")
    return 0 if not args.wait or state in FINAL else 1, {"folder": str(folder), "state": state}


def _current(run_folder: RunFolder) -> Attempt | None:
    """The attempt that runs now, None when nothing of it is alive."""
    record = RunState.load(run_folder).current
    attempt = Attempt.adopt(run_folder, record) if record else None
    return attempt if attempt is not None and attempt.tree.members else None


def _not_running(folder: Path) -> MonitorError:
    known = read_status(folder) or {}
    said = known.get("reason") or known.get("message") or "no reason is recorded"
    if known.get("alive") and known["state"] not in FINAL:  # between two attempts, or under Slurm
        what = f"is {known['state']}, and no training process of it is on this machine now"
        return MonitorError(f"{folder.name} {what}; if another machine trains it, run this there")
    state = f"last state: {known['state']}, {said}" if known else "never started"
    return MonitorError(f"{folder.name} is not running ({state})")


def request(folder: Path, kind: str) -> str:
    """Request sample images ("sample") or a checkpoint with its LoRA ("save") of a run under way; the request's id.

    It is done once the current step is complete; one that waits already is returned.

    Raises:
        MonitorError: the run is not under way, is ending, or makes no sample images.
        OSError: the request cannot be written.
    """
    status = read_status(folder)
    if status is None or not status["alive"] or status["state"] in FINAL:
        what = f"{step_requests.KINDS[kind]} can be made while it trains"
        raise MonitorError(f"{_not_running(folder)}; {what}; start it: python -m monitor start {folder.name}")
    if status["state"] == State.STOPPING:
        raise MonitorError(f"{folder.name} is stopping: {status['message']}")
    spec = RunFolder(folder).spec
    if kind == "sample" and spec:
        none = not read_text(folder / "sample_prompts.txt").strip()
        lacks = ["prompts"] * none + ["sample_every_n_steps (not 0)"] * (spec.get("sample_every_n_steps") == 0)
        if lacks:
            raise MonitorError(
                f"{folder.name} makes no sample images; set {' and '.join(lacks)} in run.toml, write it again with "
                f"`python -m runs render {folder.name}`, then start it again"
            )
    return step_requests.ask(folder, kind)


def outcome(folder: Path, name: str) -> dict[str, Any] | None:
    """The event that answers the request with this id: "done", "message" and "step"; None while there is none."""
    try:
        with open(folder / EVENTS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - EVENT_BYTES))
            return step_requests.answer(json_objects(file.read(EVENT_BYTES)), name)
    except OSError:
        return None


def sample(args: argparse.Namespace) -> Answer:
    """`monitor sample|save RUN`: request it of the training, and wait `args.wait` seconds for the answer."""
    folder = find(args.run)
    name = request(folder, args.command)
    print(f"{folder.name}: {step_requests.KINDS[args.command]} requested; it is made when the current step is complete")
    until, found = time.monotonic() + args.wait, None
    while (found := outcome(folder, name)) is None and time.monotonic() < until:
        time.sleep(POLL_S)
    if found is not None:
        print(f"{folder.name}: {found.get('message')}")
    code = 0 if not args.wait or (found or {}).get("done") is True else 1
    return code, {"folder": str(folder), "id": name, "outcome": found}


save, pause, resume = sample, stop, start  # the commands of these names


def resume_all(args: argparse.Namespace) -> Answer:
    """Start every run that was interrupted, eight at once. One that cannot be started does not stop the others."""
    from concurrent.futures import ThreadPoolExecutor

    started, failed = [], 0
    folders = [folder for folder in all_folders() if is_abandoned(read_status(folder))]
    with ThreadPoolExecutor(8) as pool:  # more could wait for the processor longer than START_S
        for folder, answer in [(folder, pool.submit(launch, folder, "resume")) for folder in folders]:
            try:
                started.append(answer.result())
                print(f"{folder.name}: watched by process {started[-1]['pid']}")
            except (MonitorError, OSError) as error:
                failed += 1
                print(f"monitor: {error}", file=sys.stderr)
    if not folders:
        print("no interrupted run")
    if wake_queue(outputs_dir()):
        print("the queue goes on")
    return 1 if failed else 0, started


def diagnose(args: argparse.Namespace) -> Answer:
    """Explain what a run or a process waits for: two samples, all stacks, the likely cause. Changes nothing."""
    from monitor import config
    from monitor.cli import explain
    from monitor.detect.probe import Probe, compare
    from monitor.detect.progress import HUNG
    from monitor.diagnose import causes
    from monitor.diagnose.causes import Evidence
    from monitor.diagnose.incident import describe
    from monitor.state import Verdict

    process: platform.ProcessInfo | None = None
    limits, found = config.load(), Evidence("hang")
    if args.run.isdigit() and not any((base / args.run).exists() for base in (Path(), outputs_dir())):
        process = explain.checked(args.run)  # an attempt without heartbeats
        known = AttemptRecord(
            "", 0, "", os.devnull, 0, time.monotonic(), (process.pid, process.start), platform.oom_kills()
        )
        attempt = Attempt(RunFolder(Path.cwd()), known)
        name = f"process {process.pid} ({platform.command_of(process.pid)[:120]})"
    else:
        folder = RunFolder(find(args.run))
        if (living := _current(folder)) is None:
            raise _not_running(folder.folder)
        attempt, name = living, f"{folder.folder.name}, attempt {living.record.number}"
        found.log_tail = attempt.log_tail(limits.check.log_tail_bytes)
    beats, pid = attempt.poll(platform.now(), 0.0, fresh=True).beats, attempt.pid or 0
    with contextlib.closing(Probe(attempt.tree, attempt.heartbeats, limits, lambda: (), beats, True)) as probe:
        if not beats and pid in attempt.tree.members:
            probe.spy.begin(pid, attempt.tree.members[pid].start)
        first = probe.newest
        time.sleep(APART_S)
        probe.sample_again(beats)
        until = time.monotonic() + limits.check.py_spy_s
        while probe.spy.poll() and time.monotonic() < until:
            time.sleep(0.05)
        signals, stacks = compare(first, probe.newest, [b.pid for b in beats] or [pid]), probe.texts()
    if "Failed to find python version" in stacks.get(pid, ""):  # py-spy, of any other program
        stacks[pid] = "(not a Python process: its stack cannot be shown)"
    verdict = Verdict(HUNG, phase="step", evidence=signals.stuck)  # as if it were
    for beat in beats[:1]:
        stalled_s = time.monotonic() - max(beat.step_s, beat.phase_s)
        verdict = Verdict(HUNG, beat.rank, beat.phase, beat.step, stalled_s, evidence=signals.stuck)
    evidence = causes.of_hang(found, attempt, verdict, attempt.exit_status(beats), stacks, "")
    text, answer = describe(name, evidence, signals, causes.match(evidence))
    if process is not None:
        answer["process"] = explain.facts(process)
        text = "\n".join((*answer["process"]["lines"], "", text))
    print(text)
    return 0, answer


def rank_report(folder: Path) -> list[str]:
    """The lines of the rank report of the attempt that runs now, from the heartbeats alone: no process is asked for its
    stacks. It accuses a rank only while the monitor suspects or has found a hang. [] where no rank has started.
    """
    from guards import heartbeat
    from monitor.diagnose import ranks

    record = RunState.load(RunFolder(folder)).current
    beats = heartbeat.read_all(record.heartbeats) if record else []
    group = ranks.Group(ranks.records(beats, platform.now()))
    state = (read_status(folder) or {}).get("state")
    return group.lines(group.verdict(stuck=state in ("suspect", "recovering")))


def metrics(args: argparse.Namespace) -> Answer:
    """Serve until Ctrl-C."""
    import http.server

    from monitor.cli.metrics import Handler

    try:
        serving = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", "ports end at 65535")
        raise MonitorError(f"port {args.port} cannot be used: {why}; choose another with --port") from error
    print(f"http://127.0.0.1:{serving.server_port}/metrics", flush=True)
    if args.json:
        print(json.dumps({"port": serving.server_port}), flush=True)
    serving.serve_forever()
    return 0, None


def notify(args: argparse.Namespace) -> Answer:
    """Send a message to the user's own addresses, to test them."""
    from monitor.cli.notify import send
    from monitor.run_folder import notify_file

    sent, addresses = send("test", "Hangproof", "This is what a message from your training will look like.")
    print(f"{sent} of {addresses} addresses in {notify_file()} accepted the message")
    return 0 if sent == addresses else 1, {"sent": sent, "addresses": addresses}
