""" "Check images" in step 1: what is wrong with the images and captions, each with a fix, and the buckets.

All of it is computed from the draft each time something changed: the pixels were measured when the images were dropped
(draft_images.looks_of). Each fix is one step that undo takes back.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

import presets
import runs
from monitor.phrases import count
from runs.files import RunError
from ui import scripts
from ui.dataset import bucket_preview, checks, draft, draft_store
from ui.dataset.bucket_preview import Bucket, Plan
from ui.dataset.checks import KINDS, Finding, Findings
from ui.dataset.draft import Item
from ui.dataset.draft_images import Entry
from ui.dataset.images import thumb_url, undo
from ui.html import esc, part, pressed
from ui.new import form
from ui.run import fold
from ui.run.fold import QUIET

PAGE = 24
MOST_BUCKETS = 200
BUCKETS = "buckets"  # beside the kinds of findings
ALL_OF_IT = 0.9995  # of an image that its bucket keeps
ABOUT_BUCKETS = (
    "An image is scaled to cover its bucket and cropped at the centre. The dark parts are cut off. A batch holds "
    "images of one bucket."
)
# Selects the images of a finding on the cards, whose ids are in a component of this name, and opens "Write captions".
WRITE = "(ids) => { hangproof.writeCaptions(ids); return []; }"


@dataclass(frozen=True)
class Report:
    """What is known of a draft now."""

    items: dict[str, Item]
    findings: Findings
    plan: Plan | None
    plan_error: str

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets; none while they are not known."""
        return self.plan.buckets if self.plan else []


def examine(draft_id: str, again: bool = False) -> Report:
    """The findings of a draft, computed where it has changed, or `again`. Raises RunError: it cannot be read."""
    fields, items, memory = draft.form(draft_id), draft.items(draft_id), draft_store.memory(draft_id)
    known_items, known_fields, report = memory.get("report", (None, None, None))
    if report is None or again or known_items is not items or known_fields is not fields:
        plan, error = _plan(draft_id, items)
        found = checks.findings(items, _damaged(draft_id), draft.trigger(draft_id), plan)
        report = Report({item.id: item for item in items}, found, plan, error)
        memory["report"] = items, fields, report
    return report


def _damaged(draft_id: str) -> list[Finding]:
    """The images whose file is not the one that was added; a start decodes them all, and finds other damage."""
    found = []
    for key, entry in draft_store.read(draft_id)["images"].items():
        try:
            size = (draft.images_dir(draft_id) / entry["stored"]).stat().st_size
        except OSError as error:
            found.append(Finding(key, f"its file cannot be read ({error.strerror}); remove the image and add it again"))
            continue
        if size != entry["bytes"]:
            found.append(Finding(key, "its file was changed since you added it; remove it and add it again"))
    return found


def _plan(draft_id: str, items: list[Item]) -> tuple[Plan | None, str]:
    """The buckets with the settings of step 2; or why there are none."""
    try:
        spec, faults = form.parse({**form.current(draft_id), "name": "my-lora"})
        if spec is None:
            return None, f"{form.shown(faults[0])} (step 2)"
        return bucket_preview.plan(spec, items), ""
    except (runs.RunError, presets.PresetError) as error:
        return None, str(error)


# Actions --------------------------------------------------------------------------------------------------------------


def fix(draft_id: str, kind: str, only: Iterable[str] | None = None) -> str:
    """Fix the findings of a kind, as one step that can be undone. Returns a sentence about what was done. Raises
    RunError: there is no such finding any more, or it cannot be fixed.

    Args:
        only: ids of the images; None: all with this finding.
    """
    report = examine(draft_id)
    wanted = None if only is None else set(only)
    found = [one for one in report.findings.get(kind, []) if wanted is None or one.id in wanted]
    if not found or not KINDS[kind].fix:
        raise RunError("There is nothing left to fix here; the images were changed meanwhile")
    ids = [one.id for one in found]
    if KINDS[kind].fix == "Remove":
        draft.remove(draft_id, ids)
        return f"Removed {count(len(ids), 'image')}."
    change, text = _change(draft_id, report, kind)
    number = draft.change_images(draft_id, ids, change, f"{text} of {{}}")
    if not number:
        raise RunError("No bucket with enough images is near; add images, or set the batch size to 1")
    return f"{text[:1].upper()}{text[1:]} of {count(number, 'image')}."


Change = Callable[[str, Entry], dict[str, Any] | None]


