"""The evidence: which rank is in question, what cannot be read is named, counters that do not compare are not compared."""

import json
import os
import subprocess
import time
from dataclasses import asdict, replace

import pytest
from monitor_evidence import attempt, beat, frames, known

from guards.crash import stacks_path
from monitor.detect.probe import Missing
from monitor.diagnose import causes, ranks
from monitor.process import platform
from monitor.state import ExitStatus, Verdict

WAITS = frames("distributed_c10d.py:all_reduce", "other.py:wait_for_everyone")


def hang(scene, verdict=None, stacks=None, outcome="", note="", slow=""):
    verdict = verdict or Verdict("hung", 1, "step", 20, 9.0, 4.0, ("sleeping",))
    return causes.of_hang(known("hang"), scene, verdict, ended(None, outcome=outcome, note=note), stacks or {}, slow)


def ended(code, signal=None, outcome="running", note=""):
    return ExitStatus(code, signal, outcome, note, trained=False)


def test_exit_codes_and_outcomes():
    def done(*status):
        return ExitStatus(*status).done(foreign=False, killed=False)

    assert done(0, None, "", "", False), "a script without heartbeats"
    assert not done(0, None, "running", "", False), "exit code 0 alone does not count"
    assert done(1, None, "done", "", True), "a launcher's code is only a hint"
    assert "SIGKILL" in str(ended(137, 9))
    assert "waited for a batch" in str(ended(75, None, "deadline", "waited for a batch"))


# The phase in which rank 0 is stuck, its stack, and the cause; rank 1 waits for it in a collective operation.
STUCK = {
    "save": ("save", "safetensors.py:save_file", "save_slow"),
    "a cache file": ("step", "npz.py:__getitem__", "npz_stalled"),
    "a worker": ("step", "dataloader.py:_try_get_data", "worker_stuck"),
    "the tracker": ("load", "wandb_init.py:init", "tracker_start"),
    "cache_latents": ("cache_latents", "loop.py:encode", "caching"),
    "end": ("end", "loop.py:finish", "exit"),
    "a step": ("step", "loop.py:one_step", "collective"),
}


@pytest.mark.parametrize("what", STUCK)
def test_of_two_ranks_the_one_that_the_other_waits_for_decides_the_cause(what, tmp_path):
    phase, frame, cause = STUCK[what]
    two = attempt(tmp_path, beat(0, 20, phase, note="cat.png"), beat(1, 20, "step"))
    # The verdict is about rank 1: its phase has the shorter limit.
    found = hang(two, stacks={100: frames(frame), 101: WAITS})
    assert causes.match(found).name == cause
    assert (found.rank, found.phase, found.note) == (0, phase, "cat.png")
    if phase not in ranks.STEPS:
        assert causes.match(hang(two)).name == {"tracker_start": "loading"}.get(cause, cause), "no stacks"


def test_a_save_is_stuck_on_rank_0_although_all_ranks_are_in_that_phase(tmp_path):
    two = attempt(tmp_path, beat(0, 20, "save"), beat(1, 20, "save"))
    assert causes.match(hang(two, stacks={100: frames("safetensors.py:save_file"), 101: WAITS})).name == "save_slow"
    both = causes.match(hang(two, stacks={100: WAITS, 101: WAITS}))
    assert both.name == "collective" and "does not show which one was late" in both.explanation


def test_a_rank_that_gave_up_at_a_barrier_blames_the_save_that_it_waited_for(tmp_path):
    note = "waited 1800 s for all 2 ranks at a barrier (this is rank 1)"
    gave_up = beat(1, 20, "step", outcome="deadline", note=note)
    found = causes.of_crash(known("crash"), attempt(tmp_path, beat(0, 20, "save"), gave_up), ended(75))
    assert (found.kind, found.rank, found.phase) == ("crash", 0, "save")
    assert causes.match(found).name == "save_slow"
    found = causes.of_crash(known("crash"), attempt(tmp_path, beat(0, 20), gave_up), ended(75))
    assert causes.match(found).name == "collective"


