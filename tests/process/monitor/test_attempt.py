"""One attempt: what its records and processes say, and how a real script ended, for every monitor of it."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from monitor_evidence import beat, open_incident
from monitor_helpers import events, wait_for
from proc_helpers import linux

from guards import heartbeat
from monitor import config, recovery
from monitor.attempt import Attempt, Unkillable, kill_processes
from monitor.detect.probe import Missing, Sample, take
from monitor.diagnose.incident import Incident
from monitor.process import platform, spawned
from monitor.process.platform import ProcessInfo, process_info
from monitor.run_folder import RunFolder
from monitor.state import Shutdown


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Starts an attempt with this script; nothing of it is alive afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = []

    def start(script: str) -> Attempt:
        (tmp_path / "train.sh").write_text(script)
        made.append(Attempt.prepare(RunFolder(tmp_path), 1))
        made[0].start(tmp_path / "train.sh", tmp_path / "training.log", {}, ())
        return made[0]

    yield start
    made[0].kill(0.1, 30)
    made[0].close()
    assert not made[0].heartbeats.exists()


def observed(attempt: Attempt):
    return attempt.poll(platform.now(), tree_s=0.1)


@linux
@pytest.mark.parametrize(("end", "code", "number"), [("exit 7", 7, None), ("kill -9 $$", 137, 9)])
def test_how_its_script_ended_is_known_to_a_monitor_that_did_not_start_it(attempt, end, code, number):
    first = attempt(f"echo begun; while [ ! -e go ]; do sleep 0.02; done; {end}\n")
    second = Attempt.adopt(first.folder, first.record)
    assert not observed(first).ended and not observed(second).ended and second.pid == first.pid
    wait_for(lambda: second.log_tail(100) == "begun\n")
    (first.folder.folder / "go").touch()
    for one in (first, second):
        wait_for(lambda one=one: observed(one).ended)
        assert (one.exit_status(()).code, one.exit_status(()).signal) == (code, number)


@linux
def test_one_whose_start_was_not_recorded_is_found_and_killed_and_one_of_the_boot_before_is_not(attempt, monkeypatch):
    """The monitor was killed between the start of the script and the note of its process number."""
    first = attempt("sleep 60 & wait\n")
    unrecorded = replace(first.record, root=None)
    found = wait_for(lambda: (one := Attempt.adopt(first.folder, unrecorded)) and one.pid == first.pid and one)
    wait_for(lambda: "sleep" in {process.name for process in found.tree.refresh().values()})
    assert {process.name for process in found.kill(0.5, 30).killed} >= {"bash", "sleep"}
    wait_for(lambda: observed(first).ended)
    for boot, started_s in (("another", first.record.started_s), ("", time.monotonic() + 9)):  # macOS has no name
        monkeypatch.setattr(platform, "boot_id", lambda boot=boot: boot)
        assert Attempt.adopt(first.folder, replace(first.record, started_s=started_s)) is None


def test_on_windows_cmd_gets_the_name_of_the_script_because_a_folder_may_have_what_it_reads_as_two_words(
    tmp_path, monkeypatch
):
    folder = tmp_path / "hangproof-main (1)" / "R&D"
    folder.mkdir(parents=True)
    monkeypatch.setattr(platform, "WINDOWS", True)
    monkeypatch.setattr(platform, "popen", popen := Mock(return_value=Mock(pid=os.getpid())))
    made = Attempt.prepare(RunFolder(folder), 2)
    made.start(folder / "train.attempt-2.bat", folder / "training.log", {}, ())
    platform.drop_private(made.heartbeats)
    assert popen.call_args.args[0] == ["cmd", "/c", r".\train.attempt-2.bat"]
    assert popen.call_args.kwargs["cwd"] == folder


END = config.load().end


def started(pid: int) -> ProcessInfo:
    return ProcessInfo(pid, 1.0, 1, "S", "python", 0.0, 0)


@pytest.mark.parametrize(
    ("exit_file", "rank", "expected"),
    [
        ("0", None, (0, None, "", "", False)),
        ("137", None, (137, 9, "", "", False)),
        ("128", None, (128, None, "", "", False)),
        ("193", None, (193, None, "", "", False)),
        (None, None, (None, None, "", "", False)),
        ("1", dict(outcome="failed", note="oom", step=5), (1, None, "failed", "oom", False)),
        ("0", dict(outcome="done", note="", step=40), (0, None, "done", "", True)),
        ("9", dict(outcome="running", note="x", step=0, planned=0), (9, None, "running", "", False)),
    ],
)
def test_an_attempt_ends_with_its_exit_code_and_its_first_ranks_words(make_loop, trained, exit_file, rank, expected):
    made = trained(make_loop())
    if exit_file:
        (made.heartbeats / "exit").write_text(exit_file)
    beats = [beat(1, local_rank=1, outcome="failed", note="other"), beat(0, **rank)] if rank else []
    status = made.exit_status(beats)
    assert (status.code, status.signal, status.outcome, status.note, status.trained) == expected
    made._orphaned = True  # its ranks outlived it
    assert made.exit_status(beats).code is made.exit_status(beats).signal is None


def test_a_rank_lives_while_a_process_of_its_number_and_start_is_there(make_loop, trained, monkeypatch):
    own = process_info(os.getpid())
    made = trained(make_loop(), pid=own.pid)
    made.beats.append(beat(1, pid=2**22 + 2))
    assert made.poll(platform.now(), 1e9).ranks_gone, "adopted, and not one of its processes: the number is used again"
    made.tree.members = {own.pid: own}
    view = made.poll(platform.now(), 1e9)
    assert (view.dead, view.ranks_gone, view.ended, view.stopped) == ({2**22 + 2}, False, False, frozenset())
    assert [one.rank for one in view.beats] == [0, 1] and view.step == 5
    for state, stopped in (("T", {own.pid}), ("Z", set())):
        seen = {own.pid: replace(own, state=state)}
        with monkeypatch.context() as patch:
            patch.setattr(platform, "process_info", seen.get)
            view = made.poll(platform.now(), 1e9)
        assert (view.stopped, own.pid in view.dead) == (stopped, state == "Z")
    made._start_times[own.pid] = own.start - 1
    view = made.poll(platform.now(), 1e9)
    assert view.ranks_gone and view.ended


def test_what_a_dead_script_or_dead_ranks_leave_is_noticed(make_loop, trained, monkeypatch):
    own, alive, looks = process_info(os.getpid()), [True], []
    made = trained(make_loop())
    monkeypatch.setattr(made, "script_alive", lambda: alive[0])
    monkeypatch.setattr(made, "_measure_activity", lambda now_s: looks.append("activity"))
    monkeypatch.setattr(made.tree, "refresh", lambda: looks.append("tree"))
    assert made.poll(platform.now(), 0.0).ranks_gone and looks == ["activity"], "the script may still copy something"
    made.beats, looks[:] = [beat(pid=own.pid)], []
    made.tree.members = {own.pid: own}
    for tree_s, fresh in ((1e9, False), (1e9, False), (1e9, True), (0.0, False)):
        assert not made.poll(platform.now(), tree_s, fresh).ended
    assert looks == ["tree"] * 3 and not made._orphaned
    alive[0] = False
    assert not made.poll(platform.now(), 1e9).ended and made._orphaned


def test_heartbeats_are_read_as_they_come_and_a_torn_one_keeps_the_last(make_loop, trained):
    made = trained(make_loop())
    made.beats = []

    def ranks(written: int, torn: int) -> list[int]:
        heartbeat.Heartbeat(heartbeat.path_of(made.heartbeats, written), written, 4)
        heartbeat.path_of(made.heartbeats, torn).write_bytes(b"torn")
        return [one.rank for one in made.poll(platform.now(), 1e9).beats]

    assert ranks(0, 2) == [0] and ranks(1, 0) == [0, 1] and ranks(3, 2) == [0, 1, 3]
    assert made.request_stop(), "one cannot be asked"
    assert heartbeat.read(heartbeat.path_of(made.heartbeats, 1)).request == heartbeat.REQUEST_STOP
    made.beats = []
    assert not made.request_stop()
    made.announce(made.heartbeats / "train.sh", made.heartbeats / "not UTF-8 \udce9", "printed so far\n")
    assert made.log_tail(200).endswith("not UTF-8 ?\nprinted so far\n")


@pytest.mark.parametrize(
    ("grown", "at_work"),
    [
        ({}, False),
        ({"cpu_s": 0.09}, False),
        ({"cpu_s": 0.11}, True),
        ({"disk_bytes": 20_000, "copied_bytes": 12_000}, False),
        ({"disk_bytes": 20_000, "copied_bytes": 13_000}, True),
        ({"log": 1}, True),
    ],
)
def test_a_script_without_ranks_is_at_work_while_something_grows(make_loop, trained, monkeypatch, grown, at_work):
    made, own = trained(make_loop()), process_info(os.getpid())
    made.tree.members = {own.pid: own}
    first = take(made.tree.keys(), Missing())
    ((key, process),) = first.processes.items()
    last = replace(process, **{name: getattr(process, name) + by for name, by in grown.items() if name != "log"})
    samples = iter([first, first, Sample(0.0, {key: last})])
    monkeypatch.setattr("monitor.attempt.take", lambda *_: next(samples))
    activities = []
    for now_s in (100.0, 102.0, 102.9, 104.0):
        if now_s == 104.0 and "log" in grown:
            made.folder.mark_log("x")
        made._measure_activity(now_s)
        activities.append(made._activity)
    assert activities == [1, 1, 1, 2 if at_work else 1], "the first look finds new processes"


def test_what_is_killed_is_named_and_what_lives_on_starts_no_second_writer(make_loop, trained, monkeypatch):
    loop, given, waits = make_loop(), [], []
    results = iter([spawned.KillResult((started(8),), (started(8),), 9.0), spawned.KillResult((started(7),), (), 1.5)])
    attempt = SimpleNamespace(kill=lambda *times_s: given.append(times_s) or next(results))
    monkeypatch.setattr(loop.gpus, "wait_free", lambda pids, timeout_s: waits.append((pids, timeout_s)) or pids)
    open_incident(loop)
    loop.state.failing, loop.queue.acquire = True, Mock()
    with pytest.raises(Unkillable, match=r"python \(8\)"):
        kill_processes(loop, attempt)
    assert Incident.load(loop.incident.folder).killed == [{"name": "python", "pid": 8}]
    loop.state.shutdown = Shutdown("preempted", gone_by_s=time.monotonic() + 4)
    kill_processes(loop, attempt, (3.0, 30.0))
    assert loop.queue.acquire.called, "the pause before the restart gives an adopted training's GPU to no other run"
    assert given[0] == (END.grace_s, END.kill_wait_s) and given[1] == (3.0, pytest.approx(1.0, abs=0.5))
    assert waits[0] == ({8}, END.gpu_memory_s) and waits[1][0] == {7} and waits[1][1] <= 4
    assert [p["pid"] for p in loop.incident.killed] == [8, 7]
    told = [event["message"] for event in events(loop.folder.folder, "killed")]
    assert told[1] == "killed 1 process in 1.5 s: python (7)"
    assert "still holds memory of killed processes: [7]" in (loop.folder.folder / "monitor.log").read_text()


def test_processes_that_cannot_be_killed_let_nothing_start(make_loop, monkeypatch):
    run = make_loop("")
    one = ProcessInfo(7, 1.0, 1, "D", "python", 0.0, 0)
    spared, given = ProcessInfo(8, 1.0, 1, "S", "bash", 0.0, 0), []
    monkeypatch.setattr(spawned, "with_environment", lambda name, value: [one, spared])
    monkeypatch.setattr(run.standby, "pids", lambda: {8})

    def kill(tree, *limits):
        given.append((dict(tree.members), limits))
        return spawned.KillResult((one,), (one,), 1.0)

    monkeypatch.setattr(spawned, "kill", kill)
    with pytest.raises(Unkillable, match=r"python \(7\)"):
        recovery.start_attempt(run)
    assert given == [({7: one}, (END.grace_s, END.kill_wait_s))]