def _change(draft_id: str, report: Report, kind: str) -> tuple[Change, str]:
    """What a fix changes of an image's entry (None: nothing), and what undo calls it."""
    if kind in ("no_caption", "no_trigger"):
        make = draft.with_trigger(draft.trigger(draft_id))
        return lambda key, entry: make(entry), "trigger word"
    if kind == "sideways":
        return lambda key, entry: draft.rotated(entry), "rotation"
    own = {key: slot.bucket for key, slot in (report.plan.slots if report.plan else {}).items()}
    sizes = own if kind == "cropped" else _full_bucket(report)

    def crop(key: str, entry: Entry) -> dict[str, Any] | None:
        size = sizes.get(key)
        return None if size is None else {"crop": list(bucket_preview.crop_for(report.items[key], size[0] / size[1]))}

    return crop, "crop"


def _full_bucket(report: Report) -> dict[str, tuple[int, int]]:
    """For each image of a bucket smaller than a batch, the bucket with enough images whose shape is nearest."""
    found: dict[str, tuple[int, int]] = {}
    for bucket in report.buckets:
        full = [one.size for one in report.buckets if not one.few and one.folder == bucket.folder]
        if bucket.few and full:
            aspect = bucket.size[0] / bucket.size[1]
            nearest = min(full, key=lambda size: max(size[0] / size[1] / aspect, aspect / (size[0] / size[1])))
            found |= dict.fromkeys(bucket.images, nearest)
    return found


# What the page and the API show ---------------------------------------------------------------------------------------


def report(draft_id: str) -> dict[str, Any]:
    """The findings by kind with their numbers, and the largest buckets. Raises RunError: the draft cannot be read."""
    found = examine(draft_id)
    some = found.buckets[:MOST_BUCKETS]
    buckets = [{**vars(one), "number": n, "images": len(one.images)} for n, one in enumerate(some)]
    return {
        "total": len(found.items),
        "kinds": [{"kind": kind, **KINDS[kind].heading(len(some))} for kind, some in found.findings.items()],
        "buckets": buckets,
        "all_buckets": len(found.buckets),
        "small_buckets": sum(one.few for one in found.buckets),
        "plan_error": found.plan_error,
        "resolution": found.plan.resolution if found.plan else 0,
    }


# The fold -------------------------------------------------------------------------------------------------------------


def _figure(draft_id: str, known: Report, found: Finding, kind: str) -> tuple[object, ...]:
    """An image of a finding, or of a bucket: its id, name, pictures, what is said of it, and the label of its fix. Of a
    picture, what the trainer keeps is shown, and the rest is darkened."""
    item, other, slot = known.items[found.id], known.items.get(found.other), None
    if known.plan and kind in (BUCKETS, "cropped", "lonely"):
        slot = known.plan.slots.get(found.id)
    kept = slot.part if slot and slot.kept < ALL_OF_IT else None
    name = f"{item.folder}/{item.file}" if item.folder else item.file
    percent = kept and [100 * one for one in (kept[0], kept[1], kept[2] - kept[0], kept[3] - kept[1])]
    pictures, lines = [(thumb_url(draft_id, item), name, percent, False)], [found.detail]
    if slot and kind == BUCKETS:
        lines = [f"{slot.kept:.0%} kept" if kept else "all of it is trained"]
    if other:
        pictures.append((thumb_url(draft_id, other), other.file, None, True))
        lines.append(f"Kept instead: {other.file}")
    return item.id, name, pictures, lines, "" if kind == BUCKETS else KINDS[kind].fix


def _pictures(draft_id: str, kind: str, bucket: int, most: int) -> str:
    """The first images of a finding or a bucket, and a button for more."""
    known = examine(draft_id)
    found = known.findings.get(kind, [])
    if kind == BUCKETS and 0 <= bucket < len(known.buckets):
        found = [Finding(key) for key in known.buckets[bucket].images]
    figures = [_figure(draft_id, known, one, kind) for one in found[:most]]
    return part("dataset/folds.html", "figures", figures, len(found) - most)


def _choices(report: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(one["title"], one["kind"]) for one in report["kinds"]]
    if not report["total"]:
        return found
    few = f", {report['small_buckets']:,} smaller than a batch" if report["small_buckets"] else ""
    text = f"Buckets: {report['all_buckets']:,} at {report['resolution']} pixels{few}"
    return [*found, ("Buckets: not known while step 2 has an error" if report["plan_error"] else text, BUCKETS)]


def _bucket(one: dict[str, Any]) -> tuple[str, int]:
    size = " × ".join(map(str, one["size"])) + (f" · {one['folder']}" if one["folder"] else "")
    shown = "" if one["shown"] == one["images"] else f", {one['shown']:,} an epoch"
    few = ", smaller than a batch" if one["few"] else ""
    return f"{size}: {count(one['images'], 'image')}{shown}{few}", one["number"]


