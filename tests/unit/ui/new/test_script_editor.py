"""The edited script: what is stored, what later settings change, what a run gets of it."""

import pytest
from configure_helpers import DRAFT, do, edit

import runs
from runs.files import RunError
from ui.dataset import draft
from ui.new import form, script_editor, settings


def test_an_edit_is_stored_and_two_windows_overwrite_nothing(filled):
    first = do("start")
    saved = do("save", text=edit(first["script"]), version="")
    assert saved["ok"] and saved["version"] and not saved["changed"]
    theirs = do("save", text=first["script"] + "# theirs\n", version="")
    assert theirs["conflict"]["script"] == edit(first["script"]) and any("theirs" in line for line in theirs["changed"])
    assert script_editor.stored(filled)["script"] == edit(first["script"])
    assert do("save", text=edit(first["script"]) + "# both\n", version=saved["version"])["ok"]


def test_later_settings_do_not_change_it_and_start_asks_which_one(filled):
    text = edit(do("start")["script"])
    do("save", text=text, version="")
    draft.save_fields(DRAFT, {"max_train_steps": "20"})
    spec = form.spec_of(settings.current(DRAFT))
    with pytest.raises(RunError, match="settings changed after you edited"):
        script_editor.for_run(DRAFT, spec)
    shown = script_editor.value(DRAFT, runs.script(spec, runs.outputs_dir() / "cat"), True)
    assert "+  --max_train_steps 20 \\" in shown["changed"] and shown["script"] == text
    kept = do("keep")
    assert kept["script"] == text and script_editor.for_run(DRAFT, spec).max_train_steps == 12
    draft.save_fields(DRAFT, {"max_train_steps": "24"})
    merged = do("merge")
    assert "--max_train_steps 24" in merged["script"] and "# mine" in merged["script"] and not merged["left"]
    back = do("discard")
    assert "# mine" not in back["script"] and back["before"] == merged["script"] and script_editor.stored(DRAFT) is None


def test_the_name_of_the_run_follows_the_form(filled):
    do("save", text=edit(do("start")["script"]), version="")
    draft.save_fields(DRAFT, {"name": "dog"})
    spec = script_editor.for_run(DRAFT, form.spec_of(settings.current(DRAFT)))
    text = runs.script(spec, runs.outputs_dir() / "dog")
    assert "--output_name dog" in text and "# mine" in text and "/cat" not in text


def test_findings_come_with_a_line_and_a_fix(filled):
    text = do("start")["script"].replace("--output_name cat", "--output_name other")
    (found,) = do("save", text=text, version="")["findings"]
    assert found["level"] == "error" and "--output_name" in text.splitlines()[found["line"] - 1]
    assert "--output_name cat" in do("fix", text=text, fix=found["fix"])["script"]


def test_a_run_copied_into_the_form_brings_its_script(filled):
    do("save", text=edit(do("start")["script"]), version="")
    spec = script_editor.for_run(DRAFT, form.spec_of(settings.current(DRAFT)))
    other = "e" * 24
    script_editor.copy_from_run(other, spec)
    assert "# mine" in script_editor.stored(other)["script"]
    script_editor.copy_from_run(other, form.spec_of(settings.current(DRAFT)))
    assert script_editor.stored(other) is None
