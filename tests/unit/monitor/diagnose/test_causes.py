"""The evidence on a failure and its cause: the table, row by row, on what real programs print and real stacks.

Which rank is in question; what cannot be read is named; counters that do not compare are not compared.
"""

import json
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tomllib
from monitor_evidence import LAUNCHER, attempt, beat, crash, frames, hang, known, proc, rank
from proc_helpers import linux

from guards.heartbeat import stacks_path
from monitor.detect.probe import Missing
from monitor.diagnose import causes, ranks, slow
from monitor.process import platform
from monitor.state import ExitStatus, Verdict
from runs.mitigate import MITIGATIONS

WAITS = frames("distributed_c10d.py:all_reduce", "other.py:wait_for_everyone")


def hung(scene, verdict=None, stacks=None, outcome="", note="", slow=""):
    verdict = verdict or Verdict("hung", 1, "step", 20, 9.0, 4.0, ("sleeping",))
    return causes.of_hang(known("hang"), scene, verdict, ended(None, outcome=outcome, note=note), stacks or {}, slow)


def ended(code, signal=None, outcome="running", note=""):
    return ExitStatus(code, signal, outcome, note, trained=False)


# The phase in which rank 0 is stuck, its stack, and the cause; rank 1 waits for it in a collective operation.
STUCK = {
    "save": ("save", "safetensors.py:save_file", "save_slow"),
    "a cache file": ("step", "npz.py:__getitem__", "npz_stalled"),
    "the tracker": ("load", "wandb_init.py:init", "tracker_start"),
    "a step": ("step", "loop.py:one_step", "collective"),
}


@pytest.mark.parametrize("what", STUCK)
def test_of_two_ranks_the_one_that_the_other_waits_for_decides_the_cause(what, tmp_path):
    phase, frame, cause = STUCK[what]
    two = attempt(tmp_path, beat(0, 20, phase, note="cat.png"), beat(1, 20, "step"))
    # The verdict is about rank 1: its phase has the shorter limit.
    found = hung(two, stacks={100: frames(frame), 101: WAITS})
    assert causes.match(found).name == cause
    assert (found.rank, found.phase, found.note) == (0, phase, "cat.png")
    if phase not in ranks.STEPS:
        assert causes.match(hung(two)).name == {"tracker_start": "loading"}.get(cause, cause), "no stacks"


def test_a_rank_that_waits_in_the_kernel_is_not_the_cause_unless_the_others_wait_for_it(tmp_path):
    both = attempt(tmp_path, beat(0, 20, "step"), beat(1, 20, "step"))
    found = hung(both, stacks={100: frames("a.py:b"), 101: WAITS})
    facts = dict(ppid=1, name="p", wchan="", cpu_s=0.0, trainer=True, command="")
    found.processes = [{**facts, "pid": 100, "state": "S"}, {**facts, "pid": 101, "state": "D"}]
    assert causes.match(found).name == "collective"
    found.processes[0]["state"] = "D"
    assert causes.match(found).name == "unkillable"


def test_a_hang_of_one_rank_is_that_ranks(tmp_path):
    verdict = Verdict("hung", 0, "step", 22, 2.4, 2.2)
    found = hung(attempt(tmp_path, beat(0, 22, note="batch 3")), verdict, outcome="running")
    assert (found.phase, found.step, found.planned, found.stalled_s, found.budget_s) == ("step", 22, 40, 2.4, 2.2)
    assert found.outcome == "" and found.note == "batch 3" and found.ranks[0]["silent_s"] >= 9.0
    slow = hung(attempt(tmp_path, beat()), slow="waits for a busy disk")
    assert slow.signs == ["sleeping", "the run was slow before it hung: waits for a busy disk"]


