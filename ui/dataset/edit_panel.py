"""The panel of one image in step 2: rotation, weight, crop and mask (ui/dataset/image_edit.py), with Gradio's own components.

The pencil on a card opens it. The mask is painted with gr.ImageEditor. Its crop gives no rectangle, only smaller pixels,
so the crop is drawn on a picture of its own (crop.js) or typed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from presets import PresetError
from runs import masks
from runs.dataset import MAX_WEIGHT
from runs.files import RunError
from ui import scripts
from ui.dataset import draft, image_edit
from ui.dataset.images import file_url
from ui.html import esc, pressed
from ui.new import settings
from ui.run import fold
from ui.run.fold import QUIET

TICK_S = 1.0
WHOLE = (0.0, 0.0, 1.0, 1.0)
SIDES = ("Left", "Top", "Width", "Height")
CLOSED = "(id) => { hangproof.focusCard(id); return ''; }"


def build(draft_id: gr.BrowserState, images: gr.HTML) -> None:
    """The panel. The event `edit` of `images` names the image."""
    edited = gr.State("")

    def on_edit(event: gr.EventData) -> str:
        return pressed(event, "id")

    images.edit(on_edit, None, edited, **QUIET)

    @gr.render(inputs=[draft_id, edited], triggers=[edited.change], **fold.DRAWN)
    def _opened(draft_id: str, image_id: str) -> None:
        try:
            if image_id:
                _draw(draft_id, image_id, edited)
        except RunError as error:
            fold.say(error)


def _pixels(item: draft.Item) -> list[int]:
    """Left, top, width and height of what is trained."""
    left, top, right, bottom = item.crop or WHOLE
    x, y = round(left * item.width), round(top * item.height)
    return [x, y, round(right * item.width) - x, round(bottom * item.height) - y]


def _head(item: draft.Item) -> str:
    width, height = item.trained_size
    name = f"{item.folder}/{item.file}" if item.folder else item.file
    return f'<h3 class="hp-title">{esc(name)}<span>{width} × {height}</span></h3>'


def _picture(draft_id: str, item: draft.Item) -> str:
    """The whole image; what is cut off is darkened."""
    left, top, right, bottom = (100 * one for one in item.crop or WHOLE)
    place = f"left:{left:.3f}%;top:{top:.3f}%;width:{right - left:.3f}%;height:{bottom - top:.3f}%"
    image = f'<img src="{esc(file_url(draft.large(draft_id, item.id)))}" alt="{esc(item.file)}" draggable="false">'
    return f'<div class="hp-whole">{image}<div class="hp-part" style="{place}"></div></div>'


def _note(draft_id: str) -> str:
    try:
        said, _ = image_edit.mask_note(settings.current(draft_id)["backend"])
    except PresetError:
        said = ""
    return f"Paint over what the LoRA must not learn, such as a background. {said}"


def _draw(draft_id: str, image_id: str, edited: gr.State) -> None:
    item = draft.item(draft_id, image_id)
    small: dict[str, Any] = {"size": "sm", "scale": 0, "min_width": 150}
    with gr.Column(elem_id="image-edit"):
        head = gr.HTML(_head(item), apply_default_css=False)
        with gr.Row(elem_classes="hp-actions"):
            left, right = (gr.Button(f"Rotate {way}", **small) for way in ("left", "right"))
            close = gr.Button("Close", elem_id="edit-close", **small)
        about = "The training shows this image so many times as often as one of weight 1"
        weight = gr.Dropdown(
            list(range(1, MAX_WEIGHT + 1)), value=item.weight, label="Weight", info=about, interactive=True
        )
        note = gr.HTML(elem_id="edit-note", apply_default_css=False)
        with gr.Tabs():
            with gr.Tab("Crop"):
                fold.say("Drag over the image to choose the part to train, or type it in pixels. The original stays.")
                picture = scripts.drawn("crop", "edit-crop", "crop", value=_picture(draft_id, item))
                with gr.Row(elem_classes="hp-fields"):
                    sides = [
                        gr.Number(value, label=label, precision=0, min_width=90, interactive=True)
                        for label, value in zip(SIDES, _pixels(item), strict=True)
                    ]
                with gr.Row(elem_classes="hp-actions"):
                    typed, whole = gr.Button("Crop to these", **small), gr.Button("Use the whole image", **small)
            with gr.Tab("Mask"):
                fold.say(_note(draft_id))
                canvas = gr.ImageEditor(
                    image_edit.canvas(draft_id, item),
                    type="pil",
                    format="png",
                    sources=(),
                    transforms=(),
                    layers=False,
                    buttons=[],
                    brush=gr.Brush(colors=[image_edit.COLOUR], color_mode="fixed"),
                    show_label=False,
                    interactive=True,
                    elem_id="edit-mask",
                )
                with gr.Row(elem_classes="hp-actions"):
                    save, clear = gr.Button("Save the mask", **small), gr.Button("Remove the mask", **small)
                    upload = gr.UploadButton("Upload a mask", file_types=[".png"], elem_id="mask-upload", **small)
                fold.say("An uploaded mask is a PNG of the image's shape: what is black or transparent is ignored.")
    seen, timer = gr.State([item.turn, item.mask, item.crop, item.weight]), gr.Timer(TICK_S)
    shown = [head, picture, *sides, weight, canvas, seen]

    def current(before: list[Any]) -> list[Any]:
        """Updates of `shown`; nothing while the image is as it was."""
        try:
            item = draft.item(draft_id, image_id)
            now = [item.turn, item.mask, item.crop, item.weight]
            if now == before:
                return [gr.skip()] * len(shown)
            drawn = gr.skip() if now[:2] == before[:2] else image_edit.canvas(draft_id, item)
            return [_head(item), _picture(draft_id, item), *_pixels(item), item.weight, drawn, now]
        except RunError as error:
            return [fold.note(error, True), *[gr.skip()] * (len(shown) - 1)]

    def done(act: Callable[..., None], *given: Any) -> str:
        try:
            act(draft_id, image_id, *given)
            return ""
        except RunError as error:
            return fold.note(error, True)

    def on_drawn(event: gr.EventData) -> str:
        return done(image_edit.crop, getattr(event, "part", None))

    def on_typed(*values: int | None) -> str:
        item = draft.item(draft_id, image_id)
        left, top, width, height = (value or 0 for value in values)
        part = left / item.width, top / item.height, (left + width) / item.width, (top + height) / item.height
        return done(image_edit.crop, part)

    def on_save(value: dict[str, Any] | None, seen: list[Any]) -> str:
        return done(image_edit.mask, image_edit.painted(value["layers"] if value else []), seen[0])

    def on_upload(path: str) -> str:
        if Path(path).stat().st_size > masks.MAX_BYTES:
            return fold.note(f"{Path(path).name}: the file is too large for a mask; export it smaller", True)
        return done(image_edit.mask, Path(path).read_bytes(), None, Path(path).name)

    refresh: dict[str, Any] = {"fn": current, "inputs": seen, "outputs": shown, **QUIET}
    for event in (
        left.click(lambda: done(image_edit.rotate, -1), None, note, **QUIET),
        right.click(lambda: done(image_edit.rotate, 1), None, note, **QUIET),
        weight.input(lambda value: done(image_edit.weigh, value), weight, note, **QUIET),
        picture.crop(on_drawn, None, note, **QUIET),
        gr.on([typed.click, *(one.submit for one in sides)], on_typed, sides, note, **QUIET),
        whole.click(lambda: done(image_edit.crop, None), None, note, **QUIET),
        save.click(on_save, [canvas, seen], note, **QUIET),
        clear.click(lambda: done(image_edit.mask, None), None, note, **QUIET),
        upload.upload(on_upload, upload, note, **QUIET),
    ):
        event.then(**refresh).then(None, None, None, js=settings.SHOW_NEW, **QUIET)
    timer.tick(**refresh, key="edit-tick")
    close.click(None, edited, edited, js=CLOSED, **QUIET)
