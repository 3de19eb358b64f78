"""How quick step 2 stays with 10,000 images, and how fast photos are taken in, beside Pillow alone.

Photos: the files are imported as the page does it, by its process on a folder of the server, and decoded by Pillow alone with as
many threads, in turns on the same files; a rate is files a second. Pillow's turn has the start of a process too. The limit is on
the ratio, because seconds depend on the machine. Then the real page is opened in Chromium with a draft of 10,000 images: page
to page, a bulk replacement, a caption, undo and redo, each from the click to what the user sees. Exit code 1 where a limit is
exceeded or the page shows the wrong thing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import CannotMeasure, Report
from benchmarks.ui import ROOT, free_port
from benchmarks.ui_runs import FLAGS, browser_path
from ui.token import load

LIMITS = {
    "ingest_ratio": (
        0.9,
        "least",
        "photos are imported at {value:g} x the rate of Pillow alone, the limit is {limit:g} x",
    ),
    "page_ms": (300.0, "most", "page to page takes {value:g} ms, the limit is {limit:g} ms"),
    "replace_ms": (1000.0, "most", "a bulk replacement takes {value:g} ms, the limit is {limit:g} ms"),
    "caption_ms": (300.0, "most", "storing a caption takes {value:g} ms, the limit is {limit:g} ms"),
    "undo_ms": (1000.0, "most", "undo of the replacement takes {value:g} ms, the limit is {limit:g} ms"),
    "open_ms": (3000.0, "most", "the server lists the draft after {value:g} ms, the limit is {limit:g} ms"),
    "rss_mb": (600.0, "most", "the server uses {value:g} MB, the limit is {limit:g} MB"),
}
WAIT_MS = 120_000
MEGAPIXELS = (4000, 3000)
VARIANTS = 20  # photos that differ; the others differ from one of them in their last bytes only
PILLOW = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from PIL import Image
def decode(path):
    with Image.open(path) as image:
        image.load()
with ThreadPoolExecutor(int(sys.argv[2])) as pool:
    list(pool.map(decode, sorted(Path(sys.argv[1]).iterdir())))
"""