def test_a_crash_is_that_of_the_rank_that_failed(tmp_path):
    (tmp_path / "x").mkdir()
    stacks_path(tmp_path, 100).write_text("old dump\n")
    stacks_path(tmp_path, 101).write_text("old dump\nFatal Python error: Aborted\n\n" + frames("x.py:f"))
    two = attempt(tmp_path, beat(0, 20), beat(1, 19, outcome="failed", note="KeyError: 'x'"))
    found = causes.of_crash(known("crash"), two, ended(137, 9))
    assert (found.rank, found.step, found.outcome, found.note) == (1, 19, "failed", "KeyError: 'x'")
    assert found.signal is None, "the launcher killed the others"
    assert found.ended == "killed by SIGKILL; rank 1: failed (KeyError: 'x')"
    assert found.stacks.keys() == {101} and found.stacks[101].startswith("Fatal Python error: Aborted")
    alone = causes.of_crash(known("crash"), attempt(tmp_path), ended(None, 9, ""))
    assert (alone.phase, alone.step, alone.signal) == ("import", 5, 9)
    done = attempt(tmp_path, beat(0, 40, "end", outcome="done"))
    found = causes.of_crash(known("crash"), done, ended(0, None, "lora_damaged", "the LoRA x.safetensors is missing"))
    assert found.outcome == "lora_damaged" and causes.match(found).name == "lora_damaged", "it is about the run"
    assert causes.match(found).restart and "but the LoRA x.safetensors is missing." in causes.match(found).explanation


def test_a_living_process_is_described_without_heartbeats(tmp_path, spawn):
    process = spawn(STARTED="1")
    members = {process.pid: platform.process_info(process.pid)}
    stacks = {1: frames("a.py:launcher"), process.pid: frames("b.py:trainer")}
    living = attempt(tmp_path, members=members)
    living.record = replace(living.record, root=(process.pid, members[process.pid].start))
    found = hung(living, Verdict("hung", phase="step", evidence=("sleeping",)), stacks, outcome="")
    assert found.where() == "trainer (b.py:1)", "that of the process in question, not of the first one"
    (one,) = found.processes
    assert one["trainer"] and one["name"] == "sleep" and one["state"] in ("S", "R") and "60" in one["command"]
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


@linux
@pytest.mark.parametrize("what", BROKEN)
def test_evidence_that_cannot_be_read_is_named(what, tmp_path, monkeypatch):
    name, value, sentence = BROKEN[what]
    path = value
    if not value.startswith("/"):
        path = str(tmp_path / "file")
        if value != "absent":
            (tmp_path / "file").write_text(value)
    monkeypatch.setattr(causes, "KMSG", os.devnull)  # another program of this machine may have filled its memory
    monkeypatch.setattr(causes, name, path)
    found = hung(attempt(tmp_path, beat()))
    assert any(missing.startswith(sentence) for missing in found.missing), found.missing
    assert found.kernel == [] and json.dumps(asdict(found))


@linux
def test_a_kernel_record_of_a_fault_is_kept_if_it_is_new(tmp_path, monkeypatch):
    record = tmp_path / "kmsg"
    monkeypatch.setattr(causes, "KMSG", str(record))
    record.write_text("4,812,9000000,-;NVRM: Xid (PCI:0000:01:00): 79, pid=71\n SUBSYSTEM=pci\n")
    assert causes.kernel_lines(8.0) == ["NVRM: Xid (PCI:0000:01:00): 79, pid=71"]
    assert causes.kernel_lines(10.0) == []
    now = platform.now()
    suspended = replace(now, boot_s=now.mono_s + 7200)  # for two hours
    monkeypatch.setattr(platform, "now", lambda: suspended)
    record.write_text(f"4,812,{int(now.mono_s * 1e6)},-;NVRM: Xid (PCI:0000:01:00): 79, pid=71\n")
    assert hung(attempt(tmp_path, beat())).kernel == ["NVRM: Xid (PCI:0000:01:00): 79, pid=71"]
    for other, cause in (("0000:02:00", "gpu_lost"), ("0000:01:00", "exited_unexpectedly")):  # another run's GPU
        known_first = replace(known("crash"), other_gpus=[other])
        found = causes.of_crash(known_first, attempt(tmp_path, beat()), ended(1, None, ""))
        assert causes.match(found).name == cause


