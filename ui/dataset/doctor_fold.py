""" "Check images" in step 1: the findings with their fixes, and the buckets (ui/dataset/doctor.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from monitor.phrases import count
from runs.files import RunError
from ui import scripts
from ui.dataset import doctor, draft
from ui.dataset.checks import KINDS, Finding
from ui.dataset.doctor import BUCKETS
from ui.dataset.images import thumb_url
from ui.html import esc, press, pressed
from ui.new import settings
from ui.run import fold
from ui.run.fold import QUIET

TICK_S = 1.0
ALL_OF_IT = 0.9995  # of an image that its bucket keeps
ABOUT_BUCKETS = (
    "An image is scaled to cover its bucket and cropped at the centre. The dark parts are cut off. A batch holds images of one "
    "bucket."
)
# Selects the images of a finding on the cards, whose ids are in a component of this name, and opens "Write captions".
WRITE = "(ids) => { hangproof.writeCaptions(ids); return []; }"


def _picture(thumb: str, name: str, part: Sequence[float] | None = None, kept: bool = False) -> str:
    """A thumbnail. part: what the trainer keeps of it, as fractions; the rest is darkened."""
    image = f'<img loading="lazy" src="{esc(thumb)}" alt="{esc(name)}">' if thumb else "<span>no picture</span>"
    if thumb and part:
        left, top, right, bottom = (100 * one for one in part)
        place = f"left:{left:.2f}%;top:{top:.2f}%;width:{right - left:.2f}%;height:{bottom - top:.2f}%"
        image += f'<div class="hp-part" style="{place}"></div>'
    title = f' title="Kept: {esc(name)}"' if kept else ""
    return f'<div class="hp-whole{" hp-kept" if kept else ""}"{title}>{image}</div>'


def _figure(draft_id: str, report: doctor.Report, found: Finding, kind: str) -> str:
    """An image of a finding, or of a bucket, with its fix."""
    item, other, slot = report.items[found.id], report.items.get(found.other), None
    if report.plan and kind in (BUCKETS, "cropped", "lonely"):
        slot = report.plan.slots.get(found.id)
    cut = slot is not None and slot.kept < ALL_OF_IT
    name = f"{item.folder}/{item.file}" if item.folder else item.file
    pictures, lines = _picture(thumb_url(draft_id, item), name, slot.part if slot and cut else None), [found.detail]
    if slot and kind == BUCKETS:
        lines = [f"{slot.kept:.0%} kept" if cut else "all of it is trained"]
    if other:
        pictures += _picture(thumb_url(draft_id, other), other.file, kept=True)
        lines.append(f"Kept instead: {other.file}")
    said = "".join(f"<span>{esc(line)}</span>" for line in lines if line)
    fix = "" if kind == BUCKETS else KINDS[kind].fix
    act = press(fix, "fix", label=f"{fix}: {name}", id=item.id) if fix else ""
    caption = f'<figcaption><span class="hp-name">{esc(name)}</span>{said}</figcaption>'
    return f'<figure data-file="{esc(name)}"><div class="hp-pair">{pictures}</div>{caption}{act}</figure>'


def _pictures(draft_id: str, kind: str, bucket: int, most: int) -> str:
    """The first images of a finding or a bucket, and a button for more."""
    report = doctor.examine(draft_id)
    found = doctor.pictures(report, kind, bucket)
    figures = "".join(_figure(draft_id, report, one, kind) for one in found[:most])
    more = press(f"Show more ({len(found) - most:,})", "more") if len(found) > most else ""
    return f'<div class="hp-found">{figures}</div>{more}'


def _said(report: dict[str, Any], message: str) -> str:
    """What a check came to, as a sentence or two."""
    total = report["total"]
    found = f"{'Found' if report['kinds'] else 'Nothing found'} in {count(total, 'image')}."
    return f"{message} {found if total else 'There are no images.'}".strip()


def _choices(report: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(one["title"], one["kind"]) for one in report["kinds"]]
    if not report["total"]:
        return found
    few = sum(one["few"] for one in report["buckets"])
    text = f"Buckets: {len(report['buckets'])} at {report['resolution']} pixels" + (
        f", {few} smaller than a batch" if few else ""
    )
    return [*found, ("Buckets: not known while step 2 has an error" if report["plan_error"] else text, BUCKETS)]


def _bucket(one: dict[str, Any]) -> tuple[str, int]:
    size = " × ".join(map(str, one["size"])) + (f" · {one['folder']}" if one["folder"] else "")
    shown = "" if one["shown"] == one["images"] else f", {one['shown']:,} an epoch"
    few = ", smaller than a batch" if one["few"] else ""
    return f"{size}: {count(one['images'], 'image')}{shown}{few}", one["number"]


def draw(draft_id: str) -> None:
    """Make the components of the fold."""
    doctor.examine(draft_id, again=True)  # a file may have gone
    state = gr.HTML(elem_id="check-state", apply_default_css=False)
    small: dict[str, Any] = {"size": "sm", "scale": 0, "min_width": 110}
    undo = gr.Button("Undo", visible=False, **small)
    kind = gr.Radio([], label="Findings", visible=False, interactive=True, elem_id="check-kinds")
    bucket = gr.Dropdown([], label="Bucket", visible=False, interactive=True, elem_id="check-bucket")
    about = gr.HTML(apply_default_css=False)
    with gr.Row(elem_classes="hp-actions"):
        fix = gr.Button("Fix", visible=False, elem_id="check-fix", **small)
        write = gr.Button("Write captions…", visible=False, **small)
    pictures = scripts.drawn("check-pictures")
    ids = gr.JSON(visible=False)
    # What the user chose last: a look that began before the choice, and answers after it, is followed by one that shows the choice.
    picked, place = gr.State(None), gr.State(None)
    most, message, seen = gr.State(doctor.PAGE), gr.State(""), gr.State(None)
    timer = gr.Timer(TICK_S)
    shown = [state, undo, kind, bucket, about, fix, write, pictures, ids, seen]
    chosen = [picked, place, most, message, seen]

    def current(name: str | None, number: int | None, most: int, said: str, seen: object) -> list[Any]:
        """Updates of `shown`; nothing while neither the images nor what is shown of them changed."""
        try:
            report = doctor.report(draft_id)
            now = [id(doctor.examine(draft_id)), name, number, most, said]  # the same report where nothing changed
            if seen == now:
                return [gr.skip()] * len(shown)
            return [*_drawn(report, name, number, most, said), now]
        except RunError as error:
            return [fold.note(error, True), *[gr.skip()] * (len(shown) - 1)]

    def _drawn(report: dict[str, Any], name: str | None, number: int | None, most: int, said: str) -> list[Any]:
        choices = _choices(report)
        if name not in [key for _, key in choices]:
            name = choices[0][1] if choices else None
        one = next((one for one in report["kinds"] if one["kind"] == name), None)
        buckets = [_bucket(one) for one in report["buckets"]] if name == BUCKETS else []
        number = number if number in [key for _, key in buckets] else 0
        text = one["about"] if one else report["plan_error"] or ABOUT_BUCKETS if name else ""
        return [
            fold.note(_said(report, said)),
            gr.update(visible=bool(said)),
            gr.update(choices=choices, value=name, visible=bool(choices)),
            gr.update(choices=buckets, value=number if buckets else None, visible=bool(buckets)),
            f"<p>{esc(text)}</p>",
            gr.update(visible=bool(one and one["fix_all"]), value=one["fix_all"] if one else ""),
            gr.update(visible=bool(one and one["write"])),
            _pictures(draft_id, str(name), number or 0, most) if one or buckets else "",
            [found.id for found in doctor.examine(draft_id).findings[one["kind"]]] if one and one["write"] else [],
        ]

    def on_act(event: gr.EventData, name: str, most: int) -> tuple[int, str]:
        if pressed(event, "do") == "more":
            return most + doctor.PAGE, ""
        return most, done(doctor.fix, name, [pressed(event, "id")])

    def done(act: Callable[..., object], *given: Any) -> str:
        """What an action on the draft says, or why it cannot be done."""
        try:
            return str(act(draft_id, *given) or "")
        except RunError as error:
            return str(error)

    refresh: dict[str, Any] = {"fn": current, "inputs": chosen, "outputs": shown, **QUIET}
    first = [picked, place, most, message]
    picks = gr.on(
        [kind.input, bucket.input], lambda name, at: (name, at, doctor.PAGE, ""), [kind, bucket], first, **QUIET
    )
    picks.then(**refresh)
    for event in (
        undo.click(lambda: done(draft.undo), None, message, js=settings.FLUSH, **QUIET),
        fix.click(lambda name: done(doctor.fix, name), kind, message, js=settings.FLUSH, **QUIET),
        pictures.act(on_act, [kind, most], [most, message], js=settings.FLUSH, **QUIET),
    ):
        event.then(**refresh).then(None, None, None, js=settings.SHOW_NEW, **QUIET)
    write.click(None, ids, None, js=WRITE, **QUIET)
    timer.tick(**refresh, key="check-tick")
