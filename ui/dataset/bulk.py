"""Edits of many captions at once: functions from a caption to a caption, applied to the chosen images as one step.

An edit arrives as a table from the browser or the API, such as {"kind": "replace", "find": "cat", "with": "dog"}. A
pattern is searched with the `regex` package, whose search stops after a time: Python's own `re` can need hours for a
hostile pattern, and nothing can interrupt it.
"""

import contextlib
import hashlib
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from monitor.phrases import count
from runs.files import RunError
from ui.dataset import draft, subsets
from ui.dataset.draft_store import MAX_CAPTION, plain_text, read
from ui.html import part
from ui.new import form
from ui.run import fold
from ui.run.fold import QUIET

MAX_TEXT = 2_000  # characters of a field of an edit
PATTERN_S = 3.0  # for all captions together; 10,000 of them take a tenth of a second
MAX_REPEATED = 10_000
EXAMPLES = 4
Edit = Callable[[str, str], str]  # (caption, image id) → caption; OverflowError: it would be longer than MAX_CAPTION


@dataclass(frozen=True)
class Kind:
    """A kind of edit. label: its name on the page; field: its text's label there; make: the edit from its fields;
    done: what undo calls it, see draft.change_images."""

    label: str
    field: str
    make: Callable[[Mapping[str, Any]], Edit]
    done: str


def tags_of(caption: str) -> list[str]:
    """The tags of a caption: what stands between its commas."""
    return [tag for part in caption.split(",") if (tag := " ".join(part.split()))]


# The kinds -----------------------------------------------------------------------------------------------------------


def _text(fields: Mapping[str, Any], name: str, missing: str = "", blank: str = " ") -> str:
    """A field of an edit. RunError: it is too long, or empty where `missing` says what to do; `blank` is empty too."""
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise RunError(draft.OUT_OF_DATE)
    value = plain_text(value)
    if len(value) > MAX_TEXT:
        raise RunError(f"This text has {len(value)} characters; shorten it to {MAX_TEXT}")
    if missing and not value.strip(blank):
        raise RunError(missing)
    return value


def _prefix(fields: Mapping[str, Any]) -> Edit:
    text = _text(fields, "text", "Type the text to add")
    alone = text.strip().rstrip(",").rstrip()
    there = re.compile(rf"{re.escape(text)}|{re.escape(alone)}(?!\w)")  # "cat, " is not the beginning of "cats"
    return lambda caption, _: caption if there.match(caption) else text + caption if caption.strip() else alone


def _suffix(fields: Mapping[str, Any]) -> Edit:
    text = _text(fields, "text", "Type the text to add")
    alone = text.strip().lstrip(",").lstrip()
    there = re.compile(rf"{re.escape(text)}\Z|(?<!\w){re.escape(alone)}\Z")
    return lambda caption, _: caption if there.search(caption) else caption + text if caption.strip() else alone


