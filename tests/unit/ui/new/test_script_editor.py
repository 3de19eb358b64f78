"""The edited script: what is stored, what later settings change, what a run gets of it."""

import pytest
from configure_helpers import DRAFT, edit

import runs
from runs.files import RunError
from ui.dataset import draft
from ui.dataset.images import image_action
from ui.new import form, run_starts, script_editor


def text_of(draft_id: str = DRAFT) -> str:
    """The script that the page shows."""
    return script_editor.shown(draft_id).text


def spec_of() -> "runs.RunSpec":
    return form.spec_of(form.current(DRAFT))


def test_an_edit_is_stored_and_an_editor_without_a_change_is_none(filled):
    generated = text_of()
    script_editor.save(DRAFT, generated)
    assert script_editor.stored(DRAFT) is None and not script_editor.shown(DRAFT).edited
    script_editor.save(DRAFT, edit(generated))
    found = script_editor.shown(DRAFT)
    assert found.edited and found.ready and found.text == edit(generated) and not found.changed
    script_editor.save(DRAFT, generated)
    assert text_of() == generated, "what was typed last counts"


def test_later_settings_do_not_change_it_and_start_asks_which_one(filled):
    text = edit(text_of())
    script_editor.save(DRAFT, text)
    draft.save_fields(DRAFT, {"max_train_steps": "20"})
    with pytest.raises(RunError, match="settings changed after you edited"):
        run_starts.for_run(DRAFT, spec_of())
    shown = script_editor.shown(DRAFT)
    assert "+  --max_train_steps 20 \\" in shown.changed and shown.text == text
    assert script_editor.follow(DRAFT, merge=False) == []
    assert text_of() == text and run_starts.for_run(DRAFT, spec_of()).max_train_steps == 12
    draft.save_fields(DRAFT, {"max_train_steps": "24"})
    assert script_editor.follow(DRAFT, merge=True) == []
    assert "--max_train_steps 24" in text_of() and "# mine" in text_of()
    script_editor.discard(DRAFT)
    assert "# mine" not in text_of() and script_editor.stored(DRAFT) is None
    with pytest.raises(RunError):
        script_editor.follow(DRAFT, merge=True)


def test_a_script_that_is_discarded_leaves_no_secret_to_the_next_one(filled):
    script_editor.save(DRAFT, f"{text_of()}\nexport WANDB_API_KEY=0123456789abcdef0123\n")
    assert run_starts.for_run(DRAFT, spec_of()).environment == {"WANDB_API_KEY": "0123456789abcdef0123"}
    script_editor.discard(DRAFT)
    script_editor.save(DRAFT, edit(text_of()))
    assert run_starts.for_run(DRAFT, spec_of()).secrets == []


@pytest.mark.parametrize("edited", [True, False])
def test_the_name_of_the_run_follows_the_form(filled, edited):
    base = text_of()
    text = edit(base)
    if edited:
        script_editor.save(DRAFT, text, base)
    draft.save_fields(DRAFT, {"name": "dog"})
    script_editor.save(DRAFT, f"{text}# more\n", base)  # typed before the page showed the new name
    spec = run_starts.for_run(DRAFT, spec_of())
    text = runs.script(spec, runs.outputs_dir() / "dog")
    assert "--output_name dog" in text and "# mine" in text and "# more" in text and "/cat" not in text


def test_names_that_a_first_edit_changes_stay_as_they_were_typed(filled):
    base = text_of()
    text = base.replace("cat", "dog")
    script_editor.save(DRAFT, text, base)
    assert text_of() == text and not script_editor.shown(DRAFT).changed
    assert {problem.level for problem in script_editor.shown(DRAFT).problems} == {"error"}, "Start refuses it"


def test_problems_come_with_a_line(filled):
    text = text_of().replace("--output_name cat", "--output_name other")
    script_editor.save(DRAFT, text)
    (found,) = script_editor.shown(DRAFT).problems
    assert found.level == "error" and "--output_name" in text.splitlines()[found.line - 1]


def test_a_run_copied_into_the_form_brings_its_script(filled):
    script_editor.save(DRAFT, edit(text_of()))
    spec = run_starts.for_run(DRAFT, spec_of())
    other = "e" * 24
    script_editor.copy_from_run(other, spec)
    assert "# mine" in script_editor.stored(other)["script"]
    script_editor.copy_from_run(other, spec_of())
    assert script_editor.stored(other) is None


def test_a_script_that_is_too_large_is_refused(filled):
    answer = image_action({"action": "save_script", "draft": DRAFT, "text": "x" * 300_000})
    assert answer["ok"] is False and "larger than" in answer["error"] and script_editor.stored(DRAFT) is None


def test_settings_without_a_script_say_so_and_keep_the_edited_one(filled):
    text = edit(text_of())
    script_editor.save(DRAFT, text)
    draft.save_fields(DRAFT, {"rank": "many"})
    with pytest.raises(RunError, match="no script yet"):
        script_editor.save(DRAFT, text + "# more\n")
    found = script_editor.shown(DRAFT)
    assert (found.text, found.edited, found.ready) == (text, True, False)
