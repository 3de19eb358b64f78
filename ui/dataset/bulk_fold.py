""" "Edit many images" in step 1: edits of many captions, subsets and tags (ui/dataset/bulk.py, subsets.py, selection.py)."""

from collections.abc import Callable
from typing import Any

import gradio as gr

from monitor.phrases import count
from runs.files import RunError
from ui.dataset import bulk, selection, subsets
from ui.html import esc
from ui.new import settings
from ui.run import fold
from ui.run.fold import QUIET

CHANGE, NO_SUBSET, AS_IN_STEP_2 = "Change captions", "No subset", "Empty: as in step 2"
SHOW_SUBSET = "(folder) => { hangproof.showImages({ folder }); return []; }"
SHOW_TAG = "(tag) => { hangproof.showImages({ how: 'tag', text: tag }); return []; }"


def _effect(found: dict[str, Any]) -> str:
    """What an edit would change, with examples, as markup."""
    examples = "".join(
        f"<li><b>{esc(one['file'])}</b><del>{esc(one['before'] or '(empty)')}</del>"
        f"<ins>{esc(one['after'] or '(empty)')}</ins></li>"
        for one in found["examples"]
    )
    word = "changes" if found["changed"] == 1 else "change"
    said = fold.note(f"{found['changed']:,} of {count(found['of'], 'caption')} {word}.")
    return said + (f'<ul class="hp-examples">{examples}</ul>' if examples else "")


def _subsets(draft_id: str) -> list[tuple[str, str]]:
    """The subsets with their numbers of images, and their folders."""
    return [
        (
            f"{one['name'] or NO_SUBSET}{' × ' + str(one['repeats']) if one['repeats'] else ''} ({one['images']:,})",
            one["folder"],
        )
        for one in subsets.overview(draft_id)
    ]


def _tags(draft_id: str) -> dict[str, Any]:
    found = selection.tags(draft_id)
    listed = len(found["tags"])
    more = f"; the {listed} most frequent are listed" if found["total"] > listed else ""
    choices = [(f"{tag} · {number:,}", tag) for tag, number in found["tags"]]
    return gr.update(choices=choices, info=f"{count(found['total'], 'tag')}{more}")


def _text(label: str, placeholder: str = "", visible: bool = True) -> gr.Textbox:
    return gr.Textbox(label=label, placeholder=placeholder, max_lines=1, visible=visible, interactive=True)


