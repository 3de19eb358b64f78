"""Deadlines and the exit after a crash: a process that would wait for ever exits with its code and its reason."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import children
import pytest
from monitor_helpers import wait_for

from guards.heartbeat import path_of, read

PRELUDE = """
import threading, time, concurrent.futures
from guards import crash, deadline
from guards.heartbeat import Heartbeat
hb = Heartbeat.from_env()
crash.install(hb)
deadline.record_in = hb
hb.phase("load")
"""


ENDS = {  # code; its exit status, words of its standard error, the outcome and the note in its record
    "a deadline, while the main thread waits in C": (
        PRELUDE + "with deadline.Deadline(0.5, 'a lock that nobody frees'), deadline.Deadline(30, 'an inner one'):\n"
        "    lock = threading.Lock(); lock.acquire(); lock.acquire()",
        (75, ("waited 0.5 s for a lock that nobody frees", "Thread 0x")),
        ("deadline", "waited 0.5 s for a lock that nobody frees"),
    ),
    "an uncaught error, although a pool thread is stuck": (
        PRELUDE + "pool = concurrent.futures.ThreadPoolExecutor(1)\npool.submit(threading.Event().wait)\n"
        "raise ValueError('the reason')",
        (1, ("ValueError: the reason",)),
        ("failed", "ValueError: the reason"),
    ),
    "an error that is printed while a worker dies": (  # torch's handler raises wherever the main thread is
        "import signal, sys\n"
        "def dead(*_): raise RuntimeError('a worker is gone')\n"
        "def show(kind, error, trace):\n    signal.raise_signal(signal.SIGCHLD)\n    print('shown:', error, file=sys.stderr)\n"
        "sys.excepthook = show\n" + PRELUDE + "signal.signal(signal.SIGCHLD, dead)\nraise ValueError('the reason')",
        (1, ("shown: the reason",)),
        ("failed", "ValueError: the reason"),
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_it_ends_a_process_with_its_code_its_reason_and_its_record(tmp_path, what):
    code, (status, words), recorded = ENDS[what]
    done = children.run(code, HANGPROOF_HEARTBEAT=tmp_path)
    assert done.returncode == status
    assert all(said in done.stderr for said in words) and "a worker is gone" not in done.stderr
    beat = read(path_of(tmp_path, 0))
    assert (beat.phase, beat.outcome, beat.note) == ("load", *recorded)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_log_that_its_disk_does_not_take_costs_lines_and_no_step(tmp_path):
    code = PRELUDE + "import sys\nprint('1/9', flush=True)\nsys.stderr.write('2/9')\nsys.stderr.flush()\nhb.end('done')"
    with open("/dev/full", "wb") as full:
        command, env = [sys.executable, "-c", code], children.environment(HANGPROOF_HEARTBEAT=tmp_path)
        assert subprocess.run(command, env=env, stdout=full, stderr=full, timeout=240, check=False).returncode == 0
    assert read(path_of(tmp_path, 0)).outcome == "done"


@pytest.mark.slow
def test_a_deadline_kills_a_process_whose_standard_error_nobody_reads(tmp_path):
    """Standard error is a pipe that is full: every write to it waits for ever."""
    code = PRELUDE + (
        "\nimport os\nos.set_blocking(2, False)\n"
        "try:\n    while True: os.write(2, b'x' * 4096)\nexcept BlockingIOError: pass\nos.set_blocking(2, True)\n"
        "with deadline.Deadline(0.5, 'a reader'): time.sleep(600)\n"
    )
    env = children.environment(HANGPROOF_HEARTBEAT=tmp_path)
    with subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE) as process:
        assert process.wait(240) == 75
        process.stderr.close()
    assert read(path_of(tmp_path, 0)).note == "waited 0.5 s for a reader"


def test_a_sigterm_while_a_child_is_forked_requests_a_save_and_ends_the_child_that_it_is_for(tmp_path):
    code = f"""import os, signal
own = [signal.SIGTERM]
os.register_at_fork(before=lambda: own and os.kill(os.getpid(), own.pop()))  # after those registered later
{PRELUDE}
def forked():
    pid = os.fork()
    if not pid:
        threading.Event().wait()
    os.kill(pid, signal.SIGTERM)
    return os.waitpid(pid, 0)[1]
hb.step(1)
print({{forked() for _ in range(50)}}, hb.request, len(own))
"""
    done = children.run(code, HANGPROOF_HEARTBEAT=tmp_path)
    assert done.stdout == "{15} 1 0\n", (done.returncode, done.stderr)


@pytest.mark.parametrize(("steps", "said"), [(0, ""), (1, "1 running\n")])
def test_a_sigterm_before_the_first_step_and_a_second_one_end_the_process(tmp_path, steps, said):
    code = (
        PRELUDE
        + """import os, signal, sys
