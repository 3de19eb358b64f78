"""The fold "Templates and import" of step 2: settings from a name or from another trainer's files, shown before they are used.

Nothing changes before "Use these settings". The settings are then stored as if they were typed, and the page shows them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

import presets
import runs
from runs import env_file
from runs.files import RunError, explained
from runs.machine import this_machine, tier_for
from ui.dataset import checks, imports
from ui.html import esc, table
from ui.new import form, templates
from ui.run import fold
from ui.run.fold import QUIET

if TYPE_CHECKING:
    from runs.foreign import Settings

TEXT = 300  # characters of a value that is shown


def changes(values: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What the form would change: (shown now, shown then) by field, for each field with another value."""
    return {
        key: (_shown(key, now[key]), _shown(key, value))
        for key, value in values.items()
        if key in form.KEYS and not form.same(value, now[key])
    }


def _shown(key: str, value: object) -> str:
    """A value as the form shows it."""
    if key == "model":
        model = presets.models().get(str(value))
        return str(model["name"]) if model else str(value)
    if key == "tier":
        return str(presets.tiers().get(str(value), {}).get("label", value))
    if key == "backend":
        return form.BACKENDS.get(str(value), str(value))
    choices = next((one.choices for one in (form.SUBJECT, *form.MORE, *form.SAMPLES) if one.key == key), ())
    if named := next((label for label, choice in choices if choice == value), ""):
        return named
    value = env_file.of_lines(value)[0] if key == "flags" and isinstance(value, str) else value
    return checks.shortened("" if value is None else f"{value:g}" if isinstance(value, float) else str(value), TEXT)


# Import ------------------------------------------------------------------------------------------------------------------


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
    given["flags"] += "".join(
        f"{name}={spec.environment[name]}\n" for name in spec.secrets
    )  # stored apart: draft.save_fields
    keys = set(found.fields) | ({*form.MODEL_FIELDS, "flags"} if whole else set())
    keys |= {"flags"} if given["flags"] else set()
    if not whole and given["flags"]:
        given["flags"] = f"{now['flags'].rstrip()}\n{given['flags']}".lstrip()
    return {key: given[key] for key in form.KEYS if key in keys}


def folder_problem(path: str) -> str:
    """Why an image folder that a file names cannot be added; "" where it can."""
    try:
        imports.given_folder(path)
    except RunError as error:
        return str(error)
    return ""


# The fold ----------------------------------------------------------------------------------------------------------------

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


def _choices() -> list[tuple[str, str]]:
    """The templates as choices of a dropdown."""
    return [
        (f"{one['name']} · {one['about']}{'' if one['own'] else ' Built in'}", one["key"])
        for one in templates.listing()
    ]


