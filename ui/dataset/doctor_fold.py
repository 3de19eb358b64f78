""" "Check images" in step 2: the findings with their fixes (ui/dataset/doctor.py)."""

from collections.abc import Callable
from typing import Any

import gradio as gr

from runs.files import RunError
from ui import scripts
from ui.dataset import doctor, draft
from ui.dataset.checks import KINDS, Finding
from ui.dataset.draft_store import count
from ui.dataset.images import thumb_url
from ui.html import esc, press, pressed
from ui.new import settings
from ui.run import fold
from ui.run.fold import QUIET

TICK_S = 1.0
# Selects the images of a finding on the cards, whose ids are in a component of this name, and opens "Write captions".
WRITE = "(ids) => { hangproof.writeCaptions(ids); return []; }"


def build(draft_id: gr.BrowserState) -> None:
    """Build the fold; `draft_id` has the draft of this browser."""
    fold.opened("Check images", "image-check", draft_id, _draw)


def _picture(thumb: str, name: str, kept: bool = False) -> str:
    image = f'<img loading="lazy" src="{esc(thumb)}" alt="{esc(name)}">' if thumb else "<span>no picture</span>"
    title = f' title="Kept: {esc(name)}"' if kept else ""
    return f'<div class="hp-whole{" hp-kept" if kept else ""}"{title}>{image}</div>'


def _figure(draft_id: str, report: doctor.Report, found: Finding, kind: str) -> str:
    """An image of a finding, with its fix."""
    item, other = report.items[found.id], report.items.get(found.other)
    name = f"{item.folder}/{item.file}" if item.folder else item.file
    pictures, lines = _picture(thumb_url(draft_id, item), name), [found.detail]
    if other:
        pictures += _picture(thumb_url(draft_id, other), other.file, kept=True)
        lines.append(f"Kept instead: {other.file}")
    said = "".join(f"<span>{esc(line)}</span>" for line in lines if line)
    fix = KINDS[kind].fix
    act = press(fix, "fix", label=f"{fix}: {name}", id=item.id) if fix else ""
    caption = f'<figcaption><span class="hp-name">{esc(name)}</span>{said}</figcaption>'
    return f'<figure data-file="{esc(name)}"><div class="hp-pair">{pictures}</div>{caption}{act}</figure>'


def _pictures(draft_id: str, kind: str, most: int) -> str:
    """The first images of a finding, and a button for more."""
    report = doctor.examine(draft_id)
    found = report.findings.get(kind, [])
    figures = "".join(_figure(draft_id, report, one, kind) for one in found[:most])
    more = press(f"Show more ({len(found) - most:,})", "more") if len(found) > most else ""
    return f'<div class="hp-found">{figures}</div>{more}'


def _said(report: dict[str, Any], message: str) -> str:
    """What a check came to, as a sentence or two."""
    total = report["total"]
    found = f"{'Found' if report['kinds'] else 'Nothing found'} in {count(total, 'image')}."
    return f"{message} {found if total else 'There are no images.'}".strip()


def _draw(draft_id: str) -> None:
    doctor.examine(draft_id, again=True)  # a file may have gone
    state = gr.HTML(elem_id="check-state", apply_default_css=False)
    small: dict[str, Any] = {"size": "sm", "scale": 0, "min_width": 110}
    undo = gr.Button("Undo", visible=False, **small)
    kind = gr.Radio([], label="Findings", visible=False, interactive=True, elem_id="check-kinds")
    about = gr.HTML(apply_default_css=False)
    with gr.Row(elem_classes="hp-actions"):
        fix = gr.Button("Fix", visible=False, elem_id="check-fix", **small)
        write = gr.Button("Write captions…", visible=False, **small)
    pictures = scripts.drawn("buttons", "check-pictures", "act")
    ids = gr.JSON(visible=False)
    # What the user chose last: a look that began before the choice, and answers after it, is followed by one that shows the choice.
    picked = gr.State(None)
    most, message, seen = gr.State(doctor.PAGE), gr.State(""), gr.State(None)
    timer = gr.Timer(TICK_S)
    shown = [state, undo, kind, about, fix, write, pictures, ids, seen]
    chosen = [picked, most, message, seen]

    def current(name: str | None, most: int, said: str, seen: object) -> list[Any]:
        """Updates of `shown`; nothing while neither the images nor what is shown of them changed."""
        try:
            report = doctor.report(draft_id)
            now = [id(doctor.examine(draft_id)), name, most, said]  # the same report where nothing changed
            if seen == now:
                return [gr.skip()] * len(shown)
            return [*_drawn(report, name, most, said), now]
        except RunError as error:
            return [fold.note(error, True), *[gr.skip()] * (len(shown) - 1)]

    def _drawn(report: dict[str, Any], name: str | None, most: int, said: str) -> list[Any]:
        choices = [(one["title"], one["kind"]) for one in report["kinds"]]
        if name not in [key for _, key in choices]:
            name = choices[0][1] if choices else None
        one = next((one for one in report["kinds"] if one["kind"] == name), None)
        return [
            fold.note(_said(report, said)),
            gr.update(visible=bool(said)),
            gr.update(choices=choices, value=name, visible=bool(choices)),
            f"<p>{esc(one['about'] if one else '')}</p>",
            gr.update(visible=bool(one and one["fix_all"]), value=one["fix_all"] if one else ""),
            gr.update(visible=bool(one and one["write"])),
            _pictures(draft_id, one["kind"], most) if one else "",
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
    picks = kind.input(lambda name: (name, doctor.PAGE, ""), kind, [picked, most, message], **QUIET)
    picks.then(**refresh)
    for event in (
        undo.click(lambda: done(draft.undo), None, message, js=settings.FLUSH, **QUIET),
        fix.click(lambda name: done(doctor.fix, name), kind, message, js=settings.FLUSH, **QUIET),
        pictures.act(on_act, [kind, most], [most, message], js=settings.FLUSH, **QUIET),
    ):
        event.then(**refresh).then(None, None, None, js=settings.SHOW_NEW, **QUIET)
    write.click(None, ids, None, js=WRITE, **QUIET)
    timer.tick(**refresh, key="check-tick")
