"""Takes the README's screenshots: `python docs/screenshot.py`. They show a real run with one injected hang.

The run trains the tiny model on photographs from scikit-image. The fault injector makes one step hang, and the screenshot of
the run is taken when it has recovered and ended. Needs requirements-dev.txt and a browser; takes about two minutes.
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "support")]

from ui_helpers import browsing, kill_runs, photos, serving  # noqa: E402

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
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data"
        try:
            capture(data)
        finally:
            kill_runs(data)
    print(f"{HERE / 'steps.png'}\n{HERE / 'page.png'}")
    return 0


def capture(data: Path) -> None:
    """Start a run, wait until it has recovered from its hang and ended, and take both screenshots."""
    with serving(data, **FAULT) as server, browsing() as browser:
        page = browser.new_context(viewport={"width": WIDTH, "height": 860}, device_scale_factor=1.25).new_page()
        page.goto(server.url)
        page.locator("body.hp-open").wait_for()
        fill_in_form(page)
        screenshot(page, "steps.png", below="#start-bar")
        page.locator("#start").click()
        page.locator("[data-testid=state][data-state=completed]").wait_for(timeout=LIMIT_S * 1000)
        screenshot(page, "page.png", below="#run-charts")


def screenshot(page, name: str, below: str) -> None:
    """Save a screenshot of the page, cut below the element `below`; 256 colours take a quarter of the bytes."""
    from PIL import Image

    page.set_viewport_size({"width": WIDTH, "height": 4000})  # charts and samples are drawn only in view
    page.wait_for_timeout(3000)
    last = page.locator(below).bounding_box()
    height = last["y"] + last["height"] + 16
    page.screenshot(path=HERE / name, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
    with Image.open(HERE / name) as image:
        small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(HERE / name, optimize=True)


def fill_in_form(page) -> None:
    """Fill in the three steps."""
    page.locator("#name input, #name textarea").first.fill("Everyday things")
    page.locator("#trigger input, #trigger textarea").first.fill("evrdy")
    page.locator("#model input").first.click()
    page.get_by_role("option", name="Tiny Flux").click()
    page.get_by_test_id("image-picker").set_input_files([str(path) for path in photos(*CAPTIONS)])
    for file, text in CAPTIONS.items():
        page.locator(f".hp-card[data-file='{file}'] textarea").fill(text)
    page.get_by_role("button", name="Add trigger word to all captions").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.hp-card textarea')].every(t => t.value.startsWith('evrdy'))"
    )
    page.locator("#repeats input").first.fill("5")
    page.locator("#epochs input").first.fill("8")
    page.get_by_text("160 steps").wait_for()
    page.mouse.move(5, 5)
    page.wait_for_timeout(500)


if __name__ == "__main__":
    sys.exit(main())
