"""The gate of a standby attempt: what waits there touches nothing, costs nothing, and ends when nobody needs it."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from monitor_helpers import wait_for

from benchmarks import toy_loop
from guards import gate
from guards.heartbeat import Heartbeat
from monitor.resume.next_attempt import message

LIMIT_S = 120


@pytest.fixture
def waiting(tmp_path):
    """A toy training that was started early."""
    output, private = tmp_path / "output", tmp_path / "private"
    output.mkdir()
    private.mkdir()
    reader, writer = os.pipe()
    flags = ["--output_dir", str(output), "--output_name", "toy", "--max_train_steps", "6"]
    flags += ["--save_every_n_steps", "3", "--resume", str(output / "STAND-IN")]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HANGPROOF_", "TOY_"))}
    env |= {gate.VARIABLE: str(reader), gate.FOLDER: str(private), gate.STAND_IN: str(output / "STAND-IN")}
    env |= {"TOY_STEP_S": "0.001", "TOY_LEDGER": str(tmp_path / "ledger")}
    with open(private / "out", "wb") as out:
        command = [sys.executable, toy_loop.__file__, *flags]
        where = {"cwd": Path(toy_loop.__file__).parents[1], "stdout": out, "stderr": out}
        process = subprocess.Popen(command, env=env, pass_fds=[reader], **where)
    os.close(reader)
    files = {"ledger": tmp_path / "ledger", "log": tmp_path / "training.log", "ready": private / gate.READY}
    yield SimpleNamespace(output=output, private=private, process=process, writer=writer, **files)
    with contextlib.suppress(OSError):
        os.close(writer)
    process.kill()
    process.wait(LIMIT_S)


def test_it_touches_nothing_until_the_gate_opens_and_then_resumes_from_the_state_in_the_message(waiting):
    """With the variables and the log of the message. Before, it uses no processor time."""
    wait_for(waiting.ready.exists, LIMIT_S)
    time.sleep(0.2)
    process = psutil.Process(waiting.process.pid)
    before = process.cpu_times()
    time.sleep(1.5)
    assert process.cpu_times()[:2] == before[:2]
    assert not list(waiting.output.iterdir()) and not waiting.ledger.exists()
    assert not list(waiting.private.glob("*.hb")), "it has no heartbeat"
    content = toy_loop.advance(toy_loop.advance(toy_loop.advance(b"", 1), 2), 3)
    toy_loop.save(waiting.output, "toy", 3, content, Heartbeat(None))
    state = waiting.output / "toy-step00000003-state"
    waiting.log.write_text("before\n")
    os.write(waiting.writer, message(str(state), {"TOY_FAULTS": "", "TOY_LATE": "1"}, str(waiting.log)))
    assert waiting.process.wait(LIMIT_S) == 0, waiting.log.read_text()
    assert (waiting.private / gate.PASSED).exists()
    assert (waiting.output / "toy.safetensors").read_bytes() == toy_loop.expected(6)
    lines = map(json.loads, waiting.ledger.read_text().splitlines())
    assert [line["step"] for line in lines if line["what"] == "step"] == [4, 5, 6]
    assert waiting.log.read_text().startswith("before\n")


@pytest.mark.parametrize("sent", [b"", b'{"resume": "/x", "env'], ids=["gone", "died in the middle of its message"])
def test_it_ends_quietly_when_the_monitor_is_gone(waiting, sent):
    if not sent:
        wait_for(waiting.ready.exists, LIMIT_S)
    os.write(waiting.writer, sent)  # the second one while it still imports
    os.close(waiting.writer)
    assert waiting.process.wait(LIMIT_S) == gate.EXIT_UNUSED
    assert not list(waiting.output.iterdir()) and not waiting.ledger.exists()
    assert sent or not waiting.private.exists()
