"""How fast the page answers after the command, and what it weighs, beside a bare Gradio page on the same machine.

Ours and the bare page start in pairs, one right after the other, so that other programs affect both; which is first
alternates. The time is a user's: from the start of the process to the complete first page. The limit is on the median of
the pairs' ratios, because seconds depend on the machine. CPU seconds depend less on its load.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from benchmarks import ui_runs
from benchmarks.report import CannotMeasure, Report
from ui.token import bearer, load

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60  # seconds after which a start counts as failed
LIMITS = {
    "first_page_ratio": 1.15,
    "config_kb": 110.0,
    "config_10000_images_kb": 110.0,
    "rss_mb": 250.0,
    "idle_percent_of_core": 1.0,
    "watched_percent_of_core": 5.0,
    "long_run_open_s": 1.0,
}
SETTLE_S = 2.0  # after the first page, before the idle server is measured
EXCEEDED = {
    "first_page_ratio": "the first page takes {value:g} x as long as a bare Gradio page, the limit is {limit:g} x",
    "config_kb": "the config that each visit downloads has {value:g} KB, the limit is {limit:g} KB",
    "config_10000_images_kb": "with 10,000 images the config has {value:g} KB, the limit is {limit:g} KB",
    "rss_mb": "the page's server uses {value:g} MB, the limit is {limit:g} MB",
    "idle_percent_of_core": "an idle server uses {value:g} % of a core, the limit is {limit:g} %",
    "watched_percent_of_core": "20 runs that train, one of them watched, take {value:g} % of a core, the limit is {limit:g} %",
    "long_run_open_s": "a run of 100,000 logged steps opens in {value:g} s, the limit is {limit:g} s",
}
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


def one_start(command: list[str], port: int, env: dict[str, str], idle_s: float = 0.0) -> dict[str, float]:
    """Start a server, fetch its page, stop it: {first_page_s, cpu_s, rss_mb, page_kb, config_kb}.

    idle_s: then also leave it alone for so many seconds: {idle_percent_of_core}.

    Raises:
        TimeoutError: no page within LIMIT_S; ChildProcessError: the server ended.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        page = _fetch(process, f"http://127.0.0.1:{port}/", began)
        seconds = time.monotonic() - began
        seen = psutil.Process(process.pid)
        times, rss = seen.cpu_times(), seen.memory_info().rss
        config = _fetch(process, f"http://127.0.0.1:{port}/config", began)
        idle = {"idle_percent_of_core": ui_runs.busy_percent(seen, idle_s, SETTLE_S)} if idle_s else {}
        return {
            "first_page_s": round(seconds, 3),
            "cpu_s": round(times.user + times.system, 3),
            "rss_mb": round(rss / 2**20, 1),
            "page_kb": round(len(page) / 1000, 1),
            "config_kb": round(len(config) / 1000, 1),
            **idle,
        }
    finally:
        _stop(process)


def measure_runs(data: Path, seconds: float) -> dict[str, float]:
    """What the page costs while runs train, and how fast a long one opens (benchmarks/ui_runs.py).

    Raises:
        TimeoutError: a page does not open; ChildProcessError: the server ended.
    """
    port = free_port()
    env = {**os.environ, "HANGPROOF_DATA": str(data)}
    with ui_runs.growing(data):
        command = [sys.executable, "app.py", "--port", str(port), "--no-browser"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _fetch(process, f"http://127.0.0.1:{port}/", time.monotonic())
            found = ui_runs.measure(f"http://127.0.0.1:{port}", process.pid, seconds)
            config = _fetch(process, f"http://127.0.0.1:{port}/config", time.monotonic())
            return {**found, "config_10000_images_kb": round(len(config) / 1000, 1)}
        finally:
            _stop(process)


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()


def _fetch(process: subprocess.Popen, address: str, began: float) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() - began < LIMIT_S:
        if process.poll() is not None:
            raise ChildProcessError(f"the server ended with code {process.returncode} before it served a page")
        try:
            with opener.open(urllib.request.Request(address, headers=bearer(load())), timeout=LIMIT_S) as reply:
                return reply.read()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.01)
    raise TimeoutError(f"no page from {address} within {LIMIT_S} s")


def _ratios(rows: dict[str, list[dict[str, float]]], key: str) -> list[float]:
    """Ours divided by the bare page, for each pair of starts."""
    return [one[key] / other[key] for one, other in zip(rows["ours"], rows["bare_gradio"], strict=True)]


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    seconds = [row["first_page_s"] for row in rows]
    return {
        "first_page_s": round(statistics.median(seconds), 3),
        "first_page_max_s": max(seconds),
        "cpu_s": round(statistics.median(row["cpu_s"] for row in rows), 3),
        "rss_mb": max(row["rss_mb"] for row in rows),
        "page_kb": rows[0]["page_kb"],
        "config_kb": rows[0]["config_kb"],
        "idle_percent_of_core": rows[0].get("idle_percent_of_core", 0.0),
    }


def _line(s: dict[str, float]) -> str:
    return (
        f"first page {s['first_page_s']:.2f} s (slowest {s['first_page_max_s']:.2f} s), CPU {s['cpu_s']:.2f} s, "
        f"{s['rss_mb']:.0f} MB, config {s['config_kb']:.0f} KB, idle {s['idle_percent_of_core']:g} % of a core"
    )


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--repeats", type=int, default=5, help="starts of each (5)")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="how long the idle server is measured (10)")
    parser.add_argument(
        "--watch-seconds", type=float, default=20.0, help="each number of pages is watched so long (20)"
    )


def measure(args: argparse.Namespace) -> Report:
    """Starts in pairs, an idle server, and runs that are watched."""
    rows: dict[str, list[dict[str, float]]] = {"ours": [], "bare_gradio": []}
    commands = {
        "ours": lambda port: [sys.executable, "app.py", "--port", str(port), "--no-browser"],
        "bare_gradio": lambda port: [sys.executable, "-c", BARE, str(port)],
    }
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "HANGPROOF_DATA": folder, "GRADIO_ANALYTICS_ENABLED": "False"}
        try:
            for repeat in range(args.repeats):
                for name in list(commands)[:: 1 if repeat % 2 else -1]:
                    port = free_port()
                    idle_s = 0.0 if repeat else args.idle_seconds
                    rows[name].append(one_start(commands[name](port), port, env, idle_s))
            watched = measure_runs(Path(folder) / "runs", args.watch_seconds)
        except (TimeoutError, ChildProcessError) as error:
            raise CannotMeasure(str(error)) from error
    ours, bare = _summary(rows["ours"]), _summary(rows["bare_gradio"])
    ratios = {
        f"{short}_ratio": round(statistics.median(_ratios(rows, key)), 3)
        for short, key in (("first_page", "first_page_s"), ("cpu", "cpu_s"))
    }
    values = {**ours, **ratios, **watched}
    exceeded = [
        EXCEEDED[key].format(value=values[key], limit=limit) for key, limit in LIMITS.items() if values[key] > limit
    ]
    figures = {"ours": ours, "bare_gradio": bare, **ratios, **watched, "starts": rows, "limits": LIMITS}
    return Report(figures, exceeded)
