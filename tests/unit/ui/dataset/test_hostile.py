"""Hostile and random folders, names and captions: a clear answer, nothing outside the two data folders, no caption on
another picture. (ZIPs: test_imports.py; damaged images: test_draft_images.py.)

The campaign: HANGPROOF_EXAMPLES=50 .venv/bin/python -m pytest -q tests/unit/ui/dataset/test_hostile.py
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import struct
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import tomllib
from hypothesis import given, settings, strategies as st
from PIL import Image
from seeds import examples

import runs
from runs import archives, dataset, pictures
from ui.dataset import draft, draft_images, images
from ui.new import new_lora

MARKUP = ["<img src=x onerror=alert(1)>", "</textarea><script>alert(1)</script>", "javascript:alert(1)"]
MARKUP.append("\"'`${7*7}{{7*7}}")
NASTY = ["..", ".", "CON", "nul", "a:b", "~", "$(id)", "-rf", "\u202egnp", "日本", "🦊", "�", "%2e%2e"]
NASTY += ["a\0b", "x" * 300]
OUTSIDE = Path(tempfile.gettempdir(), "hangproof-hostile")
# Names that collide come up most often: a caption can only be mistaken where two pictures could have it.
STEMS = st.sampled_from(["1"] * 60 + ["2"] * 30 + ["a.b", "A", *MARKUP, *NASTY]) | st.sampled_from(["1", "2"])
STEMS |= st.sampled_from(["1", "2"]) | st.text(max_size=12)
FOLDERS = st.sampled_from(["", "a", "b", "10_cat", "a/10_cat", "b"]) | st.sampled_from(["", "a", "b"])
FOLDERS |= st.sampled_from(["3_dog", "0_x", "../a", "../../../../out", f"{OUTSIDE}", "C:\\x", *MARKUP, *NASTY])
FOLDERS |= st.sampled_from(["a", "b"]) | st.lists(st.text(max_size=6), max_size=3).map("/".join)


@contextlib.contextmanager
def sandbox():
    """A data root, deep in a folder of its own. Fails when a file is outside its outputs/, datasets/ and .secrets/."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True) as top:
        root = Path(top).resolve() / "1/2/3/4"
        (root / "data").mkdir(parents=True)
        with mock.patch.dict(os.environ, {"HANGPROOF_DATA": str(root / "data")}):
            yield root
        allowed = [root / "data" / name for name in ("datasets", "outputs", ".secrets")]
        files = (path for path in Path(top).resolve().rglob("*") if not path.is_dir())
        assert not OUTSIDE.exists() and not [path for path in files if not {*allowed} & {*path.parents}]


@functools.cache
def picture(number: int, kind: str = "PNG") -> bytes:
    """A small image, unlike that of any other number."""
    pictures.add_heif()
    buffer = io.BytesIO()
    Image.frombytes("RGB", (4, 4), random.Random(number).randbytes(48)).resize((24, 16)).save(buffer, kind)
    return buffer.getvalue()


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sent(value: object) -> None:
    """Fails when a value cannot be sent to a browser."""
    json.dumps(value, ensure_ascii=False).encode("utf-8")


def clear(messages: list[str]) -> None:
    """Each message is one line of text, and in the page's HTML it stays text."""
    for message in messages:
        assert isinstance(message, str) and len(message.strip()) > 10 and len(message) < 3000, message
        html = new_lora.problem_html(message)
        assert not any(f"<{tag}" in html for tag in ("img", "script", "/textarea")), html
    sent(messages)


def upload(content: bytes, number: int) -> Path:
    path = draft.uploads_dir() / sha(content) / f"{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


