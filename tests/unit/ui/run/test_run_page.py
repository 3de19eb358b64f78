"""A run page: what a tick sends, which run it opens with, and a run that is copied into the tab New LoRA."""

from ui_helpers import lora_file, write_incident, write_run
from ui_markup import sample

from ui.run import actions, run_page


def test_a_tick_opens_no_file_that_did_not_change_and_sends_only_what_changed(data, monkeypatch):
    for n in range(30):
        write_run(data, f"run {n}", state="completed")
    folder = write_run(data, "shown", state="stopped")
    write_incident(folder)
    (folder / "metrics.jsonl").write_text("".join(f'{{"kind":"step","step":{s},"loss":1}}\n' for s in range(1, 400)))
    (folder / "training.log").write_text("one\n")
    lora_file(folder / "shown.safetensors", 3)
    sample(folder, "shown_000100_00_20260101120000_42.png")
    first = run_page.render("shown", "")
    opened, real = [], type(folder).read_text
    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "read_text", lambda path, *a, **k: opened.append(path.name) or real(path, *a, **k))
        patch.setattr("safetensors.safe_open", lambda *a, **k: opened.append("lora"))
        again = run_page.refresh("shown", first[1])
    assert all(isinstance(part, dict) and part.get("__type__") == "update" and len(part) == 1 for part in again[2:])
    assert set(opened) <= {"sample_prompts.txt"}  # the samples are a moment old
    lora_file(folder / "shown-step00000002.safetensors", 2)
    third = run_page.refresh("shown", again[1])
    shown = dict(zip(run_page.PARTS, third[2 : 2 + len(run_page.PARTS)], strict=True))
    assert [name for name, part in shown.items() if not isinstance(part, dict)] == ["loras"]


def test_a_page_opens_with_the_run_in_its_address_or_a_running_one_and_says_what_to_do_without(data, monkeypatch):
    parts = run_page.render("", "")
    assert "No runs yet" in parts[2] and "No run selected" in parts[3]
    gone = run_page.refresh("<gone>", "")  # no other run takes its place, about which a question may still be open
    assert gone[0] == {"__type__": "update"} and "The run &#39;&lt;gone&gt;&#39; was renamed or deleted" in gone[3]
    write_run(data, "old", state="completed")
    write_run(data, "busy")
    assert run_page.first_run("old") == "old"
    assert run_page.first_run("no-such-run") == "" and run_page.first_run("") == ""
    assert run_page.refresh("old", "")[0] == {"__type__": "update"}, "a late refresh does not undo a click"
    assert run_page.refresh("", "")[0] == {"__type__": "update"} and run_page.newest() in ("old", "busy")
    monkeypatch.setattr("ui.run.view.is_held", lambda path: True)
    assert run_page.first_run("") == "busy"


def test_a_press_acts_on_the_run_that_is_shown_wherever_the_server_was_started(data, tmp_path, monkeypatch):
    shown = write_run(data, "cat", state="stopped")
    write_run(tmp_path / "elsewhere", "cat", state="stopped")
    monkeypatch.chdir(tmp_path / "elsewhere" / "outputs")
    pressed = []
    monkeypatch.setattr(actions, "stop", pressed.append)
    run_page.stop("cat")
    assert pressed == [shown]