os.kill(os.getpid(), signal.SIGHUP)  # a terminal closes: the monitor decides
for _ in range(int(sys.argv[1])): hb.step(1)
os.kill(os.getpid(), signal.SIGTERM)
print(hb.request, "running", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still running", flush=True)
"""
    )
    done = children.run(code, steps, HANGPROOF_HEARTBEAT=tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, said)
    assert done.stderr.count("SIGTERM: saving a state at the next step boundary") == steps


WORKER = """
import os, time
from guards import loader
def work(ready, done):
    loader.die_with_parent()
    ready.send(os.getpid())
    done.wait(600)
    ready.send("works")
    time.sleep(600)
"""
KILL = "os.kill(os.getpid(), 9)"
STOP = "worker.terminate(); worker.join(60); crash.exit_now(1 if worker.exitcode == 0 else 2)"
OTHERS = [("spawn", KILL), ("forkserver", KILL), ("fork", "crash.exit_now(1)"), ("fork", STOP), ("forkserver", STOP)]
START = f"""{PRELUDE}
import multiprocessing, os, subprocess, sys
import a_worker
context = multiprocessing.get_context(sys.argv[1])
here, there = context.Pipe()
done = context.Event()
worker = context.Process(target=a_worker.work, args=(there, done), daemon=True)
worker.start()
there.close()
print(here.recv(), flush=True)
time.sleep(0.2)
subprocess.run(["kill", str(worker.pid)], check=True)  # the machine shuts down: the trainer gets it as well, and saves
time.sleep(0.2)
done.set()
print(here.recv(), flush=True)
exec(sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child at its parent's death")
@pytest.mark.parametrize("method, how", [pytest.param("fork", KILL, marks=pytest.mark.journey), *OTHERS])
def test_a_loader_worker_works_through_a_sigterm_of_others_and_does_not_outlive_its_trainer(tmp_path, method, how):
    """Python 3.14 starts workers by a fork server. Each worker saw a parent that is not the trainer, and exited."""
    (tmp_path / "a_worker.py").write_text(WORKER)
    # It returns only when the worker has closed the output, too.
    path = f"{children.ROOT}{os.pathsep}{tmp_path}"
    done = children.run(START, method, how, PYTHONPATH=path, HANGPROOF_HEARTBEAT=tmp_path)
    assert done.returncode in (-9, 1)
    assert done.stdout.splitlines()[1:] == ["works"], done.stderr
    pid = int(done.stdout.splitlines()[0])
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 60, "the worker's end")


def test_stacks_are_written_on_the_signal_even_while_main_holds_the_gil(tmp_path):
    code = PRELUDE + "\nprint('ready', flush=True)\nimport re\ndef spin(): re.match(r'(a+)+$', 'a' * 40 + 'b')\nspin()"
    process = children.start(code, HANGPROOF_HEARTBEAT=tmp_path)
    try:
        assert process.stdout.readline() == "ready\n"
        path, end = tmp_path / f"stacks-{process.pid}.txt", time.monotonic() + 120
        while "spin" not in path.read_text() and time.monotonic() < end:
            process.send_signal(signal.SIGUSR2)
            time.sleep(0.1)
        assert "in spin" in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600, "nobody else may read it"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_deadline_that_was_met_kills_nobody(tmp_path):
    """Nested, on threads, with errors, in a child forked inside one."""
    code = PRELUDE + (
        "import os\n"
        "with deadline.Deadline(3, 'outer'):\n"
        "    for _ in range(100):\n"
        "        with deadline.Deadline(3, 'inner'): pass\n"
        "    try:\n        with deadline.Deadline(3, 'an error'): raise KeyError\n"
        "    except KeyError: pass\n"
        "def work():\n    with deadline.Deadline(3, 'a thread'): pass\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "for t in threads: t.start()\nfor t in threads: t.join()\n"
        "fired = []\n"
        "with deadline.Deadline(0.1, 'an action', lambda *_: fired.append(1)):\n    while not fired: time.sleep(0.01)\n"
        "with deadline.Deadline(30, 'the parent of a child'):\n    child = os.fork()\n"
        "if child == 0: time.sleep(3.5); os._exit(0)\n"
        "time.sleep(3.5)\nassert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\nprint('alive')\n"
    )
    done = children.run(code, HANGPROOF_HEARTBEAT=tmp_path)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
