"""The fold "Templates and import" of step 2: settings of a name or of another trainer's files, shown before use.

Nothing changes before "Use these settings". They are then stored as if they were typed, and the page shows them.

A template is the form's settings under a name, without images, name and trigger word. Each is a file in the data
folder's `templates/`, named by a digest of the template's name, so that no name is a path. A template replaces another
one only on purpose.
"""

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

import presets
import runs
from monitor.phrases import count
from runs import env_file
from runs.files import RunError, atomic_write, explained
from runs.machine import this_machine, tier_for
from runs.paths import data_root
from ui.dataset import checks, imports
from ui.html import part
from ui.new import form
from ui.run import fold
from ui.run.fold import QUIET

if TYPE_CHECKING:
    from runs.foreign_settings import Settings

TEXT = 300  # characters of a value that is shown
LEFT_OUT = ("name", "trigger", "control_dir")  # of one LoRA, not of a kind of LoRA
MAX_NAME, MAX_BYTES, MAX_TEMPLATES = 80, 200_000, 1000
SAVING = threading.Lock()  # of two windows that save one name, the second is refused


# Templates -----------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where the templates are."""
    return data_root() / "templates"


def listing() -> list[dict[str, Any]]:
    """All templates by name: {key, name, about}."""
    found = []
    for path in sorted(folder().glob("*.json"))[:MAX_TEMPLATES]:
        try:
            one = _read(path)
            found.append({"key": path.stem, "name": one["name"], "about": _about(one)})
        except RunError as error:
            found.append({"key": path.stem, "name": path.name, "about": str(error)})
    return sorted(found, key=lambda one: str(one["name"]).casefold())


def _about(one: Mapping[str, Any]) -> str:
    """What a template sets, in a few words."""
    values = one["values"]
    model = presets.models().get(str(values.get("model")))
    parts = [model["name"] if model else "", f"rank {values['rank']}" if "rank" in values else ""]
    parts += [f"{values['resolution']} pixels" if "resolution" in values else ""]
    return " · ".join([*(part for part in parts if part), f"saved {one['saved_at'][:10]}"])


def _path(name: str) -> Path:
    return folder() / f"{hashlib.sha256(name.casefold().encode('utf-8', 'replace')).hexdigest()[:24]}.json"


def _of_key(key: object) -> Path:
    if not isinstance(key, str) or len(key) != 24 or not set(key) <= set("0123456789abcdef"):
        raise RunError("There is no such template; reload the page")
    return folder() / f"{key}.json"


def _read(path: Path) -> dict[str, Any]:
    """A template's file. RunError: it is gone or damaged."""
    try:
        one = {"saved_at": "", **json.loads(path.read_text(encoding="utf-8"))}
        if not isinstance(one["values"], dict) or not all(isinstance(one[key], str) for key in ("name", "saved_at")):
            raise ValueError("a name, a time or values are missing")
        json.dumps(one, ensure_ascii=False).encode()  # half a character cannot be sent to a browser
        return {**one, "values": _fields(one["values"])}
    except FileNotFoundError as error:
        raise RunError("This template was deleted in another window") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; check its disk and its permissions") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} cannot be read; delete the template, or repair the file") from error


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the form has fields for, and only plain ones."""
    keys = [key for key in form.KEYS if key not in LEFT_OUT]
    plain = (str, int, float, bool, type(None))
    found = {key: values[key] for key in keys if key in values and isinstance(values[key], plain)}
    if isinstance(found.get("flags"), str):
        found["flags"] = env_file.of_lines(found["flags"])[0]
    return found


def clean_name(name: object) -> str:
    """A template's name: one line of 1 to 80 characters. RunError otherwise."""
    text = " ".join(name.replace("\0", " ").split()) if isinstance(name, str) else ""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if not text or len(text) > MAX_NAME:
        raise RunError(f"Give the template a name of 1 to {MAX_NAME} characters")
    return text


def save_template(name: object, values: Mapping[str, Any], replace: bool = False) -> dict[str, Any]:
    """Save the form's values as a template; returns {key, name}.

    Raises:
        RunError: the name is taken and not to be replaced, or the disk does not take it.
    """
    text = clean_name(name)
    path, saved_at = _path(text), datetime.now(UTC).isoformat(timespec="seconds")
    content = json.dumps({"name": text, "saved_at": saved_at, "values": _fields(values)}, indent=1)
    if len(content) > MAX_BYTES:
        raise RunError(f"The settings have more than {MAX_BYTES // 1000} kB; shorten the prompts")
    with explained("save the template"), SAVING:
        folder().mkdir(parents=True, exist_ok=True)
        if path.exists() and not replace:
            raise RunError(f"A template named “{text}” exists already. Replace it, or choose another name")
        atomic_write(path, content)
    return {"key": path.stem, "name": text}


def delete_template(key: object) -> None:
    """Delete a template."""
    path = _of_key(key)
    with explained("delete the template"):
        path.unlink(missing_ok=True)


