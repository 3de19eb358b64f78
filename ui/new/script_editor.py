"""The script of step 3 as a person edits it: stored with the draft, checked while it is typed, run exactly as written.

A draft's folder has `script.json`: the edited script, and the script that the form gave when it was edited. What was
typed last counts; other windows show it. The form's later changes never change the edited script: a notice shows them,
and the person chooses. Only the run's name and folder follow the form.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import presets
import runs
from runs import custom_script, env_file, pin
from runs.files import Fault, RunError, atomic_write, explained
from runs.folders import with_own_save_dir
from ui import scripts
from ui.dataset import draft
from ui.dataset.draft import OUT_OF_DATE, Text
from ui.html import part
from ui.new import form

STALE = "The settings changed after you edited the script. Open “The script” and choose which of both is used"
NO_SCRIPT = "There is no script yet: correct the errors in the form first"
_lock = threading.Lock()
ERRORS = (RunError, presets.PresetError)


def stored(draft_id: str) -> dict[str, str] | None:
    """The edited script of a draft ("script", "generated"); None where it is not edited. RunError: the file is damaged."""
    path = draft.edited_script(draft_id)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: str(found[key]) for key in ("script", "generated")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}); move it to another folder, then reload the page") from error


def save(draft_id: str, text: Text, base: Text = "") -> None:
    """Store an edited script. base: the script that the page showed when the edit began, of which the first one counts.

    RunError: it is too large, or the settings give no script to compare it with.
    """
    now = _generated(draft_id)
    if len(text.encode("utf-8", "replace")) > custom_script.MAX_BYTES:
        raise RunError(f"The script is larger than {custom_script.MAX_BYTES // 1000} kB; shorten it")
    with _lock:
        known = stored(draft_id)
        if known or text != now:
            before = known["generated"] if known else base or now
            _write(draft_id, *(custom_script.follow(one, before, now) for one in (text, before)))  # the name of now


def _write(draft_id: str, script: str, generated: str) -> None:
    """Store an edited script, its secrets apart."""
    path = draft.edited_script(draft_id)
    script, apart = env_file.of_script(script)
    env_file.write(path, {**env_file.read(path), **apart})
    with explained("store the script"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps({"script": script, "generated": generated}))


def discard(draft_id: str) -> None:
    """Use the generated script again, and forget the secrets of the edited one."""
    with _lock, explained("use the generated script"):
        draft.edited_script(draft_id).unlink(missing_ok=True)
        env_file.forget(draft.edited_script(draft_id))


def follow(draft_id: str, merge: bool) -> list[str]:
    """Store the edited script for the changed settings: as it is, or with these; returns what could not be merged."""
    now = _generated(draft_id)
    with _lock:
        known = stored(draft_id)
        if known is None:
            raise RunError(OUT_OF_DATE)
        scripts = known["script"], known["generated"], now
        text, left = custom_script.merged(*scripts) if merge else (custom_script.follow(*scripts), [])
        _write(draft_id, text, now)
    return list(left)


def copy_from_run(draft_id: str, spec: "runs.RunSpec") -> None:
    """Take over a run's script with its settings: the edited one, or none."""
    discard(draft_id)
    env_file.write(
        draft.folder(draft_id), {name: spec.environment[name] for name in spec.secrets if name in spec.environment}
    )
    if spec.edited:
        _write(draft_id, spec.edited.script, spec.edited.generated)


def adopted(draft_id: str, spec: "runs.RunSpec") -> "runs.RunSpec":
    """The spec of a run (run_starts.for_run) with the draft's edited script.

    Raises:
        RunError: Start refuses the script, or the settings changed after it was edited.
    """
    if (known := stored(draft_id)) is None:
        return spec
    folder = runs.outputs_dir() / spec.slug
    now = runs.script(spec, folder)
    if changed_settings(known["generated"], now):
        raise RunError([Fault("script", STALE)])
    spec = env_file.with_values(spec, env_file.read(draft.edited_script(draft_id)))
    return pin.adopt(spec, custom_script.follow(known["script"], known["generated"], now), folder)


def changed_settings(base: str, now: str) -> list[str]:
    """How the generated script differs from the one that was edited, as lines of a diff without the run's name."""
    return custom_script.diff(custom_script.follow(base, base, now), now)


def reviewed(draft_id: str, review: form.Review) -> form.Review:
    """A review with the settings that the edited script has, for the plan and the estimates."""
    try:
        known = stored(draft_id)
        if known is None or review.spec is None:
            return review
        spec, folder = with_own_save_dir(review.spec), runs.outputs_dir() / review.spec.slug
        text = custom_script.follow(known["script"], known["generated"], runs.script(spec, folder))
        spec = pin.adopt(spec, text, folder).changed(edited=None)
        return replace(review, spec=spec, buckets=form.buckets_of(spec, review.images, review.items))
    except RunError:
        return review


@dataclass(frozen=True)
class Shown:
    """The script as the page shows it. ready: whether `text` is a script, and not the reasons why there is none.

    changed: how the generated script differs from the one that was edited, as lines of a diff.
    """

    text: str
    edited: bool
    ready: bool
    changed: list[str]
    problems: list[custom_script.Problem]


def shown(draft_id: str) -> Shown:
    """The edited script of a draft, or the generated one; comments where the draft cannot be read."""
    try:
        generated, ready = form.script_of(form.reviewed(draft_id))
        known = stored(draft_id)
        if known is None or not ready:
            return Shown(known["script"] if known else generated, known is not None, ready, [], [])
        text = custom_script.follow(known["script"], known["generated"], generated)
        changed = changed_settings(known["generated"], generated)
        return Shown(text, True, True, changed, custom_script.problems(text, generated))
    except ERRORS as error:
        return Shown("".join(f"# {line}\n" for line in str(error).splitlines()), False, False, [], [])