def _replace(fields: Mapping[str, Any]) -> Edit:
    import regex

    find, replacement = _text(fields, "find", "Type the text to find", blank=""), _text(fields, "with")
    is_pattern, any_case = fields.get("pattern") is True, fields.get("any_case") is True
    # The compiler writes out what is repeated: (?:a{3000}){3000} takes gigabytes.
    repeats = math.prod(max(1, int(number[:9])) for number in re.findall(r"\{\s*([0-9]+)", find)) if is_pattern else 1
    if repeats > MAX_REPEATED:
        raise RunError(f"Find: the numbers in braces multiply to more than {MAX_REPEATED}; lower them")
    # A recursion takes 1 GB a second, whatever its limit of time.
    if is_pattern and re.search(r"(?<!\\)\(\?(?:R|&|P>|[+-]?[0-9])", find):
        raise RunError("Find: a regular expression cannot contain itself here; write out what is repeated")
    try:
        pattern = regex.compile(find if is_pattern else regex.escape(find), regex.IGNORECASE if any_case else 0)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise RunError(f"Find: not a valid regular expression ({error}); correct it") from error
    left_s = PATTERN_S  # for the search alone: the change may have to wait for one of another process first

    def edit(caption: str, _: str) -> str:
        nonlocal left_s
        began_s = time.monotonic()
        parts, size, at = [], 0, 0
        try:
            if left_s <= 0:
                raise TimeoutError
            # Not `sub`: a replacement can repeat a group, and the result is measured before the memory is full.
            for found in pattern.finditer(caption, timeout=left_s, concurrent=True):
                piece = found.expand(replacement) if is_pattern else replacement
                parts += [caption[at : found.start()], piece]
                size, at = size + found.start() - at + len(piece), found.end()
                if size > MAX_CAPTION:
                    raise OverflowError
        except TimeoutError as error:
            raise RunError(
                f"Find: this regular expression needs more than {PATTERN_S:.0f} s; simplify it. Nested repetitions "
                "such as (a|aa)+ are the usual cause"
            ) from error
        except (regex.error, IndexError, ValueError) as error:
            raise RunError(f"Replace with: {error}; groups are \\1, \\2 or \\g<name>, a backslash is \\\\") from error
        finally:
            left_s -= time.monotonic() - began_s
        return "".join(parts) + caption[at:] if parts else caption

    return edit


def _remove_tags(fields: Mapping[str, Any]) -> Edit:
    unwanted = {tag.casefold() for tag in tags_of(_text(fields, "tags"))}
    if not unwanted:
        raise RunError("Type a tag to remove")

    def edit(caption: str, _: str) -> str:
        tags = tags_of(caption)
        kept = [tag for tag in tags if tag.casefold() not in unwanted]
        return caption if len(kept) == len(tags) else ", ".join(kept)

    return edit


def _shuffle(fields: Mapping[str, Any]) -> Edit:
    keep, seed = fields.get("keep", 1), fields.get("seed", 0)
    if not isinstance(keep, int) or not isinstance(seed, int) or not 0 <= keep <= 1000 or abs(seed) > 2**53:
        raise RunError("Tags to keep in place: use a whole number from 0 to 1000")

    def edit(caption: str, image_id: str) -> str:
        tags = tags_of(caption)
        rest = tags[keep:]
        # The same for a preview and for what it previews, and different for each image.
        draw = random.Random(hashlib.sha256(f"{seed}/{image_id}".encode()).digest())
        draw.shuffle(rest)
        return ", ".join(tags[:keep] + rest) if rest != tags[keep:] else caption

    return edit


KINDS: dict[str, Kind] = {
    "replace": Kind("Find and replace", "Find in captions", _replace, "replacement in {captions}"),
    "prefix": Kind("Add text before", "Text", _prefix, "text before {captions}"),
    "suffix": Kind("Add text after", "Text", _suffix, "text after {captions}"),
    "remove_tags": Kind("Remove tags", "Tags, separated by commas", _remove_tags, "removal of tags from {captions}"),
    "shuffle": Kind("Shuffle tags", "", _shuffle, "shuffled tags in {captions}"),
}


# Use -----------------------------------------------------------------------------------------------------------------


def _kind(fields: Mapping[str, Any]) -> Kind:
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise RunError(f"There is no edit {kind!r}; use one of {', '.join(KINDS)}")
    return KINDS[kind]


def _edited(edit: Edit, key: str, entry: draft.Entry) -> str:
    """The caption of an image after an edit. Raises RunError: the edit fails for it; the message names its file."""
    with contextlib.suppress(OverflowError):
        text = edit(entry["caption"], key)
        if len(text) <= MAX_CAPTION:
            return text
    raise RunError(f"{entry['file']}: the caption would have more than {MAX_CAPTION} characters; shorten it first")


