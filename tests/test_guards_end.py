"""Deadlines and the crash exit: processes that wait for ever are gone, with the right code and the reason in their log."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from guards import deadline
from guards.heartbeat import path_of, read

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, heartbeat_folder, timeout_s: float = 240) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HANGPROOF_HEARTBEAT": str(heartbeat_folder)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


PRELUDE = """
import threading, time, concurrent.futures
from guards import crash, deadline
from guards.heartbeat import Heartbeat
hb = Heartbeat.from_env()
crash.install(hb, grace_s=1)
deadline.use_heartbeat(hb)
hb.phase("load")
"""


def test_a_deadline_ends_a_process_whose_main_thread_waits_in_c(tmp_path):
    code = (
        PRELUDE
        + "with deadline.Deadline(0.5, 'a lock that nobody frees'): threading.Lock().__enter__(); l=threading.Lock(); l.acquire(); l.acquire()"
    )
    done = run(code, tmp_path)
    assert done.returncode == 75
    assert "waited 0.5 s for a lock that nobody frees" in done.stderr
    assert "Thread 0x" in done.stderr
    beat = read(path_of(tmp_path, 0))
    assert (beat.outcome, beat.phase, beat.note) == ("deadline", "load", "waited 0.5 s for a lock that nobody frees")


def test_a_deadline_ends_a_process_whose_last_words_nobody_reads(tmp_path):
    """Standard error is a pipe that is full: every write to it waits for ever."""
    code = PRELUDE + (
        "\nimport os\nos.set_blocking(2, False)\n"
        "try:\n    while True: os.write(2, b'x' * 4096)\nexcept BlockingIOError: pass\nos.set_blocking(2, True)\n"
        "with deadline.Deadline(0.5, 'a reader'): time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HANGPROOF_HEARTBEAT": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE) as process:
        assert process.wait(240) == 75
        process.stderr.close()
    assert read(path_of(tmp_path, 0)).note == "waited 0.5 s for a reader"


def test_leaving_in_time_disarms_and_nested_deadlines_keep_their_own_ends(tmp_path):
    code = PRELUDE + (
        "\nfor _ in range(200):\n    with deadline.Deadline(5, 'short'): pass\n"
        "with deadline.Deadline(30, 'outer'):\n    with deadline.Deadline(2, 'inner') as d:\n"
        "        for _ in range(4): time.sleep(0.8); d.extend()\n"
        "    time.sleep(0.5)\nprint('through', flush=True)\n"
        "with deadline.Deadline(0.3, 'outer again'):\n    with deadline.Deadline(30, 'inner again'): time.sleep(20)\n"
    )
    done = run(code, tmp_path)
    assert "through" in done.stdout
    assert done.returncode == 75
    assert "for outer again" in done.stderr and "for inner" not in done.stderr


def test_an_uncaught_error_ends_the_process_although_a_pool_thread_is_stuck(tmp_path):
    code = PRELUDE + (
        "\npool = concurrent.futures.ThreadPoolExecutor(1)\npool.submit(threading.Event().wait)\n"
        "hb.phase('sample')\nraise ValueError('the reason')"
    )
    done = run(code, tmp_path)
    assert done.returncode == 1
    assert "ValueError: the reason" in done.stderr
    assert (read(path_of(tmp_path, 0)).outcome, read(path_of(tmp_path, 0)).note) == ("failed", "ValueError: the reason")


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="no SIGCHLD here")
def test_a_worker_that_dies_while_the_error_is_printed_does_not_lose_the_error(tmp_path):
    """As torch's handler does: it raises, wherever the main thread stands."""
    code = (
        "import signal, sys\n"
        "def dead(*_): raise RuntimeError('a worker is gone')\n"
        "def show(kind, error, trace):\n    signal.raise_signal(signal.SIGCHLD)\n    print('shown:', error, file=sys.stderr)\n"
        "sys.excepthook = show\n" + PRELUDE + "signal.signal(signal.SIGCHLD, dead)\nraise ValueError('the reason')"
    )
    done = run(code, tmp_path)
    assert done.returncode == 1
    assert "shown: the reason" in done.stderr and "a worker is gone" not in done.stderr
    assert read(path_of(tmp_path, 0)).note == "ValueError: the reason"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "crash.leave(1)"])
def test_a_loader_worker_does_not_outlive_its_trainer(tmp_path, how):
    code = PRELUDE + (
        "\nimport multiprocessing, os\nfrom guards import loader\n"
        "def work(ready):\n    loader.die_with_parent()\n    ready.set()\n    time.sleep(600)\n"
        "context = multiprocessing.get_context('fork')\nready = context.Event()\n"
        "worker = context.Process(target=work, args=(ready,), daemon=True)\nworker.start()\nready.wait()\n"
        f"print(worker.pid, flush=True)\n{how}\n"
    )
    done = run(code, tmp_path)  # returns only once the worker has let go of the output, too
    assert done.returncode in (-9, 1)
    end = time.monotonic() + 60
    while Path(f"/proc/{int(done.stdout)}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_stacks_are_written_on_the_signal_even_while_main_holds_the_gil(tmp_path):
    code = PRELUDE + "\nprint('ready', flush=True)\nimport re\ndef spin(): re.match(r'(a+)+$', 'a' * 40 + 'b')\nspin()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HANGPROOF_HEARTBEAT": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        path = tmp_path / f"stacks-{process.pid}.txt"
        time.sleep(0.3)
        process.send_signal(signal.SIGUSR2)
        end = time.monotonic() + 120
        while "spin" not in path.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        assert "in spin" in path.read_text()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_call_gives_its_result_its_error_or_a_timeout():
    assert deadline.call(divmod, 7, 2, seconds=60, what="a sum") == (3, 1)
    with pytest.raises(ZeroDivisionError):
        deadline.call(divmod, 7, 0, seconds=60, what="a sum")
    with pytest.raises(TimeoutError, match="waited 0.1 s for sleep"):
        deadline.call(time.sleep, 60, seconds=0.1, what="sleep")
