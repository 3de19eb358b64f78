"""A standby attempt during its imports, and what it costs while it waits. The fault matrix has its deaths and hangs.

python -m pytest tests/campaigns/test_standby.py          2 minutes
"""

import os
import signal
from pathlib import Path

import psutil
import pytest
from monitor_helpers import stop, wait_for
from run_facts import members, status
from standby_helpers import EARLY, Run, trainer_of

from monitor.cli.commands import line
from monitor.process import platform
from runs.manage import size_text

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="the standby attempt needs Linux")


def slow_imports(run: Run, command: str) -> None:
    """Whoever starts at the gate runs this shell command before Python."""
    launcher = run.data / "accelerate"
    first, rest = launcher.read_text().split("\n", 1)
    launcher.write_text(f'{first}\n[ -z "$HANGPROOF_GATE" ] || {command}\n{rest}')


def until_starting(run: Run) -> int:
    return wait_for(lambda: run.standby()["state"] == "starting" and run.standby()["pid"], what="a standby that starts")


def test_a_standby_that_has_not_imported_everything_is_not_waited_for(tmp_path):
    run = Run(tmp_path)
    slow_imports(run, "sleep 1000")
    process = run.start()
    shell = psutil.Process(until_starting(run))
    os.kill(status(run.folder)["trainer_pids"][0], signal.SIGKILL)
    wait_for(lambda: run.restarted(), what="the restart")
    assert EARLY not in run.restarted()[0] and not shell.is_running()
    assert "it has not imported everything yet" in (run.folder / "monitor.log").read_text()
    run.finish(process)
    run.check_complete(restarts=1)


def test_while_it_waits_it_is_the_first_that_short_memory_kills(tmp_path):
    run = Run(tmp_path)
    process = run.start(TOY_TORCH="1")
    shell = run.until_ready()
    pids = [shell, *(child.pid for child in psutil.Process(shell).children(recursive=True))]
    found = status(run.folder)
    assert found["standby"]["memory_bytes"] > 20e6, "torch is in it"
    text = line(run.folder, {**found, "alive": True})
    assert f"next attempt ready ({size_text(found['standby']['memory_bytes'])})" in text
    assert [score(pid) for pid in pids] == [1000] * len(pids) and score(found["trainer_pids"][0]) == score(os.getpid())

    os.kill(found["trainer_pids"][0], signal.SIGKILL)
    wait_for(lambda: run.restarted(), what="the restart")
    assert [score(pid) for pid in pids] == [score(os.getpid())] * len(pids)
    run.finish(process)
    run.check_complete(restarts=1)


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_a_stop_ends_the_standby_at_once(tmp_path):
    run = Run(tmp_path, step_s=0.1)
    process = run.start()
    waiting = trainer_of(run.until_ready())
    stop(run.folder, **run.env)
    run.finish(process, code=3)
    assert not waiting.is_running()
    assert not members(run.folder) and status(run.folder)["state"] == "stopped"