def _generated(draft_id: str) -> str:
    """The script that the stored settings give. RunError: they give none."""
    text, ready = form.script_of(form.reviewed(draft_id))
    if not ready:
        raise RunError(NO_SCRIPT)
    return text


# The fold -------------------------------------------------------------------------------------------------------------

MOST_PROBLEMS = 50
DISCARD, SURE = "Use the generated script", "Discard your script? Press again"
# What ui/new/fields.js does with the editor. A text that is not stored yet stays. It is sent with its base.
TYPED = """(text) => {
  if (typeof text === 'string') hangproof.typed('script', 'text', { text, base: hangproof.script });
  return [];
}"""
IN_EDITOR = "(text, ...rest) => [hangproof.unsaved('script').length ? null : text, ...rest]"
# A script is not shown where another text was typed since the last one. That text is sent, and shown then.
ARRIVED = """(late, text) => {
  const untyped = late.now && [late.now, late.of, hangproof.script].includes(text);
  return untyped ? (hangproof.script = late.now) : { __type__: 'update' };
}"""
# The second press forgets what was typed, once nothing of it is on its way to the server.
FORGET = (
    f"async (label) => {{ if (label === '{SURE}') {{ await hangproof.send(); hangproof.forget('script', 'text'); }}"
    " return label; }"
)


def draw(draft_id: str, images: Any, more: Callable[[str], None]) -> None:
    """Make the components of the fold. images: the component whose event `script` says that something of the draft
    changed. more: draws more buttons."""
    import gradio as gr

    from ui.run import fold
    from ui.run.fold import QUIET

    def parts_of(now: Shown, editing: bool) -> list[dict[str, Any]]:
        """The properties of the editor, its buttons and the text below it."""
        said = (now.problems[:MOST_PROBLEMS], now.changed)
        about = part("new/folds.html", "script", *said) if now.edited else ""
        return [
            {"value": now.text, "interactive": editing and (now.ready or now.edited)},
            {"visible": not editing, "interactive": now.ready},
            *[{"visible": bool(now.changed)}] * 2,
            {"visible": editing, "value": DISCARD},
            {"value": about},
        ]

    now = shown(draft_id)
    of_code, of_edit, of_keep, of_merge, of_back, of_about = parts_of(now, now.edited)
    editing = gr.State(now.edited)
    code = gr.Code(language="shell", max_lines=24, show_label=False, buttons=["copy"], elem_id="script", **of_code)
    with gr.Row(elem_classes="hp-actions"):
        small: dict[str, Any] = {"size": "sm", "scale": 0, "min_width": 150}
        edit = gr.Button("Edit the script", elem_id="edit-script", **small, **of_edit)
        keep = gr.Button("Keep mine", elem_id="keep-script", **small, **of_keep)
        merge = gr.Button("Apply the changes to mine", elem_id="merge-script", **small, **of_merge)
        back = gr.Button(elem_id="discard-script", **small, **of_back)
        more(draft_id)
    note, late = gr.HTML(apply_default_css=False), gr.JSON(visible=False)
    about = scripts.drawn("script-tools", **of_about)
    parts = [editing, code, edit, keep, merge, back, about]

    def draw(text: str | None = "", editing: bool = False) -> list[Any]:
        """Updates of `parts`. text: what the editor shows; None: it has a text that is not stored yet."""
        now = shown(draft_id)
        editing = editing or now.edited
        of_code, *others = parts_of(now, editing)
        if text is None or text == now.text:
            del of_code["value"]
        return [editing, *(gr.update(**one) for one in (of_code, *others))]

    def on_change(text: str | None, editing: bool) -> list[Any]:
        editing, of_code, *others = draw(text, editing)
        return [{"of": text, "now": of_code.pop("value", text)}, editing, of_code, *others]

    def on_drawn(text: str | None, editing: bool) -> list[Any]:
        """A field can have been stored while the fold was on its way to the page."""
        if shown(draft_id) == now:
            return [{"of": text, "now": None}, *[gr.skip()] * len(parts)]
        return on_change(text, editing)

    def acted(act: Any, *args: Any) -> list[Any]:
        try:
            left = act(draft_id, *args)
        except ERRORS as error:
            return [*draw(None, True), fold.note(error, True)]
        said = f"Not applied, because you changed these places: {'; '.join(left)}." if left else ""
        return [*draw(), fold.note(said, True)]

    def on_discard(label: str) -> list[Any]:
        if label == SURE:
            return acted(discard)
        return [*[gr.skip()] * 5, SURE, *[gr.skip()] * 2]

    changed = [*parts, note]
    code.input(None, code, None, js=TYPED, **QUIET)
    for event, act, key in ((images.script, on_change, "script-shown"), (about.drawn, on_drawn, "script-drawn")):
        more_of: dict[str, Any] = {"trigger_mode": "always_last", "key": key, **QUIET}
        late_script = event(act, [code, editing], [late, *parts], js=IN_EDITOR, **more_of)
        late_script.then(None, [late, code], code, js=ARRIVED, **QUIET)
    edit.click(lambda _: draw(None, True), code, parts, js="(text) => [(hangproof.script = text)]", **QUIET)
    for event in (
        keep.click(lambda: acted(follow, False), None, changed, js=form.FLUSH, **QUIET),
        merge.click(lambda: acted(follow, True), None, changed, js=form.FLUSH, **QUIET),
        back.click(on_discard, back, changed, js=FORGET, **QUIET),
    ):
        event.then(None, None, None, js=form.SYNC, **QUIET)  # the plan and the other tabs
