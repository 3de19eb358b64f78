"""How soon the page answers after the command, and in how much memory; beside it a bare Gradio page on the same machine.

Ours and the bare one take turns, so that whatever else the machine does hits both. The time is that of a person: from
starting the process to the whole first page in hand. Exit code 1 where a server does not come up or a limit is exceeded;
where the bare page is slower than it is on two free cores, the machine is busy, and the limit is stretched as much.
"""

import argparse
import contextlib
import json
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

from benchmarks.goodput import machine

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60  # seconds after which a start counts as failed
FIRST_PAGE_LIMIT_S = 3.5  # the median, on two free cores
BARE_S = 2.8  # there the bare page needs no longer
MEMORY_LIMIT_MB = 250.0
BARE = """
import sys, gradio as gr
with gr.Blocks(analytics_enabled=False) as page:
    gr.Markdown("hello")
page.launch(server_port=int(sys.argv[1]), quiet=True, ssr_mode=False)
"""


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(command: list[str], port: int, env: dict[str, str]) -> dict[str, float]:
    """Start a server, fetch its page, end it: {first_page_s, cpu_s, rss_mb, page_kb}.

    Raises:
        TimeoutError: no page within LIMIT_S; ChildProcessError: the server ended.
    """
    import psutil

    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        page = _fetch(process, f"http://127.0.0.1:{port}/", began)
        seconds = time.monotonic() - began
        seen = psutil.Process(process.pid)
        times = seen.cpu_times()
        return {
            "first_page_s": round(seconds, 3),
            "cpu_s": round(times.user + times.system, 3),
            "rss_mb": round(seen.memory_info().rss / 2**20, 1),
            "page_kb": round(len(page) / 1000, 1),
        }
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _fetch(process: subprocess.Popen, address: str, began: float) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() - began < LIMIT_S:
        if process.poll() is not None:
            raise ChildProcessError(f"{process.args[:2]} ended with code {process.returncode} before it served a page")
        try:
            with opener.open(address, timeout=LIMIT_S) as reply:
                return reply.read()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.01)
    raise TimeoutError(f"no page from {address} within {LIMIT_S} s")


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and judge against the limits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks ui", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="starts of each (5)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    ours: list[dict] = []
    bare: list[dict] = []
    with tempfile.TemporaryDirectory() as place:
        env = {**os.environ, "HANGPROOF_DATA": place, "GRADIO_ANALYTICS_ENABLED": "False"}
        for _ in range(args.repeats):
            try:
                port = free_port()
                ours.append(measure([sys.executable, "app.py", "--port", str(port), "--no-browser"], port, env))
                port = free_port()
                bare.append(measure([sys.executable, "-c", BARE, str(port)], port, env))
            except (TimeoutError, ChildProcessError) as error:
                print(f"benchmarks ui: {error}", file=sys.stderr)
                return 1
    for name, rows in (("Hangproof", ours), ("bare Gradio", bare)):
        print(f"{name:12} {_line(rows)}")
    summary, plain, exceeded = _summary(ours), _summary(bare), []
    limit_s = round(FIRST_PAGE_LIMIT_S * max(1.0, plain["first_page_s"] / BARE_S), 2)
    if summary["first_page_s"] > limit_s:
        exceeded.append(f"the first page came after {summary['first_page_s']} s, the limit is {limit_s:g}")
    if summary["rss_mb"] > MEMORY_LIMIT_MB:
        exceeded.append(f"the page's server takes {summary['rss_mb']} MB, the limit is {MEMORY_LIMIT_MB:g}")
    for line in exceeded:
        print(f"benchmarks ui: {line}", file=sys.stderr)
    if args.json:
        limits = {"first_page_s": limit_s, "first_page_s_on_free_cores": FIRST_PAGE_LIMIT_S, "rss_mb": MEMORY_LIMIT_MB}
        said = {"ours": summary, "bare_gradio": plain, "starts": ours, "machine": machine(), "limits": limits}
        print(json.dumps({**said, "ok": not exceeded, "exceeded": exceeded}))
    return 1 if exceeded else 0


def _summary(rows: list[dict]) -> dict[str, float]:
    seconds = [row["first_page_s"] for row in rows]
    return {
        "first_page_s": round(statistics.median(seconds), 3),
        "first_page_max_s": max(seconds),
        "cpu_s": round(statistics.median(row["cpu_s"] for row in rows), 3),
        "rss_mb": max(row["rss_mb"] for row in rows),
        "page_kb": rows[0]["page_kb"],
    }


def _line(rows: list[dict]) -> str:
    s = _summary(rows)
    return f"first page {s['first_page_s']:.2f} s (slowest {s['first_page_max_s']:.2f} s), {s['rss_mb']:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
