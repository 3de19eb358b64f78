"""Endpoints of drafts: images, captions and settings of a LoRA before it is a run, as in the tab New LoRA."""

import secrets
from pathlib import Path
from typing import Any

from runs import env_file
from runs.files import RunError
from runs.machine import this_machine, tier_for
from ui.api.checks import page_answer
from ui.dataset import bulk, captioning, doctor, draft, image_edit, images, imports, selection, subsets
from ui.new import export, form, importing, rehearsal, run_starts, script_editor, templates
from ui.new import settings as of_draft

TITLE = "Drafts"
PAGE = 100  # images of one answer
MOST_LISTED = 1000


def new_draft() -> str:
    """The id of a new, empty draft."""
    made = draft.new_id()
    given = {"name": "", **form.defaults(), "tier": tier_for(this_machine())}
    draft.save_fields(made, {key: given[key] for key in ("name", *form.MODEL_FIELDS, *of_draft.LENGTH)})
    return made


def list_drafts() -> list[dict[str, Any]]:
    """The drafts used last: id, name, number of images, age."""
    return page_answer(images.recent_drafts({"draft": ""}))["drafts"]


def draft_settings(draft_id: str) -> dict[str, Any]:
    """The settings of a draft by field; those that were never changed have their defaults."""
    return of_draft.current(_known(draft_id))


def set_settings(draft_id: str, settings: dict) -> dict[str, Any]:
    """Change settings of a draft, such as {"name": "my-cat", "model": "flux-dev", "rank": 16}.

    Returns: the settings, the planned steps, and `problems`: what keeps it from being started now.
    """
    of_draft.save(_known(draft_id), settings)
    return review_draft(draft_id)


def review_draft(draft_id: str) -> dict[str, Any]:
    """The settings of a draft, the warnings, and `problems`: what keeps it from being started now."""
    values = of_draft.current(_known(draft_id))
    found = form.review(values, draft.counts(draft_id), this_machine(values["backend"]))
    problems = [form.shown(fault) for fault in (*found.missing, *found.faults)]
    return {"settings": values, "problems": problems, "warnings": [form.shown(fault) for fault in found.warnings]}


def list_images(draft_id: str, first: int = 0, count: int = PAGE, filter: str = "") -> dict[str, Any]:
    """Images of a draft from number `first`: id, file, subset, size, caption, warnings.

    filter: "" for all, or one of the page's, such as "no_caption".
    """
    query = selection.query_of({"filter": filter})
    found = query.found(draft.items(_known(draft_id)))
    shown = found[max(0, first) : max(0, first) + max(1, min(count, MOST_LISTED))]
    return {
        "total": len(found),
        "images": [
            {
                "id": one.id,
                "file": one.file,
                "subset": one.folder,
                "width": one.width,
                "height": one.height,
                "caption": one.caption,
                "warnings": list(one.warnings),
                "weight": one.weight,
                "crop": one.crop,
            }
            for one in shown
        ],
    }


def add_images(draft_id: str, files: list) -> dict[str, Any]:
    """Add uploaded images, captions (text files) and ZIPs.

    files: what gradio_client's `handle_file` makes, or {"path": what an upload returned, "name": with its folders}.
    """
    uploads = []
    for one in files:
        path = one.get("path") if isinstance(one, dict) else one
        name = (one.get("orig_name") or one.get("name")) if isinstance(one, dict) else None
        if not isinstance(path, str):
            raise RunError("files: each is a file that was uploaded, as handle_file makes it")
        uploads.append((Path(path), name if isinstance(name, str) else Path(path).name))
    return images.add_uploads(_known(draft_id), uploads, secrets.token_hex(8))


def add_folder(draft_id: str, path: str) -> dict[str, Any]:
    """Import the images and captions of a folder on the server, in the background; `import_status` shows the progress."""
    return imports.start_folder(_known(draft_id), path)


def import_status(draft_id: str) -> dict[str, Any]:
    """What the imports of a draft do."""
    return imports.status(_known(draft_id))