def test_a_rank_that_waits_in_the_kernel_is_not_the_cause_unless_the_others_wait_for_it(tmp_path):
    found = hang(
        attempt(tmp_path, beat(0, 20, "step"), beat(1, 20, "step")), stacks={100: frames("a.py:b"), 101: WAITS}
    )
    facts = dict(ppid=1, name="p", wchan="", cpu_s=0.0, trainer=True, command="")
    found.processes = [{**facts, "pid": 100, "state": "S"}, {**facts, "pid": 101, "state": "D"}]
    assert causes.match(found).name == "collective"
    found.processes[0]["state"] = "D"
    assert causes.match(found).name == "unkillable"


def test_a_hang_of_one_rank_is_that_ranks(tmp_path):
    verdict = Verdict("hung", 0, "step", 22, 2.4, 2.2)
    found = hang(attempt(tmp_path, beat(0, 22, note="batch 3")), verdict, outcome="running")
    assert (found.phase, found.step, found.planned, found.stalled_s, found.budget_s) == ("step", 22, 40, 2.4, 2.2)
    assert found.outcome == "" and found.note == "batch 3" and found.ranks[0]["silent_s"] >= 9.0
    slow = hang(attempt(tmp_path, beat()), slow="waits for a busy disk")
    assert slow.signs == ["sleeping", "the run was slow before it hung: waits for a busy disk"]


def test_a_crash_is_that_of_the_rank_that_failed(tmp_path):
    (tmp_path / "x").mkdir()
    stacks_path(tmp_path, 101).write_text("old dump\nFatal Python error: Aborted\n\n" + frames("x.py:f"))
    two = attempt(tmp_path, beat(0, 20), beat(1, 19, outcome="failed", note="KeyError: 'x'"))
    found = causes.of_crash(known("crash"), two, ended(137, 9))
    assert (found.rank, found.step, found.outcome, found.note) == (1, 19, "failed", "KeyError: 'x'")
    assert found.signal is None, "the launcher killed the others"
    assert found.ended == "killed by SIGKILL; rank 1: failed (KeyError: 'x')"
    assert found.stacks[101].startswith("Fatal Python error: Aborted")
    alone = causes.of_crash(known("crash"), attempt(tmp_path), ended(None, 9, ""))
    assert (alone.phase, alone.step, alone.signal) == ("import", 5, 9)


def test_a_damaged_lora_is_about_the_run_and_not_about_a_rank(tmp_path):
    done = attempt(tmp_path, beat(0, 40, "end", outcome="done"))
    found = causes.of_crash(known("crash"), done, ended(0, None, "lora_damaged", "the LoRA x.safetensors is missing"))
    assert found.outcome == "lora_damaged" and causes.match(found).name == "lora_damaged"
    assert "the LoRA x.safetensors is missing" in causes.match(found).explanation


def test_a_living_process_is_described_without_heartbeats(tmp_path):
    process = subprocess.Popen(["sleep", "60"])
    try:
        while not platform.command_of(process.pid):
            time.sleep(0.01)  # between fork and exec
        members = {process.pid: platform.process_info(process.pid)}
        stacks = {1: frames("a.py:launcher"), process.pid: frames("b.py:trainer")}
        living = attempt(tmp_path, members=members)
        living.record = replace(living.record, root=(process.pid, members[process.pid].start))
        found = causes.of_process(known("hang"), living, ("sleeping",), stacks)
        assert found.where() == "trainer (b.py:1)", "that of the process in question, not of the first one"
        (one,) = found.processes
        assert one["trainer"] and one["name"] == "sleep" and one["state"] in ("S", "R") and "60" in one["command"]
    finally:
        process.kill()
        process.wait()
    gone = causes.process_facts(members, [process.pid], Missing())
    assert gone[0]["state"] == "" and gone[0]["command"] == ""


BROKEN = {
    "no /proc/meminfo (gVisor)": ("MEMINFO", "absent", "memory of the machine: No such file or directory"),
    "no kernel log": ("KMSG", "absent", "kernel log: No such file or directory"),
    "a kernel log that fails": ("KMSG", "/proc/self/mem", "kernel log: Input/output error"),
    "kernel records that do not parse": ("KMSG", "6,1,soon,-;Xid (PCI:0000:01:00): 79\n", "kernel log: unknown format"),
}


