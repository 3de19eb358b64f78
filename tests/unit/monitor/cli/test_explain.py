"""What one process is said to do and to wait for."""

import dataclasses
import os
import signal
import sys

from hypothesis import given, settings, strategies as st
from proc_helpers import linux
from ui_page import until

from monitor.cli import explain
from monitor.process import platform
from monitor.run_folder import MonitorError


@settings(max_examples=50)
@given(st.text(max_size=30) | st.integers() | st.floats() | st.none() | st.binary(max_size=9) | st.lists(st.integers()))
def test_no_process_number_does_harm(pid):
    mine = {process.pid for process in platform.scan().values()} if isinstance(pid, int) and 0 < pid < 5000 else set()
    try:
        found = explain.checked(pid)
    except MonitorError as error:
        assert str(error) and len(str(error)) < 300
    else:
        assert found.pid in mine or os.path.exists(f"/proc/{found.pid}")


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