class Expected:
    """What was dropped, and so which captions each picture may have."""

    def __init__(self) -> None:
        self.pictures: dict[tuple[str, str], set[tuple[str, str]]] = {}  # (folder, sha256) -> {(drop, stem)}
        self.tried: set[tuple[str, str, str]] = set()  # (drop, folder, stem) of every picture, good or bad
        self.captions: dict[str, tuple[str, str, str]] = {}  # text -> (drop, folder, stem)

    def name(self, given: str) -> tuple[str, str] | None:
        with contextlib.suppress(runs.RunError):
            folder, _, last = archives.relative_name(draft.plain_text(given)).rpartition("/")
            return folder, Path(last).stem
        return None

    def file(self, drop: str, given: str, content: bytes, good: bool) -> None:
        if named := self.name(given):
            folder, stem = named
            self.tried.add((drop, folder, stem))
            if good:
                self.pictures.setdefault((folder, sha(content)), set()).add((drop, stem))

    def caption(self, drop: str, given: str) -> bytes:
        text = f"caption {len(self.captions)}"
        if named := self.name(given):
            self.captions[text] = (drop, *named)
        return text.encode()

    def check(self, draft_id: str) -> None:
        for item in draft.items(draft_id):
            own = self.pictures[item.folder, item.sha256]
            if item.caption:
                drop, folder, stem = self.captions[item.caption]
                late = (drop, folder, stem) not in self.tried and stem in {name for _, name in own}
                # the picture of this caption was refused: a later drop brings it again
                late |= all(first > drop for first, _ in own) and stem in {name for _, name in own}
                assert folder == item.folder and ((drop, stem) in own or late), (item, self.captions[item.caption])


DROPPED = st.sampled_from(["image"] * 4 + ["caption"] * 5 + ["bad", "bad", "junk"])
FILES = st.lists(st.tuples(FOLDERS, STEMS, DROPPED, st.integers(0, 9)), min_size=1, max_size=10)


@settings(max_examples=examples(30))
@given(drops=st.lists(st.tuples(FILES, st.integers(0, 8)), min_size=1, max_size=3), create=st.booleans())
def test_dropped_folders(drops, create):
    with sandbox() as root:
        expected, mine = Expected(), draft.new_id()
        for number, (files, cut) in enumerate(drops):
            drop, uploads = f"drop{number}", []
            for at, (folder, stem, kind, content) in enumerate(files):
                suffix = {"caption": ".txt", "junk": ".exe"}.get(kind, ".png")
                given_name = f"{folder}/{stem}{suffix}" if folder else f"{stem}{suffix}"
                body = expected.caption(drop, given_name) if kind == "caption" else picture(content)
                body = b"junk" if kind in ("bad", "junk") else body
                if suffix == ".png":
                    expected.file(drop, given_name, body, kind == "image")
                uploads.append((upload(body, at), given_name))
            for part, more in ((uploads[:cut], True), (uploads[cut:], False)):
                added, messages = draft.add(mine, part, drop, more)
                assert 0 <= added <= len(part)
                clear(messages)
            expected.check(mine)
            assert all(path.exists() for path, _ in uploads)
        sent(images.listing(mine))
        if create and draft.items(mine):
            check_run(root, mine)


def check_run(root: Path, draft_id: str) -> None:
    """Create a run and find each picture in its data set with its caption, in exactly one subset with its repeats."""
    spec = runs.make({"name": "run", "model": "tiny-flux", "backend": "diffusers", "repeats": 7})
    folder = runs.create(spec, draft.sources(draft_id))
    place = root / "data/datasets/run"
    left = []
    for item in draft.items(draft_id):
        repeats, subject = dataset.repeats_of(item.folder) or (7, "")
        left.append((item.sha256, item.caption or subject, repeats))
    table = tomllib.loads((folder / "dataset.toml").read_text(encoding="utf-8"))
    for subset in table["datasets"][0]["subsets"]:
        for path in Path(subset["image_dir"]).glob("*.png"):
            caption = dataset.read_caption(path.with_suffix(".txt"))
            left.remove((sha(path.read_bytes()), caption, subset["num_repeats"]))
    assert left == [] and len(runs.images_in(place)) == len(draft.items(draft_id))
    assert all(part.isascii() for path in runs.images_in(place) for part in path.relative_to(place).parts)
    copy = draft.new_id()
    assert draft.copy_dataset(copy, "run") == [] and len(draft.items(copy)) == len(draft.items(draft_id))


