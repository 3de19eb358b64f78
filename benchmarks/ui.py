"""How fast the page answers after the command, and what it weighs, beside a bare Gradio page on the same machine.

Ours and the bare page start in pairs, one right after the other, so that other programs affect both; which is first
alternates. The time is a user's: from the start of the process to the complete first page. The limit is on the median
of the pairs' ratios, because seconds depend on the machine. CPU seconds depend less on its load.

Then WATCHED runs train: a thread holds their locks and writes what a monitor and a trainer write, each second. Their
pages are open in a real browser, and the CPU time of the server is counted, not the browser's. Last, a page opens a run
of LONG_STEPS logged steps: the time is the user's, from the click on the run to its chart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import CannotMeasure, Report
from runs.paths import ROOT
from ui.token import bearer, load

LIMIT_S = 60  # seconds after which a start counts as failed
LIMITS = {  # the limit, and the sentence where it is exceeded
    "first_page_ratio": (1.15, "the first page takes {:g} x as long as a bare Gradio page"),
    "config_kb": (104.0, "the config that each visit downloads has {:g} KB"),
    "config_10000_images_kb": (104.0, "with 10,000 images the config has {:g} KB"),
    "rss_mb": (250.0, "the page's server uses {:g} MB"),
    "idle_percent_of_core": (1.0, "an idle server uses {:g} % of a core"),
    "watched_percent_of_core": (5.0, "20 runs that train, one of them watched, take {:g} % of a core"),
    "long_run_open_s": (1.0, "a run of 100,000 logged steps opens in {:g} s"),
}
IDLE_SETTLE_S = 2.0  # after the first page, before the idle server is measured
PAGES_SETTLE_S = 6.0  # after the pages have opened
WATCHED = 20
LONG_STEPS = 100_000
HISTORY_STEPS = 3000
IMAGES = 10_000
OPEN_MS = 60_000
# From the click on a run to the picture with its chart, measured in the page: a call from outside adds its own time.
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


BARE = """
import sys, gradio as gr
with gr.Blocks(analytics_enabled=False) as page:
    gr.Markdown("hello")
page.launch(server_port=int(sys.argv[1]), quiet=True, ssr_mode=False)
"""


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def one_start(command: list[str], env: dict[str, str], idle_s: float = 0.0) -> dict[str, float]:
    """Start a server (its port is added to the command), fetch its page, stop it; what that took.

    idle_s: then also leave it alone for so many seconds.
    """
    with serving(command, env) as (process, address, seconds, page):
        seen = psutil.Process(process.pid)
        times, rss = seen.cpu_times(), seen.memory_info().rss
        config = _fetch(process, f"{address}/config")
        idle = {"idle_percent_of_core": busy_percent(seen, idle_s, IDLE_SETTLE_S)} if idle_s else {}
        return {
            "first_page_s": round(seconds, 3),
            "cpu_s": round(times.user + times.system, 3),
            "rss_mb": round(rss / 2**20, 1),
            "page_kb": round(len(page) / 1000, 1),
            "config_kb": round(len(config) / 1000, 1),
            **idle,
        }


@contextlib.contextmanager
def serving(command: list[str], env: dict[str, str]) -> Iterator[tuple[subprocess.Popen, str, float, bytes]]:
    """A server that has answered: its process, its address, after how many seconds, with which page.

    Raises:
        TimeoutError: no page within LIMIT_S; ChildProcessError: the server ended.
    """
    port, began = free_port(), time.monotonic()
    nothing: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, str(port)], cwd=ROOT, env=env, **nothing)
    try:
        page = _fetch(process, f"http://127.0.0.1:{port}/")
        yield process, f"http://127.0.0.1:{port}", time.monotonic() - began, page
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _fetch(process: subprocess.Popen, address: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ChildProcessError(f"the server ended with code {process.returncode} before it served a page")
        try:
            with opener.open(urllib.request.Request(address, headers=bearer(load())), timeout=LIMIT_S) as reply:
                return reply.read()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.01)
    raise TimeoutError(f"no page from {address} within {LIMIT_S} s")


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
    values |= {"planned_steps": 200_000, "loss": 0.123, "step_s": 1.0, "restarts": 0, "eta_s": 9999.0}
    values |= {"started_at": "2026-11-22T10:00:00.000Z", "updated_at": now, "last_progress_at": now}
    values |= {"elapsed_s": float(step), "gpus": [], "devices": []}
    path = folder / "status.json.new"
    path.write_text(json.dumps(values), encoding="utf-8")
    path.replace(folder / "status.json")


@contextlib.contextmanager
def growing(data: Path) -> Iterator[None]:
    """WATCHED runs that train, as far as files show it, and one that is long and stopped."""
    from monitor.process.platform import LOCK, Lock

    write_run(data, "long", "stopped", LONG_STEPS)
    write_images(data / "datasets" / "long")
    folders = [write_run(data, f"watched-{number:02d}", "running", HISTORY_STEPS) for number in range(WATCHED)]
    over = threading.Event()

    def grow() -> None:
        step = HISTORY_STEPS
        while not over.wait(1.0):
            step += 1
            for folder in folders:
                write_status(folder, "running", step)
                with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                    file.write(step_line(step))
                with (folder / "training.log").open("a", encoding="utf-8") as file:
                    file.write(f"\rsteps: {step}/200000 avr_loss=0.123")

    locks = [Lock(folder / LOCK) for folder in folders]
    if not all(lock.acquire() for lock in locks):
        raise ChildProcessError("a run's lock is held by another process")
    thread = threading.Thread(target=grow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for lock in locks:
            lock.release()


def browser_path() -> str | None:
    """$CHROMIUM, else a Chromium or Chrome on PATH; None: Playwright's own."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def watch(url: str, pid: int, seconds: float) -> dict[str, float]:
    """Open pages of the server `pid` at `url`; what they cost it, and how long a long run takes to open.

    Raises:
        TimeoutError: a page does not open.
    """
    from playwright.sync_api import sync_playwright

    server = psutil.Process(pid)
    found: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--disable-gpu"])
        try:
            pages = [_open(browser, url, 0)]
            found["watched_percent_of_core"] = busy_percent(server, seconds, PAGES_SETTLE_S)
            pages += [_open(browser, url, number) for number in range(1, 5)]
            found["watched_5_pages_percent_of_core"] = busy_percent(server, seconds, PAGES_SETTLE_S)
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


