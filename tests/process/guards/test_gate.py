"""The gate of a standby attempt: what waits there touches nothing, costs nothing, and ends when nobody needs it."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from monitor_helpers import wait_for

from benchmarks import toy_loop
from guards import gate
from guards.heartbeat import Heartbeat

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 120


class Waiting:
    """A toy training that was started early."""

    def __init__(self, folder: Path, **environment: str):
        self.output, self.private = folder / "output", folder / "private"
        self.output.mkdir()
        self.private.mkdir()
        reader, self.writer = os.pipe()
        flags = ["--output_dir", str(self.output), "--output_name", "toy", "--max_train_steps", "6"]
        flags += ["--save_every_n_steps", "3", "--resume", str(self.output / "STAND-IN")]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HANGPROOF_", "TOY_"))}
        env |= {gate.VARIABLE: str(reader), gate.FOLDER: str(self.private)}
        env |= {gate.STAND_IN: str(self.output / "STAND-IN")}
        env |= {"TOY_STEP_S": "0.001", "TOY_LEDGER": str(folder / "ledger")} | environment
        with open(self.private / "out", "wb") as out:
            command = [sys.executable, toy_loop.__file__, *flags]
            streams = {"stdout": out, "stderr": out}
            self.process = subprocess.Popen(command, env=env, pass_fds=[reader], cwd=ROOT, **streams)
        os.close(reader)
        self.ledger, self.log = folder / "ledger", folder / "training.log"

    def until(self, name: str) -> None:
        wait_for((self.private / name).exists, LIMIT_S, name)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.writer)
        self.process.kill()
        self.process.wait(LIMIT_S)


@pytest.fixture
def waiting(tmp_path):
    made = []

    def start(**environment: str) -> Waiting:
        made.append(Waiting(tmp_path, **environment))
        return made[-1]

    yield start
    for one in made:
        one.close()


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_it_touches_nothing_and_uses_no_processor_time_until_the_gate_opens(waiting):
    one = waiting()
    one.until(gate.READY)
    time.sleep(0.2)
    before = cpu_ticks(one.process.pid)
    time.sleep(1.5)
    assert cpu_ticks(one.process.pid) == before
    assert not list(one.output.iterdir()) and not one.ledger.exists()
    assert not list(one.private.glob("*.hb")), "it has no heartbeat"


def test_it_resumes_from_the_state_in_the_message_with_the_variables_and_the_log_of_then(waiting):
    one = waiting()
    toy_loop.save(
        one.output, "toy", 3, toy_loop.advance(toy_loop.advance(toy_loop.advance(b"", 1), 2), 3), Heartbeat(None)
    )
    state = one.output / "toy-step00000003-state"
    one.until(gate.READY)
    one.log.write_text("before\n")
    os.write(one.writer, gate.message(str(state), {"TOY_FAULTS": "", "TOY_LATE": "1"}, str(one.log)))
    assert one.process.wait(LIMIT_S) == 0, one.log.read_text()
    assert (one.private / gate.PASSED).exists()
    assert (one.output / "toy.safetensors").read_bytes() == toy_loop.expected(6)
    steps = [line["step"] for line in map(json.loads, one.ledger.read_text().splitlines()) if line["what"] == "step"]
    assert steps == [4, 5, 6]
    assert one.log.read_text().startswith("before\n")


@pytest.mark.parametrize("sent", [b"", b'{"resume": "/x", "env'], ids=["gone", "died in the middle of its message"])
def test_it_ends_quietly_when_the_monitor_is_gone(waiting, sent):
    one = waiting()
    if not sent:
        one.until(gate.READY)
    os.write(one.writer, sent)  # the second one while it still imports
    os.close(one.writer)
    assert one.process.wait(LIMIT_S) == gate.EXIT_UNUSED
    assert not list(one.output.iterdir()) and not one.ledger.exists()
    assert sent or not one.private.exists()