PACKED = st.sampled_from(["image"] * 4 + ["caption"] * 4 + ["bad", "link", "nested", "bomb", "folder"])


ENTRY = st.tuples(FOLDERS, STEMS, PACKED, st.integers(0, 9), st.sampled_from(archives.METHODS))


BODIES = {"bad": b"junk", "link": b"/etc/passwd", "nested": b"PK", "bomb": bytes(1_100_000), "folder": b""}


@settings(max_examples=examples(20))
@given(
    entries=st.lists(ENTRY, max_size=7),
    damage=st.none() | st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.none() | st.integers(0, 2000),
    where=FOLDERS,
)
def test_zips(entries, damage, cut, where):
    with sandbox():
        expected, mine, buffer, written = Expected(), draft.new_id(), io.BytesIO(), set()
        name = f"{where}/x.zip" if where else "x.zip"
        prefix = expected.name(name)[0] if expected.name(name) else ""
        with zipfile.ZipFile(buffer, "w") as archive:
            for folder, stem, kind, content, method in entries:
                suffix = {"caption": ".txt", "nested": ".zip", "folder": "/"}.get(kind, ".png")
                inside = f"{folder}/{stem}{suffix}" if folder else f"{stem}{suffix}"
                inside = draft.plain_text(inside)
                try:
                    info = zipfile.ZipInfo(inside)
                    if inside in written or info.filename != inside:
                        continue
                    given_name = f"{prefix}/{inside}" if prefix else inside
                    body = BODIES.get(kind, picture(content))
                    text = expected.caption("zip", given_name) if kind == "caption" else body
                    info.create_system, info.compress_type = 3, method
                    info.external_attr = 0o120777 << 16 if kind == "link" else 0o100644 << 16
                    archive.writestr(info, text)
                except (ValueError, struct.error):  # a name that a ZIP cannot hold
                    continue
                written.add(inside)
                if suffix == ".png":
                    with contextlib.suppress(runs.RunError):
                        archives.relative_name(inside)
                        expected.file("zip", given_name, text, kind == "image")
        content = bytearray(buffer.getvalue())
        for at, value in damage or ():
            content[at % len(content)] ^= value
        content = bytes(content[: cut if cut is not None else len(content)])
        added, messages = draft.add(mine, [(upload(content, 0), name)])
        clear(messages)
        assert added == len(draft.items(mine)) and not list(draft.uploads_dir().glob("zip-*"))
        if damage is None and cut is None:
            expected.check(mine)
        for item in draft.items(mine):
            assert draft.original(mine, item.id).resolve().is_relative_to(draft.folder(mine).resolve())


FORMATS = {kind: kind.lower() for kind in ("PNG", "WEBP", "GIF", "BMP", "AVIF")}


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(20))
@given(
    kind=st.sampled_from(sorted(FORMATS)),
    suffix=st.sampled_from([*FORMATS.values(), "ico", "svg", "jxl", "PNG"]) | st.just(""),
    flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=8),
    cut=st.none() | st.integers(0, 1500),
)
def test_damaged_images(kind, suffix, flips, cut):
    with sandbox():
        mine, content = draft.new_id(), bytearray(picture(3, kind))
        for at, value in flips:
            content[at % len(content)] = value
        content = bytes(content[: cut if cut is not None else len(content)])
        added, messages = draft.add(mine, [(upload(content, 0), f"x.{suffix or FORMATS[kind]}")])
        clear(messages)
        assert added + len(messages) == 1
        for item in draft.items(mine):
            with Image.open(draft.thumb(mine, item)) as thumb, Image.open(draft.large(mine, item.id)) as large:
                assert max(thumb.size) <= draft_images.THUMB_SIDE and max(large.size) <= draft_images.LARGE_SIDE
            spec = runs.make({"name": "run", "trigger": "t", "model": "tiny-flux"})
            notes: list[str] = []
            runs.create(spec, draft.sources(mine), on_note=notes.append)
            sent(notes)
            assert len(runs.images_in(runs.datasets_dir() / "run")) == 1
        if not flips and cut is None and (suffix or FORMATS[kind]) in FORMATS.values():
            assert added == 1
