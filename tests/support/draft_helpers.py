"""Drafts for tests: files as a browser sends them, pictures that differ, what a draft holds then."""

import hashlib
import io
import random
import shutil
import zipfile
from pathlib import Path

import gradio as gr
import numpy as np
import pytest
from PIL import Image
from runs_helpers import written as note  # noqa: F401 - for the tests
from ui_helpers import photos

import presets
import runs
from runs import masks
from ui.dataset import doctor, draft, draft_store
from ui.new import run_starts


@pytest.fixture
def mine(data) -> str:
    """A new draft; `data` is the data root."""
    return draft.new_id()


def upload(path) -> Path:
    """A file as Gradio stores an upload: in a folder that is named after its content."""
    target = draft.uploads_dir() / hashlib.sha256(path.read_bytes()).hexdigest() / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    return target


def drop(draft_id: str, *paths, **options) -> tuple[int, list[str]]:
    """Drop files as the page does; those of a folder as (path, relative name)."""
    pairs = [path if isinstance(path, tuple) else (path, path.name) for path in paths]
    return draft.add(draft_id, [(upload(path), name) for path, name in pairs], **options)


def item_of(draft_id: str, file: str) -> draft.Item:
    """The image with a file name, such as "a.png" or "folder/a.png"."""
    (found,) = [one for one in draft.items(draft_id) if f"{one.folder}/{one.file}".removeprefix("/") == file]
    return found


def set_caption(draft_id: str, file: str, caption: str) -> None:
    draft.set_caption(draft_id, item_of(draft_id, file).id, caption)


def captions(draft_id: str) -> dict[str, str]:
    return {f"{item.folder}/{item.file}".removeprefix("/"): item.caption for item in draft.items(draft_id)}


def create_run(draft_id: str, values) -> tuple[Path, list[str]]:
    """Store settings, and create the run that Start would start: its folder and the messages."""
    draft.save_fields(draft_id, values)
    spec, warnings = run_starts.checked(draft_id)
    folder, notes = run_starts.create(draft_id, run_starts.for_run(draft_id, spec))
    return folder, [*warnings, *notes]


def photo(path, seed: int = 0, size=(96, 64), **save):
    """A picture unlike that of any other seed."""
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    small = Image.frombytes("RGB", (8, 8), random.Random(seed).randbytes(192))
    small.resize(size, Image.Resampling.BICUBIC).save(path, **save)
    return path


def shot(name: str) -> Image.Image:
    """A photo that scikit-image brings."""
    return Image.open(photos(name)[0]).convert("RGB")


def camera_exif(orientation: int, *size: int) -> Image.Exif:
    """The metadata of a camera that was held like this; size: that of its sensor."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    if size:
        exif.get_ifd(0x8769).update(zip((0xA002, 0xA003), size, strict=True))
    return exif


def photo_folder(root: Path, number: int) -> Path:
    """A folder of large photos with captions. They differ in what follows the image: to draw them takes long."""
    content = photo(root.parent / "one.jpg", 5, size=(3000, 2000), quality=92).read_bytes()
    root.mkdir()
    for n in range(number):
        (root / f"{n}.jpg").write_bytes(content + f"{n}".encode())
        (root / f"{n}.txt").write_text(f"number {n}")
    return root


def tree(root: Path) -> list[tuple[Path, str]]:
    """The files of a folder as the browser names them: by their path in it."""
    return [(path, path.relative_to(root).as_posix()) for path in sorted(root.rglob("*")) if path.is_file()]


def packed(path: Path, entries: dict[str, bytes], compression=zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def png(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    photo(buffer, seed, format="PNG")
    return buffer.getvalue()


def top_ignored(width: int, height: int) -> bytes:
    """A mask that ignores the upper half."""
    mask = Image.new("L", (width, height), 255)
    mask.paste(0, (0, 0, width, height // 2))
    return masks.png(mask)


def mask_of(draft_id: str, item: draft.Item) -> np.ndarray:
    """The pixels of an image's mask."""
    with Image.open(draft.masks_dir(draft_id) / item.mask) as image:
        return np.asarray(image)


def run_of(draft_id: str, **fields) -> Path:
    spec = runs.make({"name": "my lora", "trigger": "tok", "model": "tiny-flux", "backend": "diffusers", **fields})
    return runs.create(spec, draft.sources(draft_id))


def limits(monkeypatch, **values):
    usual = presets.defaults()
    table = {**usual, "images": {**usual["images"], **values}}
    monkeypatch.setattr(presets, "defaults", lambda: table)


def item(key: str, width: int, height: int, **more) -> draft.Item:
    """An image of a draft, without a draft."""
    return draft.Item(**{"id": key, "file": f"{key}.png", "folder": "", "width": width, "height": height, "caption": "",
                         "trained_size": (width, height), "sha256": key, "warnings": (), **more})  # fmt: skip


def entry(number: int, caption: str) -> dict:
    """A stored image without a file: captions and subsets need none."""
    return {
        "width": 512, "height": 512, "sha256": f"{number:064x}", "bytes": 1, "upright": 0,
        "hash": f"{random.Random(number).getrandbits(160):040x}", "turn": 0, "file": f"{number:05}.png",
        "stored": f"{number:024x}.png", "folder": "", "names": [["drop", f"{number:05}"]], "caption": caption,
        "crop": None, "mask": None, "weight": 1, "caption_by": "file" if caption else "",
    }  # fmt: skip


def filled(draft_id: str, *texts: str) -> list[str]:
    """Give a draft images with these captions. Returns their ids."""
    with draft_store.change(draft_id) as edit:
        edit.state["images"] = {f"{n:024x}": entry(n, text) for n, text in enumerate(texts)}
    return list(draft_store.read(draft_id)["images"])


def texts(draft_id: str) -> list[str]:
    return [item.caption for item in draft.items(draft_id)]


def found(draft_id: str) -> dict[str, list[str]]:
    """The files of each finding of "Check images"."""
    report = doctor.examine(draft_id, again=True)
    return {kind: [report.items[one.id].file for one in some] for kind, some in report.findings.items()}


def add_photos(draft_id: str, folder: Path, count: int) -> None:
    drop(draft_id, *(photo(folder / f"{n}.png", n) for n in range(count)))


def drawn(draw, *given: object):
    """The functions of a fold's events, and its labelled components, each by its name."""
    with gr.Blocks() as page:
        draw(*given)
    parts = [block.get_config() for block in page.blocks.values()]
    labelled = {str(part.get("label") or part.get("value")): part for part in parts}
    functions = [arg for one in page.fns.values() for arg in (one.fn, *getattr(one.fn, "args", ())) if callable(arg)]
    return {getattr(one, "__name__", ""): one for one in functions}, labelled
