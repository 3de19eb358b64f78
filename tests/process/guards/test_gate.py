"""The gate of a standby attempt: what waits there costs nothing, and ends when nobody needs it."""

import contextlib
import os
import subprocess
import sys
import time

import children
import psutil
import pytest
from monitor_helpers import wait_for

from guards import gate
from monitor.resume.next_attempt import message

WAITS = "import os, sys; from guards import gate; print(gate.wait(sys.argv[1:]), os.environ['MORE'], gate.closed())"


@pytest.fixture
def waiting(tmp_path):
    """(A process that was started early, the monitor's end of the pipe.)"""
    (tmp_path / "private").mkdir()
    reader, writer = os.pipe()
    variables = {gate.VARIABLE: reader, gate.FOLDER: tmp_path / "private", gate.STAND_IN: "STAND-IN"}
    command = [sys.executable, "-c", WAITS, "--resume", "STAND-IN", "--seed", "1"]
    process = subprocess.Popen(command, env=children.environment(**variables), cwd=children.ROOT, pass_fds=[reader])
    os.close(reader)
    yield process, writer
    with contextlib.suppress(OSError):
        os.close(writer)
    process.kill()
    process.wait(120)


def test_it_uses_no_processor_time_until_the_gate_opens_and_then_has_what_the_message_says(waiting, tmp_path):
    process, writer = waiting
    wait_for((tmp_path / "private" / gate.READY).exists, 120)
    seen = psutil.Process(process.pid)
    wait_for(lambda: seen.status() == psutil.STATUS_SLEEPING, 120)
    before = seen.cpu_times()
    time.sleep(1.5)
    assert seen.cpu_times()[:2] == before[:2]
    log = tmp_path / "training.log"
    log.write_text("before\n")
    os.write(writer, message("/out/step3-state", {"MORE": "1"}, str(log)))
    assert process.wait(120) == 0
    assert log.read_text() == "before\n['--resume', '/out/step3-state', '--seed', '1'] 1 False\n"
    assert (tmp_path / "private" / gate.PASSED).exists()


@pytest.mark.parametrize("sent", [b"", b'{"resume": "/x", "env'], ids=["gone", "died in the middle of its message"])
def test_it_ends_quietly_when_the_monitor_is_gone(waiting, tmp_path, sent):
    process, writer = waiting
    if not sent:
        wait_for((tmp_path / "private" / gate.READY).exists, 120)
    os.write(writer, sent)  # the second one while it still imports
    os.close(writer)
    assert process.wait(120) == gate.EXIT_UNUSED and not (tmp_path / "private").exists()
