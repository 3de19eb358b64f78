"""When the next attempt's script is rendered, from what, what a failure of that costs; the subprocess is replaced."""

import io
import json
import os
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from runs_helpers import folder_of

from monitor.resume import next_attempt
from monitor.resume.next_attempt import REST_S, STAND_IN, Prewarm, Rendered
from monitor.run_folder import MonitorError, RunFolder

ONE = {"name": "one", "sentence": "s", "patch": {}}


def job(answer=None, code=0, error="", done=True) -> Mock:
    """A subprocess that has answered at once, or that fails."""
    return Mock(code=code, error=error, done=Mock(return_value=done), answer=Mock(return_value=answer))


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The folder of a run; the requests so far; the jobs that answer the next ones."""
    (tmp_path / "run.toml").write_text('name = "toy"\nsave_dir = "/x"\n')
    (tmp_path / "job.json").write_text("{}")
    asked, replies = [], []
    monkeypatch.setattr(next_attempt, "_job", lambda folder, request, _: asked.append(request) or replies.pop(0))
    return RunFolder(tmp_path), asked, replies


def test_the_next_script_is_rendered_once_until_the_job_or_the_changes_differ(jobs):
    folder, asked, replies = jobs
    prewarm = Prewarm(folder, 9.0)
    text = f"go {folder.folder / STAND_IN}\n"
    waiting = job(done=False)
    replies += [waiting, job(), job({"text": text, "save_dir": "/s", "alone": "it copies"})]
    prewarm.tick(100.0, [])
    prewarm.tick(109.0, [])
    assert [(request["want"], request["changes"]) for request in asked] == [("text", [])]
    assert prewarm.prepared([]) == ("", "")
    prewarm.close()
    waiting.kill.assert_called_once()
    waiting.done.return_value = True  # it failed: the restart renders it, and reports what is wrong
    for now_s, requests in ((110.0, 1), (100.0 + REST_S - 1, 1), (100.0 + REST_S, 2), (180.0, 2), (400.0, 3)):
        prewarm.tick(now_s, [])
        assert len(asked) == requests, now_s
    prewarm.tick(500.0, [])
    assert len(asked) == 3 and prewarm.prepared([]) == (text, "it copies")
    for number, place in ((2, "/my disk's \udce9"), (3, str(folder.folder))):  # `save_dir`: another word of the shell
        state = Path(place) / "toy-step00000010-state"
        ready = prewarm.render(number, state, [], [], None)
        assert ready == Rendered(folder.folder / f"train.attempt-{number}.sh", "/s")
        assert shlex.split(os.fsdecode(ready.script.read_bytes())) == ["go", str(state)]
        assert os.access(ready.script, os.X_OK)
    made = {"script": "/made", "save_dir": "", "compatible": False}
    for resume, changes, at_save in ((None, [], []), (state, [ONE], ["one"]), (state, [], ["one"])):
        replies.append(job(made))
        assert str(prewarm.render(3, resume, changes, at_save, None).script) == "/made"
        request = {"want": "script", "number": 3, "resume": resume, "changes": changes, "was": at_save}
        assert asked[-1] == request
    assert prewarm.render(1, None, [], [], None) == Rendered(folder.folder / "train.sh", "/x")
    os.utime(folder.folder / "job.json", (0, 0))
    replies.append(job(made))
    assert str(prewarm.render(3, state, [], [], None).script) == "/made", "another job"


def test_what_the_subprocess_refuses_is_said_and_what_it_cannot_do_is_tried_again(jobs, tmp_path_factory):
    folder, asked, replies = jobs
    refused = {"problems": ["no model"], "notes": ["written again"]}
    replies += [job(refused), job(None, 1, "render: no tier"), job(None, -9)]
    assert next_attempt.start_problems(folder, 9.0, None) == ["no model"]
    assert "job: written again" in (folder.folder / "monitor.log").read_text()
    with pytest.raises(MonitorError, match=r"^no tier$"):
        next_attempt.start_problems(folder, 9.0, None)
    with pytest.raises(OSError, match="gave no result"):
        next_attempt.start_problems(folder, 9.0, None)
    own = RunFolder(tmp_path_factory.mktemp("own"))
    assert next_attempt.start_problems(own, 9.0, None) == []
    assert next_attempt.next_change(own, ["two"], [], 9.0, None) == {}
    assert next_attempt.next_change(folder, ["one"], [ONE], 9.0, None) == {} and len(asked) == 3
    replies += [job({"name": "two", "refused": ["one: edited"]}), job(None, 1, "render: no tier")]
    assert next_attempt.next_change(folder, ["one", "two"], [ONE], 9.0, None) == {"name": "two"}
    assert asked[-1] == {"want": "change", "ladder": ["two"], "changes": [ONE]}
    assert next_attempt.next_change(folder, ["two"], [], 9.0, None) == {}
    log = (folder.folder / "monitor.log").read_text()
    assert "not_mitigated: one: edited" in log and "the run is not changed: no tier" in log


def test_a_script_that_the_disk_does_not_take_is_tried_again(data, tmp_path, monkeypatch, capsys):
    folder = folder_of(tmp_path)
    (folder / "train.attempt-2.sh").mkdir()
    request = {"want": "script", "number": 2, "resume": None, "changes": [], "was": []}
    monkeypatch.setattr(sys, "argv", ["", str(folder)])
    for number, name, code in ((2, "", 3), (3, "", 0), (3, "no_such", 1)):
        changes = [{"name": name}] if name else []
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request | {"number": number, "changes": changes})))
        assert next_attempt.main() == code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "line", "reason"),
    [
        ({}, "", ""),
        ({}, "python prepare.py\n", "the script was edited, and what it does before the training is not known"),
        ({"save_dir": "/var/tmp/fast"}, "", "the script copies its results when it ends"),
    ],
)
def test_a_script_of_which_two_must_not_run_at_once_says_why(data, tmp_path, fields, line, reason):
    folder = folder_of(tmp_path, **fields)
    script = folder / "train.sh"
    script.write_text(script.read_text().replace("set -eu\n", f"set -eu\n{line}"))
    next_attempt.respond(folder, {"want": "problems"})  # the start takes over what was edited
    assert len((folder / ".run-id").read_text()) == 32  # for `save_local`: later the disk may refuse it
    found = next_attempt.respond(folder, {"want": "text", "resume": folder / STAND_IN})
    copied_from = f"/var/tmp/fast/{folder.name}" if "save_dir" in fields else ""
    assert (found["alone"], found["save_dir"]) == (reason, copied_from)
    assert line in found["text"] and STAND_IN in found["text"]


def test_a_run_in_a_folder_of_another_name_is_not_trained_for_a_lora_that_nobody_finds(data, tmp_path):
    folder = folder_of(tmp_path)
    made = (folder / "train.sh").read_text()
    for old, new in (("output_name ", "output_name my-"), (f"output_dir {folder}", f"output_dir {folder}/loras")):
        (folder / "train.sh").write_text(made.replace(old, new))
        (problem,) = next_attempt.respond(folder, {"want": "problems"})["problems"][-1:]
        assert problem.startswith(f"train.sh has --{new}") and "not found; set it to" in problem
    (folder / "train.sh").write_text(made)
    assert "not found" not in str(found := next_attempt.respond(folder, {"want": "problems"}))
    assert "rename the folder" not in str(found)
    (problem,) = next_attempt.respond(folder.rename(folder.with_name("dog")), {"want": "problems"})["problems"][-1:]
    name = folder.name
    assert problem.startswith(f"the folder dog has the run {name}: rename the folder to {name}, or, of a copy")