def draw(draft_id: str) -> None:
    """Make the components of the fold."""
    fold.say("A template holds all settings of this form except the name, the trigger word and the images.")
    template = gr.Dropdown(_choices(), value=None, label="Template", interactive=True, elem_id="template")
    delete = gr.Button(DELETE, size="sm", visible=False, elem_id="template-delete")
    with gr.Row(elem_classes="hp-fields"):
        name = fold.line("Name of a new template", placeholder="My portraits", max_length=templates.MAX_NAME)
        replace = gr.Checkbox(label="Replace the template of this name", interactive=True, elem_id="template-replace")
        save = gr.Button("Save these settings", size="sm")
    text = gr.Textbox(
        label="Or import: paste a script, a command or a configuration",
        info="Of FluxGym, kohya_ss, sd-scripts, musubi-tuner or ai-toolkit. Nothing of it is run.",
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
    place = gr.Dropdown(
        [], label="Image folder that it names", visible=False, interactive=True, elem_id="import-folder"
    )
    add = gr.Button("Add these images", size="sm", visible=False, elem_id="import-images")
    found = gr.State({})
    shown = [note, preview, use, place, add, found]

    def nothing(text: object = "", bad: bool = False) -> list[Any]:
        return [fold.note(text, bad), "", *[gr.update(visible=False)] * 3, {}]

    def of_changes(title: str, more: str, values: dict[str, Any], folders: list[str]) -> list[Any]:
        found = changes(values, form.current(draft_id))
        rows = [[form.LABELS.get(key, key), before or "–", after or "–"] for key, (before, after) in found.items()]
        shown = table("What changes", ["Field", "Now", "Then"], rows)
        says = f"<h4>What changes in the form</h4>{shown}" if rows else "<p>The form has these settings already.</p>"
        there = gr.update(visible=bool(folders), choices=folders, value=folders[0] if folders else None)
        wanted = {key: values[key] for key in found}
        shows = f'<div class="hp-setup-preview"><h3>{esc(title)}</h3>{says}{more}</div>'
        return ["", shows, gr.update(visible=bool(rows)), there, gr.update(visible=bool(folders)), wanted]

    def on_template(key: str | None) -> list[Any]:
        own = gr.update(value=DELETE, visible=any(one["key"] == key and one["own"] for one in templates.listing()))
        if not key:
            return [*nothing(), own]
        try:
            values = templates.values_of(key, form.current(draft_id))
            return [*of_changes("What the template sets", "", values, []), own]
        except fold.ERRORS as error:
            return [*nothing(error, True), own]

    def on_save(name: str, replace: bool) -> list[Any]:
        try:
            saved = templates.save(name, form.current(draft_id), bool(replace))
        except fold.ERRORS as error:
            return [fold.note(error, True), gr.skip(), gr.skip(), gr.skip()]
        return [fold.note(f"Saved as “{saved['name']}”."), gr.update(choices=_choices()), "", False]

    def on_delete(key: str | None, label: str) -> list[Any]:
        if label != SURE:  # choosing another template sets it back
            return [*[gr.skip()] * 6, SURE, gr.skip()]
        try:
            templates.delete(key)
        except fold.ERRORS as error:
            return [*nothing(error, True), DELETE, gr.skip()]
        gone = gr.update(visible=False, value=DELETE)
        return [*nothing("Deleted."), gone, gr.update(choices=_choices(), value=None)]

    def on_read(text: str, paths: list[str] | None) -> list[Any]:
        try:
            result = read_files(given_files(text, paths))
            folders = {one.path: folder_problem(one.path) for one in result.folders[:MOST_FOLDERS] if one.path}
            title, more = f"{result.kind[:1].upper()}{result.kind[1:]}", _outcomes(result, folders)
            values = form_values(result, form.current(draft_id))
            return of_changes(title, more, values, [path for path, problem in folders.items() if not problem])
        except fold.ERRORS as error:
            return nothing(error, True)

    def on_use(values: dict[str, Any]) -> list[Any]:
        try:
            form.save(draft_id, values, typed=True)
        except fold.ERRORS as error:
            return nothing(error, True)
        return nothing(f"{len(values)} field{'s were' if len(values) != 1 else ' was'} changed.")

    def on_add(path: str) -> str:
        try:
            imports.start_folder(draft_id, path)
        except fold.ERRORS as error:
            return fold.note(error, True)
        return fold.note("The images are being added in step 1.")

    template.input(on_template, template, [*shown, delete], js=form.FLUSH, **QUIET)
    gr.on([save.click, name.submit], on_save, [name, replace], [note, template, name, replace], js=form.FLUSH, **QUIET)
    delete.click(on_delete, [template, delete], [*shown, delete, template], **QUIET)
    read.click(on_read, [text, files], shown, js=form.FLUSH, **QUIET)
    use.click(on_use, found, shown, js=form.FLUSH, **QUIET).then(None, None, None, js=form.SYNC, **QUIET)
    add.click(on_add, place, note, **QUIET).then(None, None, None, js=form.SHOW_NEW, **QUIET)


def given_files(text: str, paths: list[str] | None) -> list[tuple[str, str]]:
    """(name, content) of the chosen files and of what was pasted. RunError: a file cannot be read."""
    given = []
    for path in map(Path, (paths or [])[:MOST_FILES]):
        with explained(f"read {path.name}"), path.open(encoding="utf-8", errors="replace") as file:
            given.append((path.name, file.read(LONGEST + 1)))
    return [*given, *([("", text)] if (text or "").strip() else [])]


def _outcomes(result: "Settings", folders: Mapping[str, str]) -> str:
    """What becomes of each setting of an import, as markup. folders: those that it names, and why one cannot be added."""
    order = [*OUTCOMES]
    rows = sorted(result.rows, key=lambda row: order.index(row.outcome))
    cells = [(row.name, row.value, OUTCOMES[row.outcome], row.text) for row in rows]
    shown = table("Settings", ["Setting", "Value", "", "Where it goes, or why not"], cells)
    parts = [f'<p class="hp-note">{esc(note)}</p>' for note in result.notes]
    parts.append(f"<h4>What becomes of each setting</h4>{shown}")
    parts += [f"<p><code>{esc(path)}</code> {esc(problem)}</p>" for path, problem in folders.items()]
    return "".join(parts)