def _parts(draft_id: str, name: str | None, number: int | None, most: int, said: str) -> list[dict[str, Any]]:
    """The properties of the fold's components, in order. Raises RunError: the draft cannot be read."""
    found = report(draft_id)
    choices = _choices(found)
    if name not in [key for _, key in choices]:
        name = choices[0][1] if choices else None
    one = next((one for one in found["kinds"] if one["kind"] == name), None)
    buckets = [_bucket(one) for one in found["buckets"]] if name == BUCKETS else []
    number = number if number in [key for _, key in buckets] else 0
    text = one["about"] if one else found["plan_error"] or ABOUT_BUCKETS if name else ""
    total = f"{'Found' if found['kinds'] else 'Nothing found'} in {count(found['total'], 'image')}."
    ids = [found.id for found in examine(draft_id).findings[one["kind"]]] if one and name == "no_caption" else []
    return [
        {"value": fold.note(f"{said} {total if found['total'] else 'There are no images.'}".strip())},
        {"visible": bool(said)},
        {"choices": choices, "value": name, "visible": bool(choices)},
        {"choices": buckets, "value": number if buckets else None, "visible": bool(buckets)},
        {"value": f"<p>{esc(text)}</p>"},
        {"visible": bool(one and one["fix_all"]), "value": one["fix_all"] if one else ""},
        {"visible": bool(ids)},
        {"value": _pictures(draft_id, str(name), number or 0, most) if one or buckets else ""},
        {"value": ids},
    ]


def draw(draft_id: str, images: Any) -> None:
    """Make the components of the fold. images: its event `checked` says that the images or settings changed."""
    examine(draft_id, again=True)  # a file may have gone
    of_state, of_back, of_kind, of_bucket, of_about, of_repair, of_write, of_figures, of_ids = _parts(
        draft_id, None, None, PAGE, ""
    )
    state = gr.HTML(elem_id="check-state", apply_default_css=False, **of_state)
    small: dict[str, Any] = {"size": "sm", "scale": 0, "min_width": 110}
    back = gr.Button("Undo", **of_back, **small)
    kind = gr.Radio(label="Findings", interactive=True, elem_id="check-kinds", **of_kind)
    bucket = gr.Dropdown(label="Bucket", interactive=True, elem_id="check-bucket", **of_bucket)
    about = gr.HTML(apply_default_css=False, **of_about)
    with gr.Row(elem_classes="hp-actions"):
        repair = gr.Button(elem_id="check-fix", **of_repair, **small)
        write = gr.Button("Write captions…", **of_write, **small)
    figures = scripts.drawn("check-pictures", **of_figures)
    ids = gr.JSON(visible=False, **of_ids)
    # What the user chose last: a look that began before it is followed by one that shows the choice.
    picked, place = gr.State(None), gr.State(None)
    most, message = gr.State(PAGE), gr.State("")
    shown, chosen = [state, back, kind, bucket, about, repair, write, figures, ids], [picked, place, most, message]

    def current(*given: Any) -> list[Any]:
        try:
            return [gr.update(**one) for one in _parts(draft_id, *given)]
        except RunError as error:
            return [fold.note(error, True), *[gr.skip()] * (len(shown) - 1)]

    def on_act(event: gr.EventData, name: str, most: int) -> tuple[int, str]:
        if pressed(event, "do") == "more":
            return most + PAGE, ""
        return most, done(fix, name, [pressed(event, "id")])

    def done(act: Callable[..., object], *given: Any) -> str:
        """What an action on the draft says, or why it cannot be done."""
        try:
            return str(act(draft_id, *given) or "")
        except RunError as error:
            return str(error)

    refresh: dict[str, Any] = {"fn": current, "inputs": chosen, "outputs": shown, **QUIET}
    picks = [kind.input, bucket.input]
    gr.on(picks, lambda name, at: (name, at, PAGE, ""), [kind, bucket], chosen, **QUIET).then(**refresh)
    for event in (
        back.click(lambda: done(undo), None, message, js=form.FLUSH, **QUIET),
        repair.click(lambda name: done(fix, name), kind, message, js=form.FLUSH, **QUIET),
        figures.act(on_act, [kind, most], [most, message], js=form.FLUSH, **QUIET),
    ):
        event.then(**refresh).then(None, None, None, js=form.SHOW_NEW, **QUIET)
    write.click(None, ids, None, js=WRITE, **QUIET)
    images.checked(**refresh, trigger_mode="always_last", key="images-checked")
