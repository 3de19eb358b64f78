"""What the page costs while runs train, and how fast a long run opens, in a real browser: a part of `benchmarks ui`.

WATCHED runs train: a process of this module holds their locks and writes what a monitor and a trainer write, each second. Their
pages are open in Chromium, and the CPU time of the server is counted, not the browser's. Then a page opens a run of LONG_STEPS
logged steps: the time is the user's, from the click on the run to its chart.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from ui.token import load

ROOT = Path(__file__).resolve().parent.parent
WATCHED = 20
LONG_STEPS = 100_000
HISTORY_STEPS = 3000
IMAGES = 10_000
SETTLE_S = 6.0  # after the pages have opened
OPEN_MS = 60_000
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
]
# From the click on a run to the first picture with its chart. Measured in the page: a call from outside adds its own time.
CLICK = """async (name) => {
  const began = performance.now();
  document.querySelector(`#run-list [data-run="${name}"]`).click();
  const done = () => document.querySelector(".hp-main-chart")?.getAttribute("aria-label").includes("step STEPS");
  while (!done()) {
    if (performance.now() - began > LIMIT) return null;
    await new Promise((resume) => requestAnimationFrame(resume));
  }
  return (performance.now() - began) / 1000;
}""".replace("STEPS", f"{LONG_STEPS:,}").replace("LIMIT", str(OPEN_MS))


def step_line(step: int) -> str:
    """A line of metrics.jsonl as the trainers write it."""
    t = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    values = {"kind": "step", "t": t, "mono_s": 1000.0 + step, "attempt": 1, "step": step, "epoch": 1 + step // 1000}
    return json.dumps({**values, "loss": 0.1 + random.random() / 10, "lr": 1e-4, "step_s": 1.013}) + "\n"


def write_run(data: Path, name: str, state: str, steps: int) -> Path:
    """A run's folder as the monitor and the trainer leave it."""
    folder = data / "outputs" / name
    (folder / "sample").mkdir(parents=True)
    (folder / "run.toml").write_text(f'name = "{name}"\nlearning_rate = 0.0001\n', encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(step_line(step) for step in range(1, steps + 1)), encoding="utf-8")
    (folder / "training.log").write_text(
        "".join(f"line {n} of the training's log\n" for n in range(2000)), encoding="utf-8"
    )
    started = {"t": "2026-11-22T10:00:00.000Z", "kind": "start", "message": "attempt 1", "attempt": 1}
    (folder / "events.jsonl").write_text(json.dumps(started) + "\n", encoding="utf-8")
    write_status(folder, state, steps)
    return folder


def write_images(folder: Path) -> None:
    """IMAGES small images with captions. Raises OSError."""
    from PIL import Image

    folder.mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(folder / "00000.png")
    content = (folder / "00000.png").read_bytes()
    for number in range(IMAGES):
        (folder / f"{number:05d}.png").write_bytes(content)
        (folder / f"{number:05d}.txt").write_text("a caption\n", encoding="utf-8")


def write_status(folder: Path, state: str, step: int) -> None:
    """Replace status.json as the monitor does each second."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    values: dict[str, Any] = {"version": 1, "name": folder.name, "state": state, "phase": "step", "step": step}
    values |= {
        "planned_steps": 200_000,
        "loss": 0.123,
        "step_s": 1.0,
        "restarts": 0,
        "eta_s": 9999.0,
        "elapsed_s": float(step),
    }
    values |= {
        "started_at": "2026-11-22T10:00:00.000Z",
        "updated_at": now,
        "last_progress_at": now,
        "gpus": [],
        "devices": [],
    }
    path = folder / "status.json.new"
    path.write_text(json.dumps(values), encoding="utf-8")
    path.replace(folder / "status.json")


def grow(data: Path) -> None:
    """Train all runs, as far as files show it, until this process is killed."""
    from monitor.process.locks import LOCK, Lock

    folders = sorted(path for path in (data / "outputs").iterdir() if path.name.startswith("watched"))
    locks = [Lock(folder / LOCK) for folder in folders]
    if not all(lock.acquire() for lock in locks):
        raise SystemExit("a run's lock is held by another process")
    print("growing", flush=True)
    step = HISTORY_STEPS
    while True:
        step += 1
        began = time.monotonic()
        for folder in folders:
            write_status(folder, "running", step)
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(step_line(step))
            with (folder / "training.log").open("a", encoding="utf-8") as file:
                file.write(f"\rsteps: {step}/200000 avr_loss=0.123")
        time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))


@contextlib.contextmanager
def growing(data: Path) -> Iterator[None]:
    """WATCHED runs that train, and one that is long and stopped."""
    for number in range(WATCHED):
        write_run(data, f"watched-{number:02d}", "running", HISTORY_STEPS)
    write_run(data, "long", "stopped", LONG_STEPS)
    write_images(data / "datasets" / "long")
    command = [sys.executable, "-m", "benchmarks.ui_runs", str(data)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        if process.stdout is None or process.stdout.readline().strip() != b"growing":
            raise ChildProcessError("the process that lets the runs grow did not start")
        yield
    finally:
        process.kill()
        process.wait()


def browser_path() -> str | None:
    """$CHROMIUM, else a Chromium or Chrome on PATH; None: Playwright's own."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def measure(url: str, pid: int, seconds: float) -> dict[str, float]:
    """Open pages of the server `pid` at `url`: {"watched_percent_of_core", "watched_5_pages_percent_of_core", "long_run_open_s"}.

    Raises:
        TimeoutError: a page does not open.
    """
    from playwright.sync_api import sync_playwright

    server = psutil.Process(pid)
    found: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
        try:
            pages = [_open(browser, url, 0)]
            found["watched_percent_of_core"] = busy_percent(server, seconds)
            pages += [_open(browser, url, number) for number in range(1, 5)]
            found["watched_5_pages_percent_of_core"] = busy_percent(server, seconds)
            for page in pages[1:]:
                page.context.close()
            took = pages[0].evaluate(CLICK, "long")
            if took is None:
                raise TimeoutError(f"a run of {LONG_STEPS:,} steps did not open within {OPEN_MS / 1000:.0f} s")
            found["long_run_open_s"] = round(took, 3)
        finally:
            browser.close()
    return found


def _open(browser: Any, url: str, number: int) -> Any:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(f"{url}/?run=watched-{number:02d}&token={load()}", timeout=OPEN_MS)
    page.locator(".hp-main-chart").wait_for(timeout=OPEN_MS)
    return page


def busy_percent(server: psutil.Process, seconds: float, settle_s: float = SETTLE_S) -> float:
    """How much of a core the server uses for so many seconds, after settle_s."""
    time.sleep(settle_s)
    began, before = time.monotonic(), server.cpu_times()
    time.sleep(seconds)
    took, after = time.monotonic() - began, server.cpu_times()
    return round(100 * (after.user + after.system - before.user - before.system) / took, 2)


if __name__ == "__main__":
    grow(Path(sys.argv[1]))