def photos(folder: Path, number: int) -> None:
    """Write JPEGs of 12 megapixels with a camera's size: detail and noise over the whole image."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    draw = np.random.default_rng(11)
    width, height = MEGAPIXELS
    contents = []
    for n in range(min(VARIANTS, number)):
        coarse = draw.integers(0, 256, (30 + n, 40 + n, 3), dtype=np.uint8)
        image = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        noise = draw.integers(-14, 15, (height, width, 1), dtype=np.int16)
        path = folder / "one.jpg"
        Image.fromarray((image + noise).clip(0, 255).astype(np.uint8)).save(path, quality=88)
        contents.append(path.read_bytes())
        path.unlink()
    for n in range(number):
        (folder / f"{n:05}.jpg").write_bytes(contents[n % len(contents)] + n.to_bytes(4, "big"))


def ingest(place: Path, number: int, rounds: int) -> dict[str, Any]:
    """Rates of the import and of Pillow, in files a second, and their ratio: the median of the rounds."""
    from ui.dataset import draft, draft_images

    source = place / "photos"
    photos(source, number)
    size_mb = sum(path.stat().st_size for path in source.iterdir()) / 1e6 / number
    rows = []
    for n in range(rounds):
        row: dict[str, float] = {}
        turns = {
            "import_per_s": lambda: _import(draft.new_id(), source, number),
            "pillow_per_s": lambda: _pillow(source),
        }
        for name in list(turns)[:: 1 if n % 2 else -1]:
            seconds = turns[name]()
            row[name] = round(number / seconds, 2)
        row["ratio"] = round(row["import_per_s"] / row["pillow_per_s"], 3)
        rows.append(row)
        print(
            f"import {row['import_per_s']:.1f} photos/s, Pillow {row['pillow_per_s']:.1f}, {row['ratio']:.2f} x",
            flush=True,
        )
    ratio = statistics.median(row["ratio"] for row in rows)
    threads = draft_images.workers()
    return {"photos": number, "photo_mb": round(size_mb, 2), "threads": threads, "rounds": rows, "ingest_ratio": ratio}


def _pillow(source: Path) -> float:
    from ui.dataset import draft_images

    began = time.monotonic()
    subprocess.run([sys.executable, "-c", PILLOW, str(source), str(draft_images.workers())], check=True)
    return time.monotonic() - began


def _import(draft_id: str, source: Path, number: int) -> float:
    """Seconds of an import on an empty draft, from the call to its result. Raises ValueError: images are missing."""
    from ui.dataset import draft, imports

    began, seen = time.monotonic(), set()
    imports.start_folder(draft_id, str(source))
    while (status := imports.status(draft_id))["waiting"]:
        seen.add(status["now"]["done"])
        time.sleep(0.2)
    seconds = time.monotonic() - began
    (result,) = status["finished"]
    if result["added"] != number or len(draft.items(draft_id)) != number or result["messages"]:
        raise ValueError(f"the import added {result['added']} of {number} photos: {result['messages'][:3]}")
    if number >= 200 and len(seen) < 3:
        raise ValueError(f"the import showed no progress but {sorted(seen)}")
    return seconds


# The page ------------------------------------------------------------------------------------------------------------


def large_draft(draft_id: str, number: int) -> None:
    """A draft of many images with captions of 20 tags in three subsets; its thumbnails are real files."""
    from PIL import Image

    from ui.dataset import draft_store

    draw = random.Random(3)
    thumbs = draft_store.folder(draft_id) / "thumbs"
    thumbs.mkdir(parents=True)
    for n in range(40):
        small = Image.frombytes("RGB", (8, 8), draw.randbytes(192)).resize((480, 360), Image.Resampling.BICUBIC)
        small.save(thumbs / f"base{n}.jpg", quality=82)
    tags = [f"tag{n}" for n in range(1500)]
    with draft_store.change(draft_id) as edit:
        for n in range(number):
            key = hashlib.sha256(f"{n}".encode()).hexdigest()[:24]
            os.link(thumbs / f"base{n % 40}.jpg", thumbs / f"{key}-0.jpg")
            measures = {"width": 4000, "height": 3000, "bytes": 4_000_000, "upright": 0, "turn": 0}
            hashed = f"{draw.getrandbits(64):016x}{draw.randbytes(12).hex()}"
            file = {"file": f"{n:05}.jpg", "stored": f"{key}.jpg", "folder": ("", "10_cat", "dog")[n % 3]}
            caption = ", ".join(["old word", *draw.sample(tags, 20)])
            edit.state["images"][key] = {
                **{**measures, **file, "hash": hashed, "sha256": f"{n:064x}", "names": [["x", f"{n:05}"]]},
                **{"caption": caption, "crop": None, "mask": None, "weight": 1, "caption_by": "file"},
            }


@contextlib.contextmanager
def served(data: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The page's server on a data folder: its address and its process."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "app.py", "--port", str(port), "--no-browser"],
        cwd=ROOT,
        env={**os.environ, "HANGPROOF_DATA": str(data), "GRADIO_ANALYTICS_ENABLED": "False"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}/?token={load()}", psutil.Process(process.pid)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def in_browser(data: Path, draft_id: str, number: int, rounds: int) -> dict[str, float]:
    """Milliseconds of what a user does with the draft, each the median of the rounds, and the server's memory."""
    from playwright.sync_api import sync_playwright

    with served(data) as (url, process), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(WAIT_MS)
        page.add_init_script(f"localStorage['hangproof-draft-id'] ||= '{draft_id}'")
        _open(page, url)
        page.get_by_test_id("image-count").get_by_text(f"{number:,} images").wait_for()
        found = _measure(page, number, rounds)
        found["rss_mb"] = round(process.memory_info().rss / 2**20, 1)
        browser.close()
    return found


def _open(page: Any, url: str) -> None:
    for _ in range(200):
        try:
            page.goto(url)
            break
        except Exception as error:
            if "ERR_CONNECTION_REFUSED" not in str(error):
                raise
            time.sleep(0.2)