def draw(draft_id: str, images: Any) -> None:
    """Make the components of the fold. images: the component whose event `changed` says that the images or their selection
    changed."""
    small: dict[str, Any] = {"size": "sm", "scale": 0, "min_width": 150}
    ids, seed = gr.HTML(html_template=""), gr.State(1)
    some = gr.Checkbox(True, label="Only the selected images, if some are selected", interactive=True)
    with gr.Tabs() as tabs:
        with gr.Tab("Captions", id="captions"):
            edits = [(one.label, key) for key, one in bulk.KINDS.items()]
            kind = gr.Dropdown(edits, value="replace", label="Edit", interactive=True)
            with gr.Row(elem_classes="hp-fields") as replace:
                find, put = _text("Find in captions"), _text("Replace with")
                with gr.Column():
                    pattern = gr.Checkbox(label="Regular expression", interactive=True)
                    any_case = gr.Checkbox(label="Ignore case", interactive=True)
            add = _text("Text", "photo of ", visible=False)
            without = _text("Tags, separated by commas", "solo, simple background", visible=False)
            keep = gr.Number(
                1, label="Tags to keep in place at the start", precision=0, visible=False, interactive=True
            )
            effect = gr.HTML(elem_id="bulk-effect", apply_default_css=False)
            apply = gr.Button(CHANGE, interactive=False, elem_id="bulk-apply", **small)
        with gr.Tab("Subsets", id="subsets"):
            fold.say("A subset is a folder of the data set. Each epoch shows its images as often as its repeats say.")
            with gr.Row(elem_classes="hp-fields"):
                place = _text("Move the selected images to the subset", "cat")
                often = gr.Number(None, label="Its repeats", info=AS_IN_STEP_2, precision=0, interactive=True)
                move = gr.Button("Move", elem_id="bulk-move", **small)
            with gr.Row(elem_classes="hp-fields"):
                subset = gr.Dropdown(_subsets(draft_id), value=None, label="Subset", interactive=True)
                name = _text("Name of the subset")
                repeats = gr.Number(
                    None, label="Repeats of the subset", info=AS_IN_STEP_2, precision=0, interactive=True
                )
            with gr.Row(elem_classes="hp-actions"):
                save = gr.Button("Save the subset", elem_id="bulk-save", **small)
                show_subset = gr.Button("Show its images", **small)
        with gr.Tab("Tags", id="tags"):
            tag = gr.Dropdown([], label="Tag", elem_id="bulk-tag", interactive=True)
            with gr.Row(elem_classes="hp-actions"):
                show_tag = gr.Button("Show its images", **small)
                remove_tag = gr.Button("Remove it from captions…", elem_id="bulk-remove-tag", **small)
    note = gr.HTML(apply_default_css=False)
    fields = [kind, find, put, pattern, any_case, add, without, keep]

    def edit(values: tuple[Any, ...]) -> tuple[dict[str, Any], list[str] | None, bool]:
        """The edit, its images (None: all), and whether something was typed for it."""
        kind, find, put, pattern, any_case, add, without, keep, seed, some, selected = values
        given = {
            "replace": {"find": find or "", "with": put or "", "pattern": pattern, "any_case": any_case},
            "remove_tags": {"tags": without or ""},
            "shuffle": {"keep": keep, "seed": seed},
        }.get(kind, {"text": add or ""})
        return {"kind": kind, **given}, chosen(some, selected) or None, bool(next(iter(given.values())) != "")

    def chosen(some: bool, selected: Any) -> list[str]:
        return [str(one) for one in selected] if some and isinstance(selected, list) else []

    def look(*values: Any) -> list[Any]:
        wanted, only, typed = edit(values)
        if not typed:
            return ["", gr.update(value=CHANGE, interactive=False)]
        try:
            found = bulk.preview(draft_id, only, wanted)
        except RunError as error:
            return [fold.note(error, True), gr.update(value=CHANGE, interactive=False)]
        number = found["changed"]
        label = f"Change {count(number, 'caption')}" if number else CHANGE
        return [_effect(found), gr.update(value=label, interactive=number > 0)]

    def done(act: Callable[[], str]) -> str:
        try:
            return fold.note(act())
        except RunError as error:
            return fold.note(error, True)

    def on_apply(*values: Any) -> tuple[str, int]:
        wanted, only, _ = edit(values)
        return done(lambda: f"{count(bulk.apply(draft_id, only, wanted), 'caption')} changed."), values[-3] + 1

    def on_kind(kind: str) -> list[Any]:
        adds = kind in ("prefix", "suffix")
        shown = (kind == "replace", adds, kind == "remove_tags", kind == "shuffle")
        return [gr.update(visible=one) for one in shown]

    def on_move(name: str, repeats: int | None, selected: Any) -> str:
        wanted = chosen(True, selected)
        if not wanted:
            return fold.note("Select images on their cards first", True)
        return done(lambda: f"{count(subsets.move(draft_id, wanted, name or '', repeats), 'image')} moved.")

    def on_subset(folder: str | None) -> list[Any]:
        return list(subsets.parts_of(folder or ""))

    def on_save(folder: str | None, name: str, repeats: int | None) -> str:
        def act() -> str:
            subsets.rename(draft_id, folder or "", name or "", repeats)
            return f"The subset {name or 'without a name'} is saved."

        return done(act)

    def lists(folder: str | None) -> list[Any]:
        known = _subsets(draft_id)
        kept = folder if folder in [value for _, value in known] else None
        return [gr.update(choices=known, value=kept), _tags(draft_id)]

    previewed: dict[str, Any] = {"fn": look, "inputs": [*fields, seed, some, ids], "outputs": [effect, apply]}
    previewed |= {"js": settings.CHOSEN, "trigger_mode": "always_last", **QUIET}
    gr.on([one.change for one in (*fields[1:], some)], **previewed)
    kind.change(on_kind, kind, [replace, add, without, keep], **QUIET).then(**previewed)
    images.changed(lists, subset, [subset, tag], trigger_mode="always_last", **QUIET).then(**previewed)
    tabs.select(lists, subset, [subset, tag], **QUIET)
    subset.input(on_subset, subset, [name, repeats], **QUIET)
    for event in (
        apply.click(on_apply, previewed["inputs"], [note, seed], js=settings.CHOSEN, **QUIET),
        gr.on([move.click, place.submit], on_move, [place, often, ids], note, js=settings.CHOSEN, **QUIET),
        gr.on([save.click, name.submit], on_save, [subset, name, repeats], note, js=settings.FLUSH, **QUIET),
    ):
        event.then(None, None, None, js=settings.SHOW_NEW, **QUIET)
    show_subset.click(None, subset, None, js=SHOW_SUBSET, **QUIET)
    show_tag.click(None, tag, None, js=SHOW_TAG, **QUIET)
    remove_tag.click(
        lambda tag: ["remove_tags", tag or "", gr.update(selected="captions")], tag, [kind, without, tabs], **QUIET
    )
