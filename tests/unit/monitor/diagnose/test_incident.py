"""`report.md` for a reader who does not know the monitor, and `incident.json`, which a new monitor reads back."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from markdown_it import MarkdownIt
from monitor_evidence import LAUNCHER, crash, frames, hang, proc, rank

from monitor.diagnose import causes, incident
from monitor.diagnose.incident import Incident, report
from monitor.process import platform
from monitor.run_folder import RunFolder
from monitor.state import Signals

SLEEPS = dict(ranks=[rank(0)], stacks={100: frames("loop.py:one_step")}, planned=40, stalled_s=2.3, budget_s=2.1)
KNOWN = dict(attempt=1, progress_s=0.0, best_step=10, started_at="2026-01-02T03:04:05.678Z", detect_s=2.3)
RECOVERED = dict(resumed_from=8, steps_repeated=2, recover_s=5.04, outcome="step 11 is new: the run has recovered")


def text_of(evidence, **values) -> str:
    """The report of an incident that was recovered from."""
    found = Incident(Path("incidents/0001"), evidence, causes.match(evidence), **{**KNOWN, **RECOVERED, **values})
    return report(found, "toy")


def test_a_hang_is_reported_with_its_place_time_limit_and_evidence():
    text = text_of(hang(signs=["the same stack twice within 1.2 s, no CPU time used"], **SLEEPS))
    assert (
        "The training hung after step 10 of 40. Last progress: 2026-01-02 03:04:05 UTC. The limit for this phase was 2.1 s "
        "without progress; the monitor declared a hang after 2.3 s. Evidence: the same stack twice within 1.2 s, no CPU time used.\n"
    ) in text
    assert "No step completed for much longer than usual. The main thread was in one_step (loop.py:1)." in text
    assert "- The monitor restarted the run from its checkpoint of step 8.\n- Step 11 is new: the run has rec" in text
    assert "5.0 s from the last progress to the first new step. 2 steps were trained twice." in text
    assert "There was no other evidence, so the monitor waited twice the limit." in text_of(hang(**SLEEPS))
    headings = ["What happened", "Likely cause", "What was done", "Cost", "Details"]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == headings
    text = text_of(hang(ranks=[rank(0, phase="save"), rank(1)], phase="save", budget_s=4, signs=["sleeping"]))
    assert "The training hung while saving a checkpoint, after step 10." in text
    assert "The other ranks were waiting for rank 0. The limit was 4.0 s without progress" in text


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (dict(outcome="failed", exit_code=1), "The training failed with an error after step 10 (exit code 1). Last progress"),
        (dict(outcome="deadline", exit_code=75, note="waited 10 s for it"),
         "A wait inside the training timed out after step 10, so the training stopped itself (exit code 75)."),
        (dict(outcome="stopped", exit_code=3), "The training saved a checkpoint and exited after step 10 (exit code 3)."),
        (dict(outcome="lora_damaged", exit_code=0, note="the LoRA toy.safetensors is missing", phase="end"),
         "The script exited while finishing, after step 10 (exit code 0), but the LoRA toy.safetensors is missing."),
        (dict(ended="killed by SIGKILL", signal=9, phase="save"),
         "The training ended while saving a checkpoint, after step 10: killed by SIGKILL."),
    ],
)  # fmt: skip
def test_a_crash_is_reported_by_how_it_ended(values, sentence):
    assert sentence in text_of(crash(**values))


def test_an_error_is_shown_once_and_a_launchers_own_traceback_not_at_all():
    log = f"Traceback (most recent call last):\n  File 'x', line 1\nKeyError: 'lora_7'\n{LAUNCHER}returned non-zero exit status 1.\n"
    ranks = [{**rank(0), "outcome": "failed"}]
    text = text_of(crash(log, outcome="failed", exit_code=1, note="KeyError: 'lora_7'", ranks=ranks))
    before, _, details = text.partition("## Details")
    assert before.count("lora_7") == 1 and details.count("lora_7") == 1
    assert "accelerate" not in text and "CalledProcessError" not in text


def test_what_was_done_and_what_it_cost_agree():
    over = text_of(
        hang(**SLEEPS), resumed_from=0, changed=["the training starts over: its checkpoints are incompatible"]
    )
    assert "from step 0, because the disk had no checkpoint to resume from." in over
    bad = text_of(hang(**SLEEPS), resumed_from=0, bad_checkpoints=["toy-step00000008-state.bad (truncated)"])
    assert "- Checkpoint set aside as damaged: toy-step00000008-state.bad (truncated).\n" in bad
    assert "No step was trained twice." in text_of(hang(**SLEEPS), steps_repeated=0)
    early = text_of(hang(**SLEEPS), from_memory=True, standby=True)
    assert "from its snapshot in memory of step 8, in an attempt that had been started early." in early
    assert "1 step was trained twice." in text_of(hang(**SLEEPS), steps_repeated=1)
    completed = text_of(hang(**SLEEPS), outcome="the run completed")
    assert "from the last progress to the end of the run. 2 steps" in completed
    open_yet = dict(resumed_from=None, steps_repeated=None, recover_s=None, outcome="the run is being restarted")
    text = text_of(hang(**SLEEPS), **open_yet)
    assert "- The run is being restarted.\n" in text and "None" not in text
    assert "No new step has been completed since then." in text
    killed = [{"name": "python", "pid": pid} for pid in range(14)]
    assert "The monitor killed 1 remaining process: python (0)." in text_of(hang(**SLEEPS), killed=killed[:1])
    assert "The monitor killed 14 remaining processes: python (0), " in text_of(hang(**SLEEPS), killed=killed)


def test_every_rank_process_gpu_and_missing_reading_has_its_line():
    card = {"name": "H", "utilization": 3, "memory_used": 2e9, "memory_total": 8e9, "temperature": 50, "power_w": 70.4}
    found = hang(
        ranks=[rank(0, 9), rank(1, 8, phase="save")], processes=[proc(100, "S", True, wchan="futex_wait"), proc(7, "")],
        gpu=[card], gpu_note="the NVIDIA driver has not answered for 40 s", kernel=["NVRM: Xid (PCI:0000:01:00): 79"],
        host={"MemAvailable": 1e9, "MemTotal": 2e9, "disk_free": 3e9, "disk_total": 4e9, "cgroup_limit": 1e9,
              "cgroup_used": 5e8},
        missing=["kernel log: Operation not permitted (/dev/kmsg)"],
    )  # fmt: skip
    text = text_of(found)
    for line in (
        "- Rank 0 (pid 100): training, 9 steps completed, last heartbeat 9.0 s earlier\n",
        "- Rank 1 (pid 101): saving a checkpoint, 8 steps completed",
        "- Process 100 (p): sleeping, waits in futex_wait, 1.0 s of CPU time\n",
        "- Process 7 (p): exited, 1.0 s", "- GPU 0 (H): 3 % busy, 2.0 of 8.0 GB used, 50 °C, 70 W\n",
        "- GPU: the NVIDIA driver has not answered for 40 s\n", "- Kernel log: NVRM: Xid (PCI:0000:01:00): 79\n",
        "- Memory: 1.0 of 2.0 GB available\n", "- Memory of the container: 0.5 of 1.0 GB used\n",
        "- Disk: 3.0 of 4.0 GB free\n", "- Not available: kernel log: Operation not permitted (/dev/kmsg)\n",
    ):  # fmt: skip
        assert line in text, line


HOSTILE = [
    "```", "````text", "# Not a heading", "</code><script>alert(1)</script>", "![x](http://evil/p.png)", "*" * 500, "- item",
    "\x1b[31mred\x1b[0m\x07\x00\x08", "a\u2028b\u0085c\u202ed", "1. one", "> quote", "---", "=====", "~~~",
    "x" * 100_000, "progress 1\rprogress 2\rprogress 3", "\udcff", "a\tb",
]  # fmt: skip


def blocks(text: str) -> list[str]:
    """The structure of a Markdown text: the kinds of its blocks, with HTML, links and images as parsers find them."""
    tokens = MarkdownIt("commonmark").parse(text)
    return [token.type for token in tokens] + [c.type for t in tokens for c in t.children or [] if c.type != "text"]


@pytest.mark.parametrize("line", HOSTILE, ids=[repr(line[:16]) for line in HOSTILE])
def test_a_hostile_line_changes_nothing_of_the_structure(line):
    # Wherever text from outside may stand: the log, its error, notes, names, the kernel's log, states, a change.
    def with_line(line):
        bad = dict(killed=[{"name": line, "pid": 1}], bad_checkpoints=[line], changed=[line], outcome=line)
        trainer = {**proc(1, "S", wchan=line), "name": line}
        note = {**rank(0), "note": line}
        found = crash(
            f"{line}\nValueError: {line}\n", outcome="lora_damaged", note=line, ended=line, kernel=[line],
            gpu_note=line, processes=[trainer], ranks=[note], missing=[line], gpu=[{"name": line}],
        )  # fmt: skip
        error = crash(f"ValueError: {line}\n", ended=line)
        return text_of(found, **bad), text_of(error), text_of(hang(signs=[line], note=line, phase="cache_text"))

    for hostile, harmless in zip(with_line(line), with_line("harmless"), strict=True):
        assert blocks(hostile) == blocks(harmless)
        *_, tail = hostile.partition("The last lines of the log")
        assert all(len(shown) <= incident.WIDTH + 5 for shown in tail.splitlines())
        assert all(c.isprintable() or c == "\n" for c in hostile)


def test_text_is_shown_as_it_is_where_markdown_would_change_it():
    texts = ("KeyError: '__init__'", "C:\\data\\_x", "a*b*c", "[a](b) <c> `d`", "1. x", "#1 of 2", "\\*")
    for text in texts:
        parsed = MarkdownIt("commonmark").parse(incident.escape(text))
        assert "".join(c.content for t in parsed for c in t.children or []) == text
    assert incident.escape("snake_case 2 of 3") == "snake_case 2 of 3"


def test_the_log_shows_a_progress_bar_as_a_person_saw_it():
    text = text_of(crash("steps: 1\rsteps: 2\rsteps: 3\r\nValueError: x\n"))
    assert text.endswith("\n\n    steps: 3\n    ValueError: x\n")
    assert "The last lines of the log" not in text_of(crash(""))


def opened(folder: Path, **values) -> Incident:
    evidence = hang(signs=["sleeping"], log_tail="steps: 3\n", **SLEEPS)
    return Incident.open(RunFolder(folder), evidence, causes.match(evidence), **{**KNOWN, **values})


def test_an_incident_is_read_back_as_it_was_written(tmp_path):
    found = opened(tmp_path)
    found.killed, found.changed, found.resumed_from = [{"name": "python", "pid": 7}], ["no workers"], 8
    assert found.save(RunFolder(tmp_path))
    again = Incident.load(found.folder)
    assert again.cause == found.cause and again.evidence.where() == found.evidence.where() == "one_step (loop.py:1)"
    assert again.evidence.log_tail.strip() == "steps: 3"
    again.evidence.log_tail = found.evidence.log_tail
    assert again.evidence == found.evidence
    before = (found.folder / "report.md").read_text()
    assert again.save(RunFolder(tmp_path)) and (found.folder / "report.md").read_text() == before
    assert {**vars(again), "evidence": 0} == {**vars(found), "evidence": 0}
    values = json.loads((found.folder / "incident.json").read_text())
    keys = "id kind cause title explanation phase step resumed_from steps_repeated detect_s recover_s changed"
    assert {*keys.split(), "started_at", "attempt", "outcome"} <= set(values)
    assert values["evidence"]["stalled_s"] == 2.3
    values["evidence"]["processes"] = [{"pid": 7}]
    (found.folder / "incident.json").write_text(json.dumps(values))
    assert Incident.load(found.folder) is None, "no report could be made of it"
    assert opened(tmp_path).number == "0002"
    assert opened(tmp_path).number == "0002", "the monitor was killed before it had noted the failure"
    assert opened(tmp_path, attempt=2).number == "0003"


def test_after_a_reboot_the_time_of_the_last_progress_comes_from_the_wall_clock(tmp_path, monkeypatch):
    found = opened(tmp_path, started_at=platform.utc(platform.now().wall_s - 100), progress_s=1e9)
    assert Incident.load(found.folder).progress_s == 1e9
    monkeypatch.setattr(platform, "boot_id", lambda: "another")
    assert platform.now().mono_s - Incident.load(found.folder).progress_s == pytest.approx(100, abs=5)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"diagnosis": 3, "evidence": {}}', '{"attempt": 1}'])
def test_a_damaged_incident_is_none(text, tmp_path):
    assert Incident.load(tmp_path / "absent") is None
    (tmp_path / "incident.json").write_text(text)
    assert Incident.load(tmp_path) is None


def test_a_file_that_cannot_be_written_costs_no_other_and_the_next_save_writes_it(tmp_path):
    found = opened(tmp_path)
    for name in ("incident.json", "report.md", "stacks.txt", "log_tail.txt"):
        (found.folder / name).unlink()
    (found.folder / "incident.json").mkdir()  # in the way
    assert not found.save(RunFolder(tmp_path)) and "one_step" in (found.folder / "stacks.txt").read_text()
    assert (found.folder / "report.md").is_file()
    (found.folder / "incident.json").rmdir()
    found.bad_checkpoints = ["toy-\udcff-state.bad"]  # a name that is not UTF-8
    assert found.save(RunFolder(tmp_path)) and Incident.load(found.folder).bad_checkpoints == ["toy-?-state.bad"]


def test_a_folder_that_cannot_be_made_is_made_later_and_one_that_cannot_be_listed_numbers_by_attempt(
    tmp_path, capfd, monkeypatch
):
    (tmp_path / "incidents").write_text("in the way")
    found = opened(tmp_path)
    assert not found.save(RunFolder(tmp_path)) and found.number == "0001"
    assert "cannot write" in capfd.readouterr().err
    (tmp_path / "incidents").unlink()
    assert found.save(RunFolder(tmp_path)) and Incident.load(found.folder) is not None
    monkeypatch.setattr(RunFolder, "incident_numbers", Mock(side_effect=OSError(5, "Input/output error")))
    assert opened(tmp_path, attempt=3).number == "0003"


def test_a_diagnosis_has_the_keys_that_programs_read_and_reads_well():
    evidence = hang(processes=[proc(100, "S", True, wchan="futex_wait")], signs=["sleeping"], **SLEEPS)
    text, found = incident.describe("toy, attempt 1", evidence, Signals(stuck=("sleeping",)), causes.match(evidence))
    keys = {"name", "summary", "phase", "step", "stalled_s", "where", "signals", "cause", "processes", "stacks"}
    assert keys <= set(found)
    assert found["cause"] == "stuck" and json.dumps(found)
    assert "toy, attempt 1: no progress.\nTraining, step 10. Last progress: 2.3 s ago.\n- sleeping\n" in text
    assert "Likely cause if it is stuck: The training hung. No step completed" in text
    assert "  Process 100 (p): sleeping, waits in futex_wait, 1.0 s of CPU time" in text and "Stacks of 100:" in text
    text, calm = incident.describe("process 7", hang(), Signals(), causes.match(hang()))
    assert calm["cause"] is None and calm["ranks"] == [] and text == "process 7: no sign of a hang."
    text, slow = incident.describe("x", hang(), Signals(slow=("the machine is swapping",)), causes.match(hang()))
    assert slow["summary"] == "slow, but making progress" and "- the machine is swapping" in text
