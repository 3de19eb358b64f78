"""Jobs of a run: read while they run, cancelled, ended after their limit, lost when they are killed."""

import json
import os

import psutil
import pytest
from ui_helpers import write_run
from ui_page import until

import runs
from ui import jobs
from ui.run import launch_tab


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A module `job_program` that a job can run: it prints, waits until a file is there, and exits."""
    (tmp_path / "job_program.py").write_text(
        "import os, sys, time, json\nprint('working', flush=True)\n"
        "print('to people', file=sys.stderr)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"
        "print(json.dumps({'pid': os.getpid()}))\nsys.exit(int(sys.argv[2]))\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path / "go"


@pytest.mark.parametrize("code, state", [(0, "done"), (3, "failed")])
def test_a_job_is_read_while_it_runs_and_after_it(data, program, code, state):
    folder = write_run(data, "one")
    jobs.start(folder, "probe", ["job_program", str(program), str(code)], 60)
    assert jobs.read(folder, "probe").state == "running"
    until(lambda: "working" in jobs.output(folder, "probe")[0], "its first line is there")
    with pytest.raises(runs.RunError, match="running already"):
        jobs.start(folder, "probe", ["job_program", str(program), "0"], 60)
    stamp = jobs.read(folder, "probe").stamp
    program.touch()
    until(lambda: jobs.read(folder, "probe").state == state, f"the job is {state}")
    text, value, errors = jobs.output(folder, "probe")
    assert text.strip() == "working" and value["pid"] > 0 and errors.strip() == "to people"
    assert jobs.read(folder, "probe").stamp != stamp
    assert list(jobs.all_of(folder)) == ["probe"] and jobs.read(folder, "other") is None


def test_a_job_is_cancelled_ended_after_its_limit_and_lost_when_killed(data, program):
    folder = write_run(data, "one")
    jobs.start(folder, "probe", ["job_program", str(program), "0"], 60)
    jobs.cancel(folder, "probe")
    until(lambda: jobs.read(folder, "probe").state == "cancelled", "the job is cancelled")
    jobs.start(folder, "probe", ["job_program", str(program), "0"], 0.5)
    until(lambda: jobs.read(folder, "probe").state == "failed", "the job is ended")
    assert "took longer than" in jobs.output(folder, "probe")[2]
    jobs.start(folder, "probe", ["job_program", str(program), "0"], 60)
    until(lambda: "working" in jobs.output(folder, "probe")[0], "it runs")
    process = psutil.Process(json.loads((folder / ".jobs/probe.json").read_text())["pid"])
    for one in [process, *process.children()]:
        one.kill()
    until(lambda: jobs.read(folder, "probe").state == "lost", "its end was not seen")
    assert "Ended without a result" in launch_tab.result(folder, "probe")