def test_a_folder_and_stacks_that_are_gone_are_no_error(tmp_path):
    found = causes.of_crash(known("crash"), attempt(tmp_path / "absent", beat()), ended(1, None, ""))
    assert "free disk space: No such file or directory" in found.missing
    assert found.stacks == {} and "disk_free" not in found.host
    me = platform.process_info(os.getpid())
    found = hung(attempt(tmp_path, beat(0, pid=me.pid), members={me.pid: me}))
    assert f"stack of rank 0 (pid {me.pid})" in found.missing, "of a rank that runs"


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
        ({MACHINE: 5}, {MACHINE: 0}, 0),  # rebooted
    ],
)
def test_only_the_same_counter_is_compared(before, after, new, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "oom_kills", lambda: after)
    killed = attempt(tmp_path, beat(step=0), oom_kills=before)  # it was still loading
    (tmp_path / "status.json").write_text('{"memory_bytes": 2100000000}')
    found = causes.of_crash(known("crash"), killed, ended(None, 9))
    assert found.host.get("oom_kills") == new and found.step == 5
    found.kernel = []  # of this machine
    cause = causes.match(found)
    assert cause.name == ("host_out_of_memory" if new else "killed")
    assert ("The training itself held 2.1 GB." in cause.explanation) == bool(new)
    assert any("lack of memory" in missing for missing in found.missing) == (new is None and platform.LINUX)


def test_the_counters_are_read_by_source(tmp_path, monkeypatch):
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "vmstat").write_text("pswpin 4\noom_kill 11\nnr_free 3\n")
    counters = (str(tmp_path / "memory.events"), str(tmp_path / "vmstat"))
    monkeypatch.setattr(platform, "OOM_COUNTERS", counters)
    assert platform.oom_kills() == dict(zip(counters, (2, 11), strict=True))
    monkeypatch.setattr(platform, "OOM_COUNTERS", ("/proc/self/mem", str(tmp_path / "absent")))
    assert platform.oom_kills() == {}


NON_ZERO = "returned non-zero exit status 1."


def log(error: str, end: str = NON_ZERO) -> str:
    """A training's log as it is: a progress bar, an unrelated warning, a traceback, the launcher's own."""
    return (
        "steps:   3%|▎         | 34/1000 [00:51<24:11,  1.50s/it, avr_loss=0.412]\r\n"
        "/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py:87: UserWarning: None of the inputs have "
        "requires_grad=True. Gradients will be None\n"
        "Traceback (most recent call last):\n"
        '  File "/sd-scripts/train_network.py", line 1432, in train\n    for step, batch in enumerate(loader):\n'
        f"{error}\n{LAUNCHER}{end}\n"
    )


TABLE = tomllib.loads((Path(__file__).parents[3] / "support" / "data" / "failures.toml").read_text(encoding="utf-8"))


def evidence(row: dict) -> tuple[causes.Evidence, str]:
    """The evidence of a row of TABLE, and its cause."""
    values = {key: value for key, value in row.items() if key not in ("what", "cause")}
    for name, make in (("processes", proc), ("ranks", rank)):
        if name in values:
            values[name] = [make(**one) for one in values[name]]
    if values.pop("kind", "") == "hang":
        return hang(frames(*values.pop("frames")) if "frames" in values else "", **values), row["cause"]
    text = values.pop("log", "")
    if "error" in values:
        text += log(values.pop("error"), values.pop("end", NON_ZERO))
    if "launcher" in values:
        text += LAUNCHER + values.pop("launcher")
    return crash(text, **values), row["cause"]


LONG = (
    "t.py: error: unrecognized arguments: --bogus\nsubprocess.CalledProcessError: Command '['python', '"
    f"{'x' * 9000}']' returned non-zero exit status 2.\n"
)
FATAL = "Fatal Python error: Segmentation fault\n\n" + frames("x.py:f")
ASIDE = frames("queue.py:get", "trackers.py:_run", main=False) + "\n\n"
OLD, KEY_ERROR = "steps 1\n", "KeyError: 'x'"
STEP, READ = frames("loop.py:one_step"), frames("zipfile.py:read")
FOUND = {row.get("what", row.get("error")): evidence(row) for row in TABLE["found"]} | {
    "a flag that argparse rejects, behind a long command": (crash(LONG, exit_code=1, phase="import"), "usage_error"),
    "a segfault": (crash(signal=11, stacks={7: FATAL}), "crashed_in_c"),
}
INNOCENT = {row["what"]: evidence(row) for row in TABLE["innocent"]} | {
    "a tracker's thread always waits": (hang(ASIDE + STEP), "stuck"),
    "a worker's stack is not the trainer's": (hang(ranks=[rank(0)], stacks={100: STEP, 50: READ}), "stuck"),
    "an old out of memory that was survived": (crash(f"CUDA out of memory\n{400 * OLD}{log(KEY_ERROR)}"), "exception"),
}


