"""Shared by the page's tests: a real server process, the browser, photographs and hand-made run folders."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from nursery import Forked, Nursery

from monitor.process.platform import LOCK, Lock
from ui.token import bearer, cookie_value

PROJECT = Path(__file__).resolve().parents[2]
BROWSERS = "chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable"
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"


def photos(*names: str) -> list[Path]:
    """Real photographs from scikit-image's wheel."""
    import skimage.data

    folder = Path(skimage.data.__file__).parent
    return [folder / name for name in names]


def alone(folder: Path) -> dict[str, str]:
    """Variables for a server that finds no GPU and no token, whatever this machine has."""
    return {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "hf"), "HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": ""}


def free_port() -> int:
    """An unused port below the range that the system assigns to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """`python app.py` as a process with its own data folder and its own token.

    Requests of tests carry the token, and browsers the cookie (`browsing`), unless the page has a login. The process is
    forked from one that has the imports done (page_nursery.py); with `fresh` it is an interpreter of its own.
    """

    started: ClassVar[dict[str, "Server"]] = {}  # the newest of each address
    nursery: ClassVar[Nursery | None] = None

    def __init__(self, data: Path, *arguments: str, port: int | None = None, fresh: bool = False, **env: str):
        self.data, self.port = data, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = Path(env.get("XDG_CONFIG_HOME", data.parent / "config"))
        self.sends_token = not ({"--auth", "--no-token"} & {*arguments} or "HANGPROOF_AUTH" in env)
        Server.started[self.url] = self
        self.log = data.parent / f"app-{self.port}-{time.monotonic_ns()}.log"
        self.log.touch()
        argv = ["--port", str(self.port), "--no-browser", *arguments]
        environment = {**os.environ, "HANGPROOF_DATA": str(data), "XDG_CONFIG_HOME": str(self.config), **env}
        self.process: subprocess.Popen[bytes] | Forked
        if fresh or not hasattr(os, "fork"):
            command = [sys.executable, "app.py", *argv]
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
            with self.log.open("ab") as output:
                self.process = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=output, **pipes)
            return
        if Server.nursery is None:
            command = [sys.executable, str(PROJECT / "tests/support/page_nursery.py")]
            kept = {name: value for name, value in os.environ.items() if not name.startswith("HANGPROOF_")}  # kill_runs
            Server.nursery = Nursery(command, kept, PROJECT)
        self.process = Server.nursery.start(argv, environment, self.log, self.log)

    def wait(self) -> None:
        """Wait until it says that it runs; fails with its output when it exits or takes 200 seconds."""
        until = time.monotonic() + 200
        while "Hangproof is running at" not in (output := self.log.read_text("utf-8", "replace")):
            assert self.process.poll() is None and time.monotonic() < until, f"the server does not run: {output}"
            time.sleep(0.02)

    @property
    def token(self) -> str:
        """The token in the file of this server's account."""
        return (self.config / "hangproof" / "token").read_text()

    @property
    def headers(self) -> dict[str, str]:
        """What a program sends; nothing where the page has a login or is open to all."""
        return bearer(self.token) if self.sends_token else {}

    def cookie(self) -> dict[str, str] | None:
        """What a browser has after it opened the printed address."""
        if not self.sends_token:
            return None
        return {"name": f"hangproof-{self.port}", "value": cookie_value(self.token), "url": self.url}

    def ask(self, method: str, path: str, body=None, source: str = "127.0.0.1", **headers: str):
        """(status, headers, body) of a request, with the token where there is no login; a header's `_` stands for `-`."""
        named = {key.replace("_", "-"): value for key, value in {**self.headers, **headers}.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120, source_address=(source, 0))
        with contextlib.closing(connection):
            connection.request(method, path, body, named)
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        """(status, body) of a GET."""
        status, _, body = self.ask("GET", path, **headers)
        return status, body

    def stop(self, hard: bool = False) -> int:
        """Stop it, with SIGKILL when `hard`. Returns its exit code."""
        if self.process.poll() is None:
            self.process.kill() if hard else self.process.terminate()
        return self.process.wait(120)


@contextlib.contextmanager
def serving(data: Path, *arguments: str, port: int | None = None, fresh: bool = False, **env: str) -> Iterator[Server]:
    data.mkdir(exist_ok=True)
    server = Server(data, *arguments, port=port, fresh=fresh, **env)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture
def runs_data(tmp_path, monkeypatch):
    """A data folder of its own, for this process too; what runs in it is killed at the end."""
    root = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    yield root
    (root / "outputs" / ".queue.json").unlink(missing_ok=True)
    kill_runs(root)


def kill_runs(data: Path) -> None:
    """Kill all processes of the runs in a data folder; each has the folder's path in its environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("HANGPROOF_DATA") == str(data):
                process.kill()


@contextlib.contextmanager
def browsing() -> Iterator:
    """A real browser, which has the cookie of each server of this process; skips the test when none is found.

    It is the one that test.sh found, else one on PATH, else Playwright's own.
    """
    from playwright.sync_api import Page, sync_playwright

    goto, names = Page.goto, (os.environ.get("CHROMIUM"), *BROWSERS.split())
    path = next(filter(None, (shutil.which(name) for name in names if name)), None)

    def goto_with_cookie(page: Page, url: str, **options: Any) -> Any:
        give_cookie(page.context, url)
        return goto(page, url, **options)

    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        patch.setattr(Page, "goto", goto_with_cookie)
        if not os.path.exists(path or playwright.chromium.executable_path):
            pytest.skip("no Chromium, Chrome or Playwright browser found: the browser tests are skipped")
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS.split(), "--disable-component-update"])
        loop = asyncio._get_running_loop()
        try:
            yield browser
        finally:
            asyncio._set_running_loop(loop)  # see without_its_loop
            browser.close()


@contextlib.contextmanager
def without_its_loop() -> Iterator[None]:
    """Playwright's event loop counts as running in this thread while there is a browser. Others start their own."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop if loop is not None and loop.is_running() else None)