def preview(draft_id: str, ids: Iterable[str] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What an edit would do: {"changed", "of", "examples": [{"file", "before", "after"}, …]}. Args: as `apply`."""
    images, edit = read(draft_id)["images"], _kind(fields).make(fields)
    before = {key: images[key] for key in (images if ids is None else ids) if key in images}
    after = {key: _edited(edit, key, entry) for key, entry in before.items()}
    changed = [
        {"file": entry["file"], "before": entry["caption"], "after": after[key]}
        for key, entry in before.items()
        if after[key] != entry["caption"]
    ]
    return {"changed": len(changed), "of": len(before), "examples": changed[:EXAMPLES]}


def apply(draft_id: str, ids: Iterable[str] | None, fields: Mapping[str, Any]) -> int:
    """Edit captions as one step that can be undone. Returns how many captions changed. Raises RunError: a field is
    missing or invalid, the pattern takes too long, or a caption would be too long. Nothing changed.

    Args:
        ids: the images, or None for all; removed ones are left out.
        fields: "kind" (a key of KINDS) and its fields: "text" (prefix, suffix); "find", "with", "pattern" and
            "any_case" (replace); "tags", separated by commas (remove_tags); "keep", the tags that stay in place, and
            "seed" (shuffle).
    """
    kind = _kind(fields)
    edit = kind.make(fields)
    return draft.change_images(
        draft_id, ids, lambda key, entry: draft.captioned(entry, _edited(edit, key, entry)), kind.done
    )


# The fold "Edit many images": captions and subsets (subsets.py) ------------------------------------------------------

CHANGE, NO_SUBSET, AS_IN_STEP_2 = "Change captions", "No subset", "Empty: as in step 2"


def _subsets(draft_id: str) -> list[tuple[str, str]]:
    """The subsets with their numbers of images, and their folders."""
    return [
        (
            f"{one['name'] or NO_SUBSET}{' × ' + str(one['repeats']) if one['repeats'] else ''} ({one['images']:,})",
            one["folder"],
        )
        for one in subsets.overview(draft_id)
    ]


def draw(draft_id: str, images: Any) -> None:
    """Make the components of the fold. images: the component whose event `changed` says that the images or their
    selection changed."""
    small: dict[str, Any] = {"size": "sm", "scale": 0, "min_width": 150}
    ids, seed, turn = gr.HTML(html_template=""), gr.State(1), gr.State(0)  # turn: how often the images changed
    some = gr.Checkbox(True, label="Only the selected images, if some are selected", interactive=True)
    with gr.Tabs():
        with gr.Tab("Captions", id="captions"):
            edits = [(one.label, key) for key, one in KINDS.items()]
            kind = gr.Dropdown(edits, value="replace", label="Edit", interactive=True)
            text = fold.line(KINDS["replace"].field)
            with gr.Row(elem_classes="hp-fields") as replace:
                put = fold.line("Replace with")
                with gr.Column():
                    pattern = gr.Checkbox(label="Regular expression", interactive=True)
                    any_case = gr.Checkbox(label="Ignore case", interactive=True)
            keep = gr.Number(1, label="Tags to keep at the start", precision=0, visible=False, interactive=True)
            effect = gr.HTML(elem_id="bulk-effect", apply_default_css=False)
            go = gr.Button(CHANGE, interactive=False, elem_id="bulk-apply", **small)
        with gr.Tab("Subsets", id="subsets") as tab:
            fold.say("A subset is a folder of the data set. Each epoch shows its images as often as its repeats say.")
            with gr.Row(elem_classes="hp-fields"):
                place = fold.line("Move the selected images to the subset", placeholder="cat")
                often = gr.Number(None, label="Its repeats", info=AS_IN_STEP_2, precision=0, interactive=True)
                move = gr.Button("Move", elem_id="bulk-move", **small)
            with gr.Row(elem_classes="hp-fields"):
                subset = gr.Dropdown(_subsets(draft_id), value=None, label="Subset", interactive=True)
                name = fold.line("Name of the subset")
                repeats = gr.Number(
                    None, label="Repeats of the subset", info=AS_IN_STEP_2, precision=0, interactive=True
                )
            save = gr.Button("Save the subset", elem_id="bulk-save", **small)
    note = gr.HTML(apply_default_css=False)
    fields = [kind, text, put, pattern, any_case, keep]

    def edit(values: tuple[Any, ...]) -> tuple[dict[str, Any], list[str] | None, bool]:
        """The edit, its images (None: all), and whether something was typed for it."""
        kind, text, put, pattern, any_case, keep, seed, some, selected = values
        given = {"with": put or "", "pattern": pattern, "any_case": any_case, "keep": keep, "seed": seed}
        given |= dict.fromkeys(("find", "text", "tags"), text or "")
        only = selected if some and selected else None
        return {"kind": kind, **given}, only, bool(text) or kind == "shuffle"

    def look(*values: Any) -> list[Any]:
        wanted, only, typed = edit(values)
        if not typed:
            return ["", gr.update(value=CHANGE, interactive=False)]
        try:
            found = preview(draft_id, only, wanted)
        except RunError as error:
            return [fold.note(error, True), gr.update(value=CHANGE, interactive=False)]
        number = found["changed"]
        label = f"Change {count(number, 'caption')}" if number else CHANGE
        word = "changes" if number == 1 else "change"
        said = f"{number:,} of {count(found['of'], 'caption')} {word}."
        effect = part("dataset/folds.html", "examples", said, found["examples"])
        return [effect, gr.update(value=label, interactive=number > 0)]

    def on_apply(*values: Any) -> tuple[str, int]:
        wanted, only, _ = edit(values)
        return fold.tried(lambda: f"{count(apply(draft_id, only, wanted), 'caption')} changed.")(), values[-3] + 1

    def on_kind(kind: str) -> list[Any]:
        field = KINDS[kind].field
        shown = [gr.update(visible=one) for one in (kind == "replace", kind == "shuffle")]
        return [gr.update(label=field, visible=bool(field)), *shown]

    @fold.tried
    def on_move(name: str, repeats: int | None, selected: Any) -> str:
        if not selected:
            raise RunError("Select images on their cards first")
        return f"{count(subsets.move(draft_id, selected, name or '', repeats), 'image')} moved."

    def on_subset(folder: str | None) -> list[Any]:
        return list(subsets.parts_of(folder or ""))

    @fold.tried
    def on_save(folder: str | None, name: str, repeats: int | None) -> str:
        return f"Saved; the subset has {count(subsets.rename(draft_id, folder or '', name or '', repeats), 'image')}."

    def lists(folder: str | None, turn: int) -> tuple[dict[str, Any], int]:
        known = _subsets(draft_id)
        return gr.update(choices=known, value=folder if folder in [value for _, value in known] else None), turn + 1

    # One event for all that changes the preview, and it waits for nothing in the browser: Gradio then sends the newest
    # values once the answer before is there. Of two events, or of two that wait, either answer can be the last.
    given = [*fields, seed, some, ids]
    changes = [one.change for one in (*fields, some, turn)]
    gr.on(changes, look, given, [effect, go], js=form.SELECTED, trigger_mode="always_last", key="bulk-preview", **QUIET)
    kind.change(on_kind, kind, [text, replace, keep], **QUIET)
    images.changed(lists, [subset, turn], [subset, turn], trigger_mode="always_last", key="images-changed", **QUIET)
    tab.select(lists, [subset, turn], [subset, turn], **QUIET)
    subset.input(on_subset, subset, [name, repeats], **QUIET)
    for event in (
        go.click(on_apply, given, [note, seed], js=form.CHOSEN, **QUIET),
        gr.on([move.click, place.submit], on_move, [place, often, ids], note, js=form.CHOSEN, **QUIET),
        gr.on([save.click, name.submit], on_save, [subset, name, repeats], note, js=form.FLUSH, **QUIET),
    ):
        event.then(None, None, None, js=form.SHOW_NEW, **QUIET)
