"""What one process is said to do and to wait for."""

import dataclasses
import os
import signal
import sys

import pytest
from proc_helpers import linux
from ui_page import until

from monitor.cli import explain
from monitor.process import platform
from monitor.run_folder import MonitorError


@pytest.mark.parametrize("pid", ["x" * 5000, "-1", "9" * 30, "٣", 1.5, None, b"1", [1], 1 << 22])
def test_what_is_no_number_of_a_process_is_refused(pid):
    with pytest.raises(MonitorError, match=r"^.{1,50} is no process number of yours"):
        explain.checked(pid)


def says(pid: int, words: str) -> None:
    until(lambda: words in explain.facts(explain.checked(pid))["text"], f"{words} is said", 10)


@linux
def test_a_dead_lock_a_read_and_a_stop_are_explained(spawn):
    code = "import sys, threading; lock = threading.Lock(); lock.acquire(); print('r', flush=True)\n"
    pipe = "import os; r, w = os.pipe(); print('r', flush=True); os.read(r, 1)"
    for program, words in ((code + "lock.acquire()", "for a lock"), (pipe, "pipe")):
        process = spawn(sys.executable, "-c", program)
        assert process.stdout.readline()
        says(process.pid, words)
        process.send_signal(signal.SIGSTOP)
        says(process.pid, "is stopped by a signal")


def test_a_process_in_the_kernel_is_out_of_reach_of_signals(monkeypatch):
    mine = platform.process_info(os.getpid())
    for state, words in (("D", "where no signal reaches it"), ("S", "")):
        text = explain.facts(dataclasses.replace(mine, state=state))["text"]
        assert ("no signal" in text) == bool(words) and text.endswith(words), text
