"""Endpoints of the tab New LoRA: base models, VRAM tiers, and drafts with their images, captions and settings."""

import secrets
from pathlib import Path
from typing import Any, Literal

import presets
from runs.files import RunError
from ui.dataset import bulk, captioning, doctor, draft, images, imports
from ui.new import form, run_starts, script_editor

PAGE = 100  # images of one answer
MOST_LISTED = 1000
LISTED = ("id", "file", "width", "height", "caption", "warnings", "weight", "crop")  # of an image


def list_models() -> list[dict[str, Any]]:
    """The base models: key, name, trainers, licence."""
    return [
        {"key": key, "name": one["name"], "trainers": one["backends"], "licence": one["licence"], "note": one["note"]}
        for key, one in presets.models().items()
    ]


def list_tiers() -> list[dict[str, Any]]:
    """The VRAM tiers."""
    return [{"key": key, **one} for key, one in presets.tiers().items()]


def new_draft() -> str:
    """The id of a new, empty draft."""
    made = draft.new_id()
    draft.save_fields(made, {"name": ""})
    return made


def list_drafts() -> list[dict[str, Any]]:
    """The drafts used last: id, name, number of images, age."""
    return draft.recent()


def set_settings(draft_id: str, settings: dict) -> dict[str, Any]:
    """Change settings of a draft, such as {"name": "my-cat", "model": "flux-dev", "rank": 16}.

    Returns: the settings, the planned steps, and `problems`: what keeps it from being started now.
    """
    form.save(_known(draft_id), settings)
    return review_draft(draft_id)


def review_draft(draft_id: str) -> dict[str, Any]:
    """The settings of a draft, the planned `steps`, the warnings, and `problems`: what keeps it from being started."""
    found = form.reviewed(_known(draft_id))
    problems = [form.shown(fault) for fault in (*found.missing, *found.faults)]
    planned = script_editor.reviewed(draft_id, found) if draft.edited_script(draft_id).is_file() else found
    steps, warnings = planned.steps, [form.shown(fault) for fault in found.warnings]
    return {"settings": found.values, "steps": steps, "problems": problems, "warnings": warnings}


def list_images(
    draft_id: str,
    first: int = 0,
    count: int = PAGE,
    filter: Literal["", "no_caption", "warned", "model", "edited"] = "",
) -> dict[str, Any]:
    """Images of a draft from number `first`: id, file, subset, size, caption, warnings.

    filter: "" for all, or one of the page's. "model": their caption is a model's.
    """
    found = images.Query(filter).found(draft.items(_known(draft_id)))
    shown = found[max(0, first) : max(0, first) + max(1, min(count, MOST_LISTED))]
    named = {**{name: name for name in LISTED}, "subset": "folder"}
    return {"total": len(found), "images": [{key: getattr(one, of) for key, of in named.items()} for one in shown]}


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
    return imports.add(_known(draft_id), uploads, secrets.token_hex(8))


def add_folder(draft_id: str, path: str) -> dict[str, Any]:
    """Import images and captions of a folder on the server, in the background; `import_status` shows the progress."""
    return imports.start_folder(_known(draft_id), path)


def import_status(draft_id: str) -> dict[str, Any]:
    """What the imports of a draft do."""
    return imports.status(_known(draft_id))


def set_caption(draft_id: str, image: str, text: str) -> dict[str, Any]:
    """Store the caption of an image."""
    draft.set_caption(_known(draft_id), image, text)
    return {}


def edit_captions(draft_id: str, edit: dict, images: list[str] | None = None, preview: bool = False) -> dict[str, Any]:
    """Edit many captions as one step that can be undone; with `preview`, only say what would change.

    edit: {"kind": "prefix" or "suffix", "text"}, {"kind": "replace", "find", "with", "pattern": whether it is a regular
    expression, "any_case"}, {"kind": "remove_tags", "tags"} or {"kind": "shuffle", "keep"}. images: ids, or null for all.
    """
    if preview:
        return bulk.preview(_known(draft_id), images, edit)
    return {"changed": bulk.apply(_known(draft_id), images, edit)}


def remove_images(draft_id: str, images: list[str]) -> dict[str, Any]:
    """Remove images; `undo` brings them back."""
    draft.remove(_known(draft_id), images)
    return {"left": len(draft.items(draft_id))}


def undo(draft_id: str) -> str:
    """Undo the last change of images or captions; returns what was undone, "" for nothing."""
    return images.undo(_known(draft_id)) or ""


def image_report(draft_id: str) -> dict[str, Any]:
    """What is wrong with the images and captions, by kind: duplicates, blur, size; and the buckets."""
    return doctor.report(_known(draft_id))


def write_captions(
    draft_id: str,
    options: dict,
    which: Literal["empty", "model", "all"] = "empty",
    images: list[str] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write captions in the background; `caption_status` shows the progress.

    options: {"engine": "florence", "tagger" or "endpoint", "model", …}, as docs/api.md names them.
    A caption that a person wrote is replaced only with "all" and `overwrite`.
    """
    return {"images": captioning.start(_known(draft_id), options, which, images, overwrite)}


def caption_status(draft_id: str) -> dict[str, Any]:
    """The progress of the captions."""
    return captioning.status(_known(draft_id))


def cancel_captions(draft_id: str) -> dict[str, Any]:
    """End the writing of captions; those so far stay."""
    captioning.cancel(_known(draft_id))
    return {}


def start_draft(draft_id: str) -> dict[str, Any]:
    """Create a run of the draft and start it. Returns {"run", "messages"}.

    After a rehearsal of these settings failed, with images that nothing describes, or while captions are written, the
    first call refuses and says so; the second one starts. While images are imported, it refuses.
    """
    folder, messages = run_starts.start(_known(draft_id))
    return {"run": folder.name, "messages": messages}


def _known(draft_id: str) -> str:
    if not draft.is_id(draft_id) or not draft.folder(draft_id).is_dir():
        raise RunError(f"There is no draft {str(draft_id)[:100]!r}; new_draft makes one")
    return draft_id