# Runs in the page: clicks, and gives the milliseconds until the condition holds, looked at before every frame.
CLICK = """([click, condition]) => new Promise((done, failed) => {
  const holds = new Function("return " + condition), began = performance.now();
  const look = () => holds() ? done(performance.now() - began)
    : performance.now() - began > LIMIT ? failed(new Error(condition)) : requestAnimationFrame(look);
  new Function(click)();
  look();
})""".replace("LIMIT", str(WAIT_MS - 1000))
BUTTON = (
    "[...document.querySelectorAll('#images button')].find((one) => one.offsetParent && one.textContent.startsWith({}))"
)


def _measure(page: Any, number: int, rounds: int) -> dict[str, float]:
    def click(text: str, condition: str) -> float:
        return float(page.evaluate(CLICK, [f"{BUTTON.format(json.dumps(text))}.click()", condition]))

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 1)

    first = "document.querySelector('.hp-card textarea').value"
    pages = []
    for n in range(1, 3 * rounds + 1):
        card = f"document.querySelector('.hp-card').dataset.file === {json.dumps(f'{12 * n:05}.jpg')}"
        pages.append(click("Next", card))
    page.locator("#bulk-fold button.label-wrap").first.click()
    replaces, undos, redos = [], [], []
    old, new = "old word", "new word"
    for _ in range(rounds):
        page.get_by_label("Find in captions").fill(old)
        page.get_by_label("Replace with").fill(new)
        page.locator("#bulk-apply").get_by_text(f"Change {number:,} captions").wait_for()
        apply = "document.getElementById('bulk-apply').click()"
        replaces.append(float(page.evaluate(CLICK, [apply, f"{first}.startsWith({json.dumps(new)})"])))
        undos.append(click("Undo", f"{first}.startsWith({json.dumps(old)})"))
        redos.append(click("Redo", f"{first}.startsWith({json.dumps(new)})"))
        old, new = new, old
    captions = []
    for n in range(rounds):
        page.locator(".hp-card textarea").first.fill(f"{old}, typed {n}")
        typed = (
            "document.querySelector('.hp-card textarea').focus(); document.querySelector('.hp-card textarea').blur()"
        )
        saved = "document.querySelector('.hp-saved').textContent === 'saved'"
        captions.append(float(page.evaluate(CLICK, [typed, saved])))
    return {
        "page_ms": median(pages),
        "page_max_ms": round(max(pages), 1),
        "replace_ms": median(replaces),
        "undo_ms": median(undos),
        "redo_ms": median(redos),
        "caption_ms": median(captions),
    }


def opening(data: Path, draft_id: str) -> float:
    """Milliseconds until a new process has read the draft and made its first page of cards."""
    code = (
        "import time; from ui.dataset import images; began = time.perf_counter(); "
        f"found = images.listing({draft_id!r}); print((time.perf_counter() - began) * 1000, found['total'])"
    )
    env = {**os.environ, "HANGPROOF_DATA": str(data)}
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    return round(float(output.stdout.split()[0]), 1)


def options(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--photos", type=int, default=1000, help="photos of 12 megapixels to import (1000)")
    parser.add_argument("--images", type=int, default=10_000, help="images of the large draft (10000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (3)")


def measure(args: argparse.Namespace) -> Report:
    """The import of photos, then the page with a large draft."""
    found: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ["HANGPROOF_DATA"] = f"{folder}/data"
            if args.photos:
                found |= ingest(Path(folder), args.photos, args.rounds)
            if args.images:
                draft_id = "d" * 24
                large_draft(draft_id, args.images)
                found["open_ms"] = opening(Path(folder) / "data", draft_id)
                found |= in_browser(Path(folder) / "data", draft_id, args.images, args.rounds)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise CannotMeasure(str(error)) from error
    exceeded = []
    for key, (limit, kind, text) in LIMITS.items():
        if key in found and (found[key] < limit if kind == "least" else found[key] > limit):
            exceeded.append(text.format(value=found[key], limit=limit))
    return Report({**found, "limits": {key: limit for key, (limit, _, _) in LIMITS.items()}}, exceeded)