def set_caption(draft_id: str, image: str, text: str) -> dict[str, Any]:
    """Store the caption of an image."""
    draft.set_caption(_known(draft_id), image, text)
    return {}


def edit_captions(draft_id: str, edit: dict, images: list | None = None, preview: bool = False) -> dict[str, Any]:
    """Edit many captions as one step that can be undone; with `preview`, only say what would change.

    edit: {"kind": "prefix" or "suffix", "text"}, {"kind": "replace", "find", "with", "pattern": whether it is a regular
    expression, "any_case"}, {"kind": "remove_tags", "tags"} or {"kind": "shuffle", "keep"}. images: ids, or null for all.
    """
    ids = None if images is None else [str(one) for one in images]
    if preview:
        return bulk.preview(_known(draft_id), ids, edit)
    return {"changed": bulk.apply(_known(draft_id), ids, edit)}


def list_tags(draft_id: str) -> dict[str, Any]:
    """How many captions have each tag."""
    return selection.tags(_known(draft_id), selection.Query())


def move_to_subset(draft_id: str, images: list, name: str, repeats: int | None = None) -> dict[str, Any]:
    """Move images into a subset with its own repeats; "" is none."""
    return {"moved": subsets.move(_known(draft_id), [str(one) for one in images], name, repeats)}


def list_subsets(draft_id: str) -> list[dict[str, Any]]:
    """The subsets of a draft."""
    return subsets.overview(_known(draft_id))


def edit_image(
    draft_id: str, image: str, turns: int = 0, crop: list | None = None, weight: int | None = None
) -> dict[str, Any]:
    """Turn an image by quarter turns clockwise, crop it to [left, top, right, bottom] as shares of it, or set its weight."""
    known = _known(draft_id)
    if turns:
        image_edit.rotate(known, image, turns)
    if crop is not None:
        image_edit.crop(known, image, crop or None)
    if weight is not None:
        image_edit.weigh(known, [image], weight)
    return next((one for one in list_images(known, count=MOST_LISTED)["images"] if one["id"] == image), {})


def remove_images(draft_id: str, images: list) -> dict[str, Any]:
    """Remove images; `undo` brings them back."""
    draft.remove(_known(draft_id), [str(one) for one in images])
    return {"left": len(draft.items(draft_id))}


def undo(draft_id: str) -> str:
    """Undo the last change of images or captions; returns what was undone, "" for nothing."""
    return draft.undo(_known(draft_id)) or ""


def redo(draft_id: str) -> str:
    """Redo what was undone last."""
    return draft.redo(_known(draft_id)) or ""


def check_images(draft_id: str) -> dict[str, Any]:
    """Check the images in the background: duplicates, blur, size, captions, buckets; `image_report` has the findings."""
    doctor.start(_known(draft_id))
    return doctor.progress(draft_id) or {}


def image_report(draft_id: str) -> dict[str, Any]:
    """The findings by kind, the buckets, and the progress of the check."""
    return page_answer(doctor.doctor_report({"draft": _known(draft_id)}))


def fix_images(draft_id: str, kind: str, images: list | None = None) -> str:
    """Fix the findings of a kind, for some images or all; returns what was done."""
    return doctor.fix(_known(draft_id), kind, None if images is None else [str(one) for one in images])