@pytest.mark.skipif(not platform.LINUX, reason="Linux only: /proc")
@pytest.mark.parametrize("what", BROKEN)
def test_evidence_that_cannot_be_read_is_named(what, tmp_path, monkeypatch):
    name, value, sentence = BROKEN[what]
    path = value
    if not value.startswith("/"):
        path = str(tmp_path / "file")
        if value != "absent":
            (tmp_path / "file").write_text(value)
    monkeypatch.setattr(causes, name, path)
    found = hang(attempt(tmp_path, beat()))
    assert any(missing.startswith(sentence) for missing in found.missing), found.missing
    assert found.kernel == [] and json.dumps(asdict(found))


def test_a_kernel_record_of_a_fault_is_kept_if_it_is_new(tmp_path, monkeypatch):
    record = tmp_path / "kmsg"
    monkeypatch.setattr(causes, "KMSG", str(record))
    record.write_text("4,812,9000000,-;NVRM: Xid (PCI:0000:01:00): 79, pid=71\n SUBSYSTEM=pci\n")
    missing = Missing()
    assert causes.kernel_lines(8.0, missing) == ["NVRM: Xid (PCI:0000:01:00): 79, pid=71"]
    assert causes.kernel_lines(10.0, missing) == [] == missing


def test_a_folder_and_stacks_that_are_gone_are_no_error(tmp_path):
    found = causes.of_crash(known("crash"), attempt(tmp_path / "absent", beat()), ended(1, None, ""))
    assert "free disk space: No such file or directory" in found.missing
    assert found.stacks == {} and "disk_free" not in found.host


def test_a_running_rank_without_stacks_is_named(tmp_path):
    me = platform.process_info(os.getpid())
    found = hang(attempt(tmp_path, beat(0, pid=me.pid), members={me.pid: me}))
    assert f"stack of rank 0 (pid {me.pid})" in found.missing


CGROUP, MACHINE = "/sys/fs/cgroup/memory.events", "/proc/vmstat"


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ({MACHINE: 3}, {MACHINE: 4}, 1),
        ({MACHINE: 3}, {MACHINE: 3}, 0),
        ({CGROUP: 0, MACHINE: 7}, {CGROUP: 0, MACHINE: 9}, 0),  # killed in another container
        ({CGROUP: 0, MACHINE: 7}, {CGROUP: 1, MACHINE: 8}, 1),
        ({}, {MACHINE: 5}, None),  # an adopted attempt that was dead already: no baseline
        ({CGROUP: 0}, {MACHINE: 5}, None),  # the source changed
        ({MACHINE: 5}, {CGROUP: 2}, None),
        ({MACHINE: 5}, {MACHINE: 0}, 0),  # rebooted
    ],
)
def test_only_the_same_counter_is_compared(before, after, new, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "oom_kills", lambda: after)
    killed = attempt(tmp_path, beat(), oom_kills=before)
    found = causes.of_crash(known("crash"), killed, ended(None, 9))
    assert found.host.get("oom_kills") == new
    found.kernel = []  # of this machine
    assert causes.match(found).name == ("host_out_of_memory" if new else "killed")
    assert any("lack of memory" in missing for missing in found.missing) == (new is None and platform.LINUX)


def test_the_counters_are_read_by_source(tmp_path, monkeypatch):
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "vmstat").write_text("pswpin 4\noom_kill 11\nnr_free 3\n")
    counters = (str(tmp_path / "memory.events"), str(tmp_path / "vmstat"))
    monkeypatch.setattr(platform, "OOM_COUNTERS", counters)
    assert platform.oom_kills() == dict(zip(counters, (2, 11), strict=True))
    monkeypatch.setattr(platform, "OOM_COUNTERS", ("/proc/self/mem", str(tmp_path / "absent")))
    assert platform.oom_kills() == {}
