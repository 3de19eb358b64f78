"""Take the README's pictures again: `python docs/screenshot.py`. Nothing in them is drawn: a real run, really stuck once.

Photographs that come with scikit-image, the tiny model, a step that never ends put in by the fault injector; the picture
of the run is taken after it has been brought back. Needs requirements-dev.txt and a browser; about two minutes.
"""

import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

from ui_helpers import browsing, end_runs, photos, serving  # noqa: E402

FAULT = {
    "HANGPROOF_INJECT": "benchmarks.injector:fire",
    "HANGPROOF_PACE_S": "0.15",
    "HANGPROOF_FAULT": "step_sleeps",
    "HANGPROOF_FAULT_STEP": "70",
}
CAPTIONS = {
    "astronaut.png": "an astronaut in an orange suit, smiling, a flag behind her",
    "chelsea.png": "a ginger tabby cat, close up, looking past the camera",
    "coffee.png": "a cup of espresso on a red saucer, seen from above",
    "rocket.jpg": "a rocket on its launch pad at dusk, floodlights on",
}
LIMIT_S = 180
WIDTH = 1240  # pixels


def main() -> int:
    """Write docs/steps.png and docs/page.png."""
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        try:
            take(data)
        finally:
            end_runs(data)
    print(f"{HERE / 'steps.png'}\n{HERE / 'page.png'}")
    return 0


def take(data: Path) -> None:
    """Set a run up, let it get stuck, and wait until it goes again."""
    with serving(data, **FAULT) as server, browsing() as browser:
        page = browser.new_context(viewport={"width": WIDTH, "height": 860}, device_scale_factor=1.25).new_page()
        page.goto(server.url)
        page.locator("body.hp-open").wait_for()
        three_steps(page)
        shoot(page, "steps.png")
        page.locator("#start").click()
        wait_for_step(page, 110)
        shoot(page, "page.png", above="#run-log")
        page.locator("#stop").click()
        page.locator("[data-testid=state][data-state=stopped]").wait_for(timeout=LIMIT_S * 1000)


def shoot(page, name: str, above: str = "") -> None:
    """Take the page, down to the element `above` when given; 256 colours, a quarter of the bytes."""
    from PIL import Image

    height = (
        page.locator(above).bounding_box()["y"] - 8 if above else page.evaluate("document.documentElement.scrollHeight")
    )
    page.screenshot(path=HERE / name, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
    with Image.open(HERE / name) as taken:
        small = taken.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(HERE / name, optimize=True)


def three_steps(page) -> None:
    """Fill the form in as a person would."""
    page.locator("#name input, #name textarea").first.fill("Everyday things")
    page.locator("#trigger input, #trigger textarea").first.fill("evrdy")
    page.locator("#model input").first.click()
    page.get_by_role("option", name="Tiny Flux").click()
    page.get_by_test_id("image-picker").set_input_files([str(path) for path in photos(*CAPTIONS)])
    for file, words in CAPTIONS.items():
        page.locator(f".hp-card[data-file='{file}'] textarea").fill(words)
    page.get_by_role("button", name="Put the trigger word first").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.hp-card textarea')].every(t => t.value.startsWith('evrdy'))"
    )
    page.locator("#repeats input").first.fill("5")
    page.locator("#epochs input").first.fill("8")
    page.get_by_text("160 steps").wait_for()
    page.mouse.move(5, 5)
    page.wait_for_timeout(500)


def wait_for_step(page, step: int) -> None:
    """Wait until the page shows so many steps. Raises TimeoutError."""
    end = time.monotonic() + LIMIT_S
    steps = page.get_by_test_id("steps")
    while not steps.count() or int(steps.get_attribute("data-step") or 0) < step:
        if time.monotonic() > end:
            raise TimeoutError(f"step {step} not within {LIMIT_S} s: {page.locator('body').inner_text()[-900:]}")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