@pytest.mark.parametrize("what", [*FOUND, *INNOCENT])
def test_the_cause_of(what):
    evidence, name = {**FOUND, **INNOCENT}[what]
    cause = causes.match(evidence)
    assert cause.name == name
    assert cause.title and cause.explanation and "{" not in cause.title + cause.explanation + cause.advice


@pytest.mark.parametrize(("kind", "phase"), [("stops", "load"), ("restarts", "step")])
def test_what_the_trainers_of_the_field_print_stops_a_run_where_no_restart_helps(kind, phase):
    wrong = []
    for name, lines in TABLE[kind].items():
        for line in lines:
            cause = causes.match(crash(log(line), phase=phase, exit_code=1, outcome="failed", note=line[:240]))
            wrong += [line] if (cause.name, cause.restart) != (name, kind == "restarts") else []
    assert wrong == []


def test_every_row_of_the_table_is_matched_by_one_of_these():
    met = [causes.row_of(evidence, causes.Log(evidence.log_tail))[1] for evidence, _ in FOUND.values()]
    missing = [(row["title"], way) for row in causes.TABLE for way in row["match"] if way not in met]
    assert missing == []


def test_the_explanation_shows_the_trainings_error_and_not_the_launchers():
    for error in (row["error"] for row in TABLE["found"] if "what" not in row):
        shown = causes.match(FOUND[error][0]).explanation
        assert error[:60].removeprefix("[rank0]:") in shown and not shown.endswith(".."), (error, shown)
    short = crash("Traceback (most recent call last):\nValueError: the LoRA is empty\n" + LAUNCHER + "returned 1.\n")
    assert causes.match(short).explanation == "The error was: ValueError: the LoRA is empty."
    assert causes.match(crash("error: the disk is slow\n")).explanation == "The error was: the disk is slow."
    assert "The last line of the log: the log is empty." in causes.match(crash()).explanation
    ends = {"died with <Signals.SIGABRT: 6>.": "SIGABRT", "returned non-zero exit status 3.": "exit code 3"}
    for end, said in ends.items():  # only the launcher says something: without its command
        assert f"its launcher reports {said}" in causes.match(crash(LAUNCHER + end, exit_code=1)).explanation


def test_what_can_never_start_is_explained_by_its_own_message_and_not_restarted():
    own = r"(t\.py: |flux_train_network\.py: )?error: (argument --seed|unrecognized|--max_train_steps)"
    for what, (evidence, _) in FOUND.items():
        cause = causes.match(evidence)
        if "rejects" in what:
            assert not cause.restart and re.match(own, cause.explanation), what
        elif what.startswith("a training script that is not there"):
            assert not cause.restart and ".py" in cause.explanation and "start.sh" in cause.advice, what


def test_every_cause_is_a_sentence_and_every_mitigation_exists():
    for row in causes.TABLE:
        assert row["title"][0].isupper() and row["explanation"].endswith((".", "}")), row["name"]
        for way in row["match"]:
            for pattern in (*way.get("log", ()), *way.get("error", ()), *way.get("note", ())):
                re.compile(pattern)
    assert causes.TABLE[-1]["match"] == [{}]
    used = {name for row in (*causes.TABLE, *slow.TABLE) for name in row.get("ladder", ())}
    assert used == set(MITIGATIONS), "each is used, and no other"
    of = {row["name"]: row.get("ladder", ()) for row in reversed(causes.TABLE)}
    expected = {"worker_killed": "workers_0", "npz_corrupt": "cache_aside", "block_swap": "no_block_swap"}
    assert [name for name, change in expected.items() if change not in of[name]] == []


def test_a_log_made_of_what_the_patterns_look_for_takes_no_time_worth_mentioning():
    for part in (".npz", "huggingface.co ", "gloo", "waited ", "Error: ", "a: "):
        for line, lines in ((65536, 1), (4000, 300)):
            began = time.process_time()
            causes.match(crash("\n".join([part * (line // len(part))] * lines), note=part * 40))
            assert time.process_time() - began < 10.0, part