def busy_percent(server: psutil.Process, seconds: float, settle_s: float) -> float:
    """How much of a core the server uses for so many seconds, after settle_s."""
    time.sleep(settle_s)
    began, before = time.monotonic(), server.cpu_times()
    time.sleep(seconds)
    took, after = time.monotonic() - began, server.cpu_times()
    return round(100 * (after.user + after.system - before.user - before.system) / took, 2)


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """The first start's figures, but for times (medians, and the longest) and memory (the most)."""
    middle = {key: round(statistics.median(row[key] for row in rows), 3) for key in ("first_page_s", "cpu_s")}
    most = {"first_page_max_s": max(row["first_page_s"] for row in rows), "rss_mb": max(row["rss_mb"] for row in rows)}
    return {"idle_percent_of_core": 0.0, **rows[0], **middle, **most}


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--repeats", type=int, default=5, help="starts of each (5)")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="how long the idle server is measured (10)")
    parser.add_argument(
        "--watch-seconds", type=float, default=20.0, help="each number of pages is watched so long (20)"
    )


def measure(args: argparse.Namespace) -> Report:
    """Starts in pairs, an idle server, and runs that are watched."""
    page = [sys.executable, "app.py", "--no-browser", "--port"]
    commands = {"ours": page, "bare_gradio": [sys.executable, "-c", BARE]}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "runs"
        env = {**os.environ, "HANGPROOF_DATA": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        try:
            for repeat in range(args.repeats):
                for name in list(commands)[:: 1 if repeat % 2 else -1]:
                    rows[name].append(one_start(commands[name], env, 0.0 if repeat else args.idle_seconds))
            with growing(data), serving(page, {**env, "HANGPROOF_DATA": str(data)}) as (process, address, _, _):
                watched = watch(address, process.pid, args.watch_seconds)
                watched["config_10000_images_kb"] = round(len(_fetch(process, f"{address}/config")) / 1000, 1)
        except (TimeoutError, ChildProcessError) as error:
            raise CannotMeasure(str(error)) from error
    ours, bare = _summary(rows["ours"]), _summary(rows["bare_gradio"])
    pairs = list(zip(rows["ours"], rows["bare_gradio"], strict=True))
    ratios = {
        f"{key}_ratio": round(statistics.median(one[of] / other[of] for one, other in pairs), 3)
        for key, of in (("first_page", "first_page_s"), ("cpu", "cpu_s"))
    }
    values = {**ours, **ratios, **watched}
    exceeded = [
        f"{text.format(values[key])}, the limit is {limit:g}"
        for key, (limit, text) in LIMITS.items()
        if values[key] > limit
    ]
    return Report({"ours": ours, "bare_gradio": bare, **ratios, **watched, "starts": rows}, exceeded)
