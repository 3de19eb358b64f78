"""How fast 1,000 runs on disk are listed, shown, and looked through for one to resume; on the command line and on the page.

The runs are written as the monitor writes them: every file that a listing could read is there. Each command is a new process,
as a user starts it, so its time is mostly that of the imports; the page's part is measured in a process that has served it
before (warm) and in one that sees the runs for the first time (cold). The smallest time of the repeats is compared with the
limit, because the others also measure what else the machine does. Exit code 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import CannotMeasure, Report

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1.0
HUNG_S = 300  # seconds after which a command counts as failed
COMMANDS = {
    "list": ["runs", "show", "--json"],
    "status": ["monitor", "status", "--json"],
    "resume_all": ["monitor", "resume-all", "--json"],
}
PAGE = """
import json, sys, time
from ui.run import cards, run_page, view
def seconds(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
show = lambda: cards.run_list(view.read_all(), "")
cold = seconds(show)
warm = seconds(show)
tick = seconds(lambda: run_page.render("", {}))
print(json.dumps({"page_cold": cold, "page_warm": warm, "page_tick": tick}))
"""


def write_runs(data: Path, number: int) -> None:
    """Write so many runs into a data folder: three of four completed, the others failed or stopped by the user."""
    import runs

    values = {"name": "run 0000", "trigger": "mycat", "price_per_hour": 0.4, "prompts": ["a photo of mycat"]}
    text = runs.dumps(runs.make(values))
    for index in range(number):
        state = ("completed", "completed", "completed", "failed", "stopped")[index % 5]
        name = f"run {index:04}"
        folder = data / "outputs" / runs.slug(name)
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text(text.replace("run 0000", name), encoding="utf-8")
        for name in ("train.sh", "dataset.toml", "sample_prompts.txt", "monitor.lock", "monitor.log", "training.log"):
            (folder / name).write_text("", encoding="utf-8")
        for file, content in _history(state).items():
            (folder / file).write_text(content.replace("NAME", name).replace("FOLDER", str(folder)), encoding="utf-8")


@functools.cache
def _history(state: str, steps: int = 500) -> dict[str, str]:
    """The monitor's files, by name, of a run NAME in FOLDER that hung once."""
    from datetime import UTC, datetime

    def at(seconds: float) -> dict[str, object]:
        when = datetime.fromtimestamp(1_790_000_000 + seconds, UTC).isoformat(timespec="milliseconds")
        return {"t": when.replace("+00:00", "Z"), "mono_s": round(1000 + seconds, 3), "boot": "0f1e2d3c"}

    lines, events = [], [{**at(0), "kind": "started", "attempt": 1, "step": 0, "metrics_bytes": 0, "waited_s": 1.5}]
    phases = ("import", "load", "cache_latents", "cache_text", "first_step", "step")
    events += [
        {**at(5 * n), "kind": "phase", "message": phase, "phase": phase, "step": 0} for n, phase in enumerate(phases)
    ]
    for attempt, (first, last, offset) in enumerate(((1, 297, 30), (251, steps, 500)), 1):
        for step in range(first, last + 1):
            moment = at(offset + step)
            lines.append(
                {
                    "kind": "step",
                    **moment,
                    "attempt": attempt,
                    "step": step,
                    "epoch": 1,
                    "loss": 0.1,
                    "lr": 1e-4,
                    "step_s": 1.0,
                }
            )
            if step % 50 == 0:
                events.append({**moment, "kind": "checkpoint", "message": f"checkpoint of step {step}", "step": step})
        if attempt == 1:
            size = sum(len(json.dumps(line)) + 1 for line in lines)
            events.append({**at(400), "kind": "hang", "message": "no progress", "step": 297, "since_s": 73.0})
            events.append({**at(410), "kind": "restarted", "attempt": 2, "step": 250, "metrics_bytes": size})
    events.append({**at(1010), "kind": state, "message": "500 steps, 1 restart"})
    status = {
        "version": 1, "name": "NAME", "folder": "FOLDER", "state": state, "phase": None, "step": steps,
        "planned_steps": steps, "epoch": 10, "loss": 0.1, "step_s": 1.0, "eta_s": None, "attempt": 2, "restarts": 1,
        "monitor_pid": 4_000_000, "keeper_pid": 4_000_001, "started_at": at(0)["t"], "updated_at": at(1010)["t"],
        "message": "500 steps, 1 restart", "reason": "500 steps, 1 restart", "incidents": 1, "checkpoint": None, "lora": None,
        "devices": [], "changes": [], "elapsed_s": 1010.0,
    }  # fmt: skip
    return {
        "status.json": json.dumps(status),
        "monitor.json": json.dumps({"version": 2, "state": state}),
        "events.jsonl": "".join(json.dumps(row) + "\n" for row in events),
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in lines),
    }


def take_times(data: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of each command and of the page's parts, of every repeat.

    Raises:
        ChildProcessError: a command failed, or shows another number of runs.
    """
    env = {**os.environ, "HANGPROOF_DATA": str(data), "GRADIO_ANALYTICS_ENABLED": "False"}
    number = len(list((data / "outputs").iterdir()))
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, words in COMMANDS.items():
            began = time.monotonic()
            output = _run([sys.executable, "-m", *words], env)
            times.setdefault(name, []).append(round(time.monotonic() - began, 3))
            answer = json.loads(output.splitlines()[-1])
            shown = len(answer["runs"] if isinstance(answer, dict) else answer)
            if shown != (0 if name == "resume_all" else number):
                raise ChildProcessError(f"{' '.join(words)} shows {shown} runs")
        for name, seconds in json.loads(_run([sys.executable, "-c", PAGE], env).splitlines()[-1]).items():
            times.setdefault(name, []).append(round(seconds, 3))
    return times


def _run(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    if done.returncode:
        raise ChildProcessError(f"{' '.join(command[1:4])}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--runs", type=int, default=1000, help="number of runs on disk (1000)")
    parser.add_argument("--repeats", type=int, default=5, help="how often each is measured (5)")


def measure(args: argparse.Namespace) -> Report:
    """Write the runs, and time each command and the page's list."""
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder), args.runs)
        try:
            times = take_times(Path(folder), args.repeats)
        except (ChildProcessError, subprocess.TimeoutExpired) as error:
            raise CannotMeasure(str(error)) from error
    best = {name: min(some) for name, some in times.items()}
    slow = [
        f"{name} takes {seconds:.2f} s, the limit is {LIMIT_S:g} s"
        for name, seconds in best.items()
        if seconds > LIMIT_S
    ]
    return Report({"runs": args.runs, "best_s": best, "times_s": times, "limit_s": LIMIT_S}, slow)