def write_captions(
    draft_id: str, options: dict, which: str = "empty", images: list | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Write captions in the background; `caption_status` shows the progress.

    options: {"engine": "florence", "tagger" or "endpoint", "model", …} as `python -m captions --help` names them. which:
    "empty", "model" or "all". A caption that a person wrote is replaced only with "all" and `overwrite`.
    """
    ids = None if images is None else [str(one) for one in images]
    return {"images": captioning.start(_known(draft_id), options, which, ids, overwrite)}


def caption_status(draft_id: str) -> dict[str, Any]:
    """The progress of the captions."""
    return captioning.status(_known(draft_id))


def resume_captions(draft_id: str) -> dict[str, Any]:
    """Continue the last writing of captions where it ended."""
    captioning.resume(_known(draft_id))
    return captioning.status(draft_id)


def cancel_captions(draft_id: str) -> dict[str, Any]:
    """End the writing of captions; those so far stay."""
    captioning.cancel(_known(draft_id))
    return {}


def rehearse(draft_id: str) -> dict[str, Any]:
    """Try the run on the real model for about two minutes, in the background; `rehearsal_result` has the result."""
    rehearsal.start(_known(draft_id))
    return rehearsal.state(draft_id)


def rehearsal_result(draft_id: str) -> dict[str, Any]:
    """The last rehearsal: its stages, the forecast of time, memory, disk and cost, or where it failed."""
    return rehearsal.state(_known(draft_id))


def import_settings(draft_id: str, text: str, name: str = "settings", apply: bool = False) -> dict[str, Any]:
    """Read a configuration of FluxGym, kohya_ss, sd-scripts, musubi-tuner or ai-toolkit; with `apply`, take it over."""
    found = importing.read_files(_known(draft_id), [(name, text)])
    if apply:
        of_draft.save(draft_id, found["values"])
    flags = found["values"].get("flags", "")
    return {**found, "values": {**found["values"], **({"flags": env_file.of_lines(flags)[0]} if flags else {})}}


def list_templates() -> list[dict[str, Any]]:
    """The templates of settings: key, name, what it sets."""
    return templates.listing()


def save_template(draft_id: str, name: str) -> dict[str, Any]:
    """Save the settings of a draft as a template."""
    return templates.save(name, of_draft.current(_known(draft_id)))


def use_template(draft_id: str, key: str) -> dict[str, Any]:
    """Take over the settings of a template."""
    of_draft.save(_known(draft_id), templates.values_of(key, of_draft.current(draft_id)))
    return review_draft(draft_id)


def delete_template(key: str) -> dict[str, Any]:
    """Delete a template of the user."""
    return templates.delete(key)


def draft_script(draft_id: str) -> str:
    """The script that Start would run: the one that was edited, else the one of the settings."""
    edited = script_editor.stored(_known(draft_id))
    if edited is not None:
        return edited["script"]
    values = of_draft.current(draft_id)
    return form.script_of(form.review(values, draft.counts(draft_id), this_machine(values["backend"])))


def export_draft(draft_id: str) -> dict[str, Any]:
    """Write the draft as a ZIP that trains elsewhere, in the background; `export_status` has its file."""
    export.start(_known(draft_id))
    return export.status(draft_id)


def export_status(draft_id: str) -> dict[str, Any]:
    """The last export of a draft."""
    return export.status(_known(draft_id))


def start_draft(draft_id: str) -> dict[str, Any]:
    """Create a run of the draft and start it. Returns {"run", "messages"}.

    After a rehearsal of these settings failed, the first call refuses and says where; the second one starts.
    """
    folder, messages = run_starts.start(_known(draft_id))
    return {"run": folder.name, "messages": messages}


def _known(draft_id: str) -> str:
    if not draft.is_id(draft_id) or not draft.folder(draft_id).is_dir():
        raise RunError(f"There is no draft {str(draft_id)[:100]!r}; new_draft makes one")
    return draft_id


ACTIONS = (
    new_draft,
    list_drafts,
    draft_settings,
    set_settings,
    review_draft,
    list_images,
    add_images,
    add_folder,
    import_status,
    set_caption,
    edit_captions,
    list_tags,
    move_to_subset,
    list_subsets,
    edit_image,
    remove_images,
    undo,
    redo,
    check_images,
    image_report,
    fix_images,
    write_captions,
    caption_status,
    resume_captions,
    cancel_captions,
    rehearse,
    rehearsal_result,
    import_settings,
    list_templates,
    save_template,
    use_template,
    delete_template,
    draft_script,
    export_draft,
    export_status,
    start_draft,
)