def values_of(key: object) -> dict[str, Any]:
    """The form's values that a template sets, by field. RunError: there is no such template."""
    values: dict[str, Any] = _read(_of_key(key))["values"]
    known = form.restored(values)  # without a choice that no longer exists, such as a removed base model
    return {name: known[name] for name in values}


# Changes and imports --------------------------------------------------------------------------------------------------


def changes(values: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What the form would change: (shown now, shown then) by field, for each field with another value."""
    return {
        key: (_shown(key, now[key]), _shown(key, value))
        for key, value in values.items()
        if key in form.KEYS and not form.same(value, now[key])
    }


def _shown(key: str, value: object) -> str:
    """A value as the form shows it."""
    fields = (form.SUBJECT, *form.MORE, *form.SAMPLES)
    choices = {one.key: {choice: label for label, choice in one.choices} for one in fields if one.choices}
    choices |= {"model": {name: one["name"] for name, one in presets.models().items()}, "backend": form.BACKENDS}
    choices["tier"] = {name: one["label"] for name, one in presets.tiers().items()}
    if value in choices.get(key, {}):
        return str(choices[key][value])
    value = env_file.of_lines(value)[0] if key == "flags" and isinstance(value, str) else value
    return checks.shortened("" if value is None else f"{value:g}" if isinstance(value, float) else str(value), TEXT)


def read_files(files: list[tuple[str, str]]) -> "Settings":
    """What some configuration files of another trainer set. RunError: they cannot be imported; the message says why."""
    from runs.foreign import read
    from runs.foreign_spec import convert

    machine = this_machine()
    return convert(read(files), tier_for(machine) if machine.vram_gb else "")


def form_values(found: "Settings", now: Mapping[str, Any]) -> dict[str, Any]:
    """The form's values that an import sets; the other fields keep theirs."""
    fields = {key: value for key, value in found.fields.items() if value is not None}
    whole = "model" in fields
    base = {} if whole else {key: now[key] for key in ("model", "backend")}
    try:
        spec = runs.make({"name": "my-lora", **base, **fields})
    except RunError:
        return {key: value for key, value in fields.items() if key in form.KEYS}
    given = form.values_of_spec(spec, {})
    # Stored apart: draft.save_fields
    given["flags"] += "".join(f"{name}={form.as_text(spec.environment[name])}\n" for name in spec.secrets)
    keys = set(found.fields) | ({*form.MODEL_FIELDS, "flags"} if whole else set())
    keys |= {"flags"} if given["flags"] else set()
    if not whole and given["flags"]:
        given["flags"] = f"{(now['flags'] or '').rstrip()}\n{given['flags']}".lstrip()
    return {key: given[key] for key in form.KEYS if key in keys}


def folder_problem(path: str) -> str:
    """Why an image folder that a file names cannot be added; "" where it can."""
    try:
        imports.given_folder(path)
    except RunError as error:
        return str(error)
    return ""


# The fold -------------------------------------------------------------------------------------------------------------

OUTCOMES = {
    "dropped": "Left out: can hang",
    "unsupported": "Not taken over",
    "changed": "Changed",
    "flag": "Extra option",
    "field": "Taken over",
    "same": "Set already",
    "run": "Set by Hangproof",
}  # what needs a look comes first
LONGEST = 1_000_000  # characters of a file or of what is pasted
MOST_FILES = MOST_FOLDERS = 20
DELETE, SURE = "Delete this template", "Delete it now? Press again"


def draw(draft_id: str) -> None:
    """Make the components of the fold."""

    def choices() -> list[tuple[str, str]]:
        return [(f"{one['name']} · {one['about']}", one["key"]) for one in listing()]

    fold.say("A template holds all settings of this form except the name, the trigger word and the images.")
    known = choices()
    template = gr.Dropdown(
        known, value=None, label="Template", visible=bool(known), elem_id="template", interactive=True
    )
    delete = gr.Button(DELETE, size="sm", visible=False, elem_id="template-delete")
    with gr.Row(elem_classes="hp-fields"):
        name = fold.line("Name of a new template", placeholder="My portraits", max_length=MAX_NAME)
        replace = gr.Checkbox(label="Replace the template of this name", interactive=True, elem_id="template-replace")
        save = gr.Button("Save these settings", size="sm")
    text = gr.Textbox(
        label="Or import: paste a script, a command or a configuration",
        info="Of FluxGym, kohya_ss, OneTrainer, sd-scripts, musubi-tuner or ai-toolkit. Nothing of it is run.",
        placeholder="accelerate launch flux_train_network.py --network_dim 16 …",
        lines=3,
        max_lines=12,
        interactive=True,
    )
    files = gr.File(
        label="Or choose files (train.sh with its dataset.toml, .json, .toml, .yaml)",
        file_count="multiple",
        height=120,
        interactive=True,
        elem_id="import-files",
    )
    read = gr.Button("Show what it sets", size="sm", elem_id="import-read")
    note = gr.HTML(apply_default_css=False)
    preview = gr.HTML(elem_id="setup-preview", apply_default_css=False)
    use = gr.Button("Use these settings", variant="primary", visible=False, elem_id="use-settings")
    place = gr.Dropdown([], label="Image folder it names", visible=False, interactive=True, elem_id="import-folder")
    add = gr.Button("Add these images", size="sm", visible=False, elem_id="import-images")
    found = gr.State({})
    shown = [note, preview, use, place, add, found]

    def nothing(text: object = "", bad: bool = False) -> list[Any]:
        return [fold.note(text, bad), "", *[gr.update(visible=False)] * 3, {}]

    def of_changes(title: str, values: dict[str, Any], folders: list[str], *more: Any) -> list[Any]:
        found = changes(values, form.current(draft_id))
        rows = [[form.LABELS.get(key, key), before or "–", after or "–"] for key, (before, after) in found.items()]
        there = gr.update(visible=bool(folders), choices=folders, value=folders[0] if folders else None)
        shows = part("new/folds.html", "setup", title, rows, *more)
        # All of them: a field that is the same now may follow the base model, which can be another one then
        return ["", shows, gr.update(visible=bool(rows)), there, gr.update(visible=bool(folders)), values]

    def safely(act: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """A handler of `shown`, and of what it shows more, that explains an error."""

        @functools.wraps(act)
        def handler(*given: Any) -> list[Any]:
            try:
                return act(*given)
            except fold.ERRORS as error:
                return nothing(error, True)

        return handler

    def on_template(key: str | None) -> list[Any]:
        return of_changes("What the template sets", values_of(key), []) if key else nothing()

    def on_choice(key: str | None) -> dict[str, Any]:
        return gr.update(value=DELETE, visible=bool(key))

    def on_save(name: str, replace: bool) -> list[Any]:
        try:
            saved = save_template(name, form.current(draft_id), bool(replace))
        except fold.ERRORS as error:
            return [fold.note(error, True), gr.skip(), gr.skip(), gr.skip()]
        return [fold.note(f"Saved as “{saved['name']}”."), gr.update(choices=choices(), visible=True), "", False]

    def on_delete(key: str | None, label: str) -> list[Any]:
        if label != SURE:  # choosing another template sets it back
            return [*[gr.skip()] * len(shown), SURE, gr.skip()]
        try:
            delete_template(key)
        except fold.ERRORS as error:
            return [*nothing(error, True), DELETE, gr.skip()]
        gone = gr.update(visible=False, value=DELETE)
        return [*nothing("Deleted."), gone, gr.update(choices=choices(), value=None)]

    def on_read(text: str, paths: list[str] | None) -> list[Any]:
        result = read_files(given_files(text, paths))
        problems = {one.path: folder_problem(one.path) for one in result.folders[:MOST_FOLDERS] if one.path}
        folders, order = [path for path, problem in problems.items() if not problem], [*OUTCOMES]
        rows = sorted(result.rows, key=lambda row: order.index(row.outcome))
        outcomes = [(row.name, row.value, OUTCOMES[row.outcome], row.text) for row in rows]
        values, title = form_values(result, form.current(draft_id)), f"{result.kind[:1].upper()}{result.kind[1:]}"
        return of_changes(title, values, folders, outcomes, result.notes, problems)

    def on_use(values: dict[str, Any]) -> list[Any]:
        before = form.current(draft_id)
        form.save(draft_id, values, typed=True)
        return nothing(f"Changed {count(len(changes(form.current(draft_id), before)), 'field')}.")

    @fold.tried
    def on_add(path: str) -> str:
        imports.start_folder(draft_id, path)
        return "The images are being added in step 1."

    template.input(safely(on_template), template, shown, js=form.FLUSH, **QUIET)
    template.input(on_choice, template, delete, **QUIET)
    gr.on([save.click, name.submit], on_save, [name, replace], [note, template, name, replace], js=form.FLUSH, **QUIET)
    delete.click(on_delete, [template, delete], [*shown, delete, template], **QUIET)
    read.click(safely(on_read), [text, files], shown, js=form.FLUSH, **QUIET)
    use.click(safely(on_use), found, shown, js=form.FLUSH, **QUIET).then(None, None, None, js=form.SYNC, **QUIET)
    add.click(on_add, place, note, **QUIET).then(None, None, None, js=form.SHOW_NEW, **QUIET)


def given_files(text: str, paths: list[str] | None) -> list[tuple[str, str]]:
    """(name, content) of the chosen files and of what was pasted. RunError: a file cannot be read."""
    given = []
    for path in map(Path, (paths or [])[:MOST_FILES]):
        with explained(f"read {path.name}"), path.open(encoding="utf-8", errors="replace") as file:
            given.append((path.name, file.read(LONGEST + 1)))
    return [*given, *([("", text)] if (text or "").strip() else [])]