def give_cookie(context: Any, url: str) -> None:
    """Give a browser context the cookie of the server that an address belongs to."""
    server = Server.started.get("/".join(url.partition("?")[0].split("/")[:3]))
    with contextlib.suppress(FileNotFoundError):  # it has not started yet, and the request fails
        if server is not None and (cookie := server.cookie()):
            context.add_cookies([cookie])


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of a given size; skips the test where it cannot be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("a small file system cannot be mounted here: no mount command")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], timeout=120, check=False)


def write_run(data: Path, name: str = "my run", state: str = "running", **status) -> Path:
    """Write a run's folder as the monitor writes it."""
    import runs

    slug = runs.slug(name)
    folder = data / "outputs" / slug
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f"name = {json.dumps(name)}\n", encoding="utf-8")
    now = {"version": 1, "name": name, "state": state, "phase": "step", "step": 40, "planned_steps": 100, **status}
    (folder / "status.json").write_text(json.dumps(now), encoding="utf-8")
    return folder


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Path]:
    """A run that looks as if its monitor were alive: the lock of the monitor is held."""
    lock = Lock(folder / LOCK)
    assert lock.acquire()
    try:
        yield folder
    finally:
        lock.release()


def write_history(folder: Path, price: float = 0.0) -> None:
    """The ledger of a run that hung once, in its `status.json`."""
    seconds = {"training": 925.0, "loading": 60.0, "waiting": 0.0, "recovering": 40.0, "lost": 75.0}
    steps = {"steps": 100, "repeated": 10, "kept_steps": 30, "made_steps": 110, "failures": 1, "recovered": 1}
    path = folder / "status.json"
    ledger = {"seconds": seconds, **steps, "made_s": 940.0, "price_per_hour": price}
    path.write_text(json.dumps({**json.loads(path.read_text()), "ledger": ledger}))


def a_run(data: Path, name: str, rate: float, rank: int = 8, **extra) -> Path:
    """A run that can be compared with others: settings, losses, a GPU's samples and one image."""
    from PIL import Image

    status = {"planned_steps": 60, "step": 60, "loss": rate * 100, "restarts": 1, "step_s": 0.5}
    folder = write_run(data, name, state="completed", **status)
    lines = [f"name = {json.dumps(name)}", f"learning_rate = {rate}", f"rank = {rank}", 'model = "tiny"', "[extra]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in extra.items()]
    (folder / "run.toml").write_text("\n".join(lines) + "\n")
    step = {"kind": "step", "attempt": 1, "lr": rate, "step_s": 0.5}
    gpu = {"kind": "gpu", "t": "2026-11-22T12:00:05Z", "gpu": 0, "memory_total": 24e9}
    found = [{**gpu, "memory_used": used} for used in (7e9, rank * 1e9)]
    for n in range(1, 61):
        found.append({**step, "t": f"2026-11-22T12:00:{n % 60:02d}.000Z", "step": n, "loss": rate * 100 / n})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    (folder / "sample_prompts.txt").write_text("a cat --w 64\n")
    (folder / "sample").mkdir()
    for step in (20, 60):
        path = folder / "sample" / f"{folder.name}_{step:06d}_00_20261122120000.png"
        Image.new("RGB", (32, 32), (rank, step, 9)).save(path)
    return folder


def write_incident(folder: Path, number: str = "0001", report: str = "# Hang", **fields) -> Path:
    path = folder / "incidents" / number
    path.mkdir(parents=True)
    known = {"kind": "hang", "cause": "loader_worker_stuck", "phase": "step", "step": 41, "recover_s": None}
    (path / "incident.json").write_text(json.dumps({"id": number, **known, **fields}), encoding="utf-8")
    (path / "report.md").write_text(report, encoding="utf-8")
    return path


def metrics_line(step: int, loss: float | None = 0.5, attempt: int = 1, second: float = 0.0) -> str:
    """A line of metrics.jsonl."""
    t = f"2026-11-22T12:{int(second) // 60:02d}:{second % 60:06.3f}Z"
    values = {"kind": "step", "t": t, "attempt": attempt, "step": step, "loss": loss, "lr": 1e-4, "step_s": 1.0}
    return json.dumps(values) + "\n"


PACED = {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_PACE_S": "0.75"}  # a slow training


def lora_file(path: Path, step: int | None = None, epoch: int | None = None, values: int = 64) -> Path:
    """Write a small LoRA with sd-scripts' metadata."""
    import numpy
    from safetensors.numpy import save_file

    metadata = {key: str(value) for key, value in (("ss_steps", step), ("ss_epoch", epoch)) if value is not None}
    save_file({"lora_down.weight": numpy.ones(values, numpy.float32)}, path, metadata)
    return path
