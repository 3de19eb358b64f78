"""Faults are injected as they are named, and a second writer is noticed. tests/campaigns plays all of them."""

import subprocess
import sys

import fault_actions
import faults
import tomllib
from proc_helpers import linux
from runs_helpers import python

from benchmarks import chaos, injector
from guards.heartbeat import PHASES
from monitor.state import FINAL
from runs.paths import ROOT

ROWS = faults.table()


def test_each_row_of_the_matrix_names_what_exists():
    text = (ROOT / "monitor" / "diagnose" / "causes.toml").read_text(encoding="utf-8")
    known = {cause["name"] for cause in tomllib.loads(text)["cause"]} | {"any"}
    for name, row in ROWS.items():
        causes = row["expect"]["incidents"]
        assert isinstance(causes, int) or {cause for one in causes for cause in one.split("|")} <= known, name
        assert "action" not in row or callable(getattr(fault_actions, row["action"])), name
        assert row["fault"] and {"inject", "action", "script"} & set(row), name
        if "inject" in row:
            assert row["inject"]["fault"] in injector.FAULTS and row["inject"]["phase"] in PHASES, name
            low, high = row["inject"]["step"]
            assert low <= faults.fault_step(row, 7) == faults.fault_step(row, 7) <= high, name
        assert "shim" not in row or (faults.SHIMS / row["shim"]).is_dir(), name
        assert row["expect"]["state"] in FINAL, name


def test_the_drill_of_windows_finds_its_fault():
    absent = "import signal, sys; del signal.SIGSTOP, signal.SIGKILL; sys.modules['fcntl'] = None"
    assert python("-c", f"{absent}; from benchmarks.injector import FAULTS; FAULTS['step_sleeps']").returncode == 0


HELD = "import time; from benchmarks import injector; injector.claim(); print('held', flush=True); time.sleep(600)"


def test_a_second_writer_is_reported_and_one_that_has_died_is_none(tmp_path, spawn):
    """What each row of the matrix is checked for; forked workers and the next attempt are no second writer."""

    def held(attempt: int, run: str = "/a"):
        where = {injector.WRITERS: str(tmp_path), "HANGPROOF_RUN": run, "HANGPROOF_ATTEMPT": str(attempt)}
        process = spawn(sys.executable, "-c", HELD, **where)
        assert process.stdout.readline() == "held\n"
        return process

    first, _ = held(1), held(1, "/b")
    assert injector.doubled(tmp_path) == []
    first.kill()
    first.wait()
    second = held(2)
    assert injector.doubled(tmp_path) == []
    third = held(3)
    (report,) = injector.doubled(tmp_path)
    assert f"process {third.pid} (attempt 3) trains while process {second.pid} (attempt 2) trains /a" in report


LOAD = (
    "import sys; exec(open(sys.argv[1]).read() + '_install()'); from monitor import config, supervisor; config.load()"
)


@linux
def test_the_whole_monitor_is_imported_under_the_shim_that_makes_its_calls_fail(tmp_path, monkeypatch):
    for name, value in (("CHAOS_ROOT", ROOT), ("CHAOS_FOLDER", tmp_path), ("CHAOS_LEDGER", tmp_path / "none")):
        monkeypatch.setenv(name, str(value))
    command = [sys.executable, "-c", LOAD, str(chaos.SHIM / "sitecustomize.py")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert "monitor/" in next(tmp_path.glob("places-*")).read_text()
