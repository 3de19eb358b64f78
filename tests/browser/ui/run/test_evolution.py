"""The part Evolution in a real browser: samples, validation and checkpoints in every view; two browsers vote while the server is killed."""

import contextlib
import json
import shutil
import urllib.parse
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError
from ui_helpers import Server, lora_file, photos, write_run
from ui_page import a_tab, serious, until

from ui.run import blind_vote

STEPS = (8, 16, 24)
VIEWS = ("steps", "compare", "vote", "grid")


@pytest.fixture
def folder(data) -> Path:
    """A run whose trainer was killed once: 24 steps in two attempts, with two prompts and held-out images."""
    made = write_run(data, "my cat", state="completed", step=24, planned_steps=24)
    (made / "sample").mkdir()
    (made / "sample_prompts.txt").write_text("a cat\na <b>dog\n")
    for step in STEPS:
        for prompt, picture in enumerate(("coffee.png", "rocket.jpg")):
            shutil.copy(photos(picture)[0], made / "sample" / f"my-cat_{step:06}_{prompt:02}_20260101120000_42.png")
    for step in range(4, 24, 4):
        lora_file(made / f"my-cat-step{step:08}.safetensors", step)
    lora_file(made / "my-cat.safetensors", 24)
    steps = [(1, n) for n in range(1, 14)] + [(2, n) for n in range(13, 25)]
    rows = [{"kind": "step", "attempt": attempt, "step": n, "epoch": 1, "loss": 1 / n} for attempt, n in steps]
    rows += [
        {"kind": "validation", "step": n, "epoch": 1, "val_loss": 0.5 + abs(n - 16) / 100} for n in range(0, 25, 4)
    ]
    (made / "metrics.jsonl").write_text(
        "".join(json.dumps({**row, "t": "2026-11-22T12:00:00.000Z"}) + "\n" for row in rows)
    )
    return made


def start(data: Path, port: int | None = None) -> Server:
    server = Server(data, port=port)
    server.wait_for_output("Hangproof is running at")
    return server


def show(page, server, folder: Path) -> None:
    page.goto(f"{server.url}?run={folder.name}")
    page.locator("body.hp-open").wait_for()
    page.get_by_test_id("sample-row").first.wait_for()


def open_view(page, name: str) -> None:
    page.locator(f"#evolution-tab-{name}").click()
    page.locator(f"#evolution-{name}").wait_for()


def loaded(locator) -> None:
    locator.scroll_into_view_if_needed()  # pictures of the grid are loaded when they are near
    until(lambda: locator.evaluate("(image) => image.complete && image.naturalWidth > 0"), "the picture")


def votes(folder: Path) -> list[dict]:
    text = (folder / "votes.jsonl").read_text() if (folder / "votes.jsonl").exists() else ""
    return [one for one in map(json.loads, text.splitlines()) if one["kind"] == "vote"]


def test_every_view_of_a_run_and_no_vote_is_lost(browser, data, folder):
    server = start(data)
    try:
        with a_tab(browser) as page, a_tab(browser, width=390, color_scheme="dark") as second:
            show(page, server, folder)
            the_grid(page, server, folder)
            step_by_step(page)
            two_checkpoints(page)
            show(second, server, folder)
            server = voting(page, second, server, data, folder)
            for one in (page, second):
                for name in VIEWS:
                    open_view(one, name)
                    assert serious(one, "#run-samples") == [], name
                assert one.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.errors[:] = [
                text for text in page.errors if "Failed to fetch" not in text
            ]  # while the server was away
            second.errors[:] = [text for text in second.errors if "Failed to fetch" not in text]
    finally:
        server.stop()


def the_grid(page, server, folder: Path) -> None:
    """Samples before and after the restart are one series, with losses, downloads and the lowest validation loss."""
    grid = page.locator(".hp-ev-grid")
    assert [one.inner_text() for one in grid.locator("thead strong").all()] == ["Step 8", "Step 16", "Step 24"]
    rows = page.get_by_test_id("sample-row")
    assert [one.inner_text() for one in rows.locator("h4").all()] == ["a cat", "a <b>dog"]
    assert rows.locator(".hp-sample").count() == 6
    loaded(rows.locator("img").first)
    head = grid.locator("thead th").nth(3)
    assert "Validation loss" in head.inner_text() and "Loss" in head.inner_text()
    with page.expect_download() as download:
        grid.locator("thead a").nth(1).click()
    assert download.value.suggested_filename == "my-cat-step00000016.safetensors"
    status, body = server.get("/api/evolution/my-cat")
    found = json.loads(body)
    assert status == 200 and {4, 8, 12, 16, 20, 24} <= {one["step"] for one in found["snapshots"]}
    assert [one["step"] for one in found["validation"]] == [0, 4, 8, 12, 16, 20, 24]
    lowest = min(found["validation"][1:], key=lambda one: one["val_loss"])
    assert found["best"] == lowest and lowest["step"] == 16
    assert f"step {lowest['step']} with a validation loss of" in page.get_by_test_id("evolution-best").inner_text()
    assert server.get("/api/evolution/my-cat/snapshot/9")[0] == 404


def step_by_step(page) -> None:
    """The slider by keyboard, and play."""
    open_view(page, "steps")
    caption, slider = page.locator(".hp-steps-caption"), page.get_by_test_id("steps-range")
    assert caption.inner_text().startswith("Step 24")
    slider.focus()
    page.keyboard.press("Home")
    assert caption.inner_text().startswith("Step 8") and slider.get_attribute("aria-valuetext") == "step 8"
    page.keyboard.press("ArrowRight")
    assert caption.inner_text().startswith("Step 16")
    loaded(page.locator(".hp-ev-large"))
    page.get_by_test_id("steps-prompt").select_option(label="a <b>dog")
    assert caption.inner_text().startswith("Step 24")
    page.get_by_role("button", name="Play").click()
    until(lambda: caption.inner_text().startswith("Step 8"), "the first step")
    until(lambda: caption.inner_text().startswith("Step 24"), "the last step")
    page.get_by_role("button", name="Play").wait_for()


def two_checkpoints(page) -> None:
    """Two steps over each other, with a divider that the keyboard moves, and beside each other."""
    open_view(page, "compare")
    stage = page.get_by_test_id("compare-stage")
    page.get_by_test_id("compare-a").select_option(label="Step 8")
    page.get_by_test_id("compare-b").select_option(label="Step 16")
    for name in (".hp-ab-a", ".hp-ab-b"):
        loaded(stage.locator(name))
    assert "A · step 8" in page.locator(".hp-compare-text").inner_text()
    divider = stage.get_by_role("slider")
    divider.focus()
    page.keyboard.press("End")
    assert stage.evaluate("(e) => e.style.getPropertyValue('--hp-at')") == "100%"
    page.get_by_test_id("compare-layout").select_option(label="beside each other")
    assert stage.locator(".hp-ab-a").bounding_box()["x"] < stage.locator(".hp-ab-b").bounding_box()["x"]


def voting(page, second, server, data: Path, folder: Path) -> Server:
    """Two browsers vote, the server is killed in the middle, and nothing is lost."""
    for one in (page, second):
        open_view(one, "vote")
        loaded(one.get_by_test_id("vote-left").locator("img"))
        text = one.locator("#evolution-vote").inner_html()
        assert not any(f"00000{step}" in urllib.parse.unquote(text) for step in ("8", "16", "24"))
    cast(page, folder, "left")
    cast(second, folder, "right")
    page.get_by_test_id("vote-left").focus()
    for key in ("ArrowRight", "ArrowDown"):  # by keyboard: right, equal
        until(lambda: not page.get_by_test_id("vote-left").is_disabled(), "the next pair")
        before = len(votes(folder))
        page.keyboard.press(key)
        until(lambda before=before: len(votes(folder)) > before, "a vote by keyboard")
    until(lambda: not page.get_by_test_id("vote-left").is_disabled(), "the next pair")
    assert [one["choice"] for one in votes(folder)] == ["left", "right", "right", "equal"]
    server.stop(hard=True)
    page.get_by_test_id("vote-left").click()
    page.locator("#evolution-vote").get_by_text("The server does not answer. Try again.").wait_for()
    server = start(data, port=server.port)
    until(lambda: page.get_by_test_id("vote-left").is_visible(), "the vote again, in the view that was open")
    cast(page, folder, "left")
    assert len(votes(folder)) == 5
    verdict = page.get_by_test_id("vote-verdict")
    for _ in range(30):  # a person who likes the later LoRA better
        if verdict.count() and verdict.inner_text().startswith("The vote picks"):
            break
        pair = blind_vote.pair_of(page.locator("[data-testid=vote-left] img[src]").get_attribute("src").split("/")[-2])
        cast(page, folder, "left" if pair.left > pair.right else "right")
        if len(votes(folder)) >= blind_vote.enough(3):
            with contextlib.suppress(TimeoutError):
                verdict.wait_for(timeout=2000)
    text = verdict.inner_text()
    assert text.startswith("The vote picks step ") and "with a chance of" in text
    winner = text.removeprefix("The vote picks step ").split(",")[0].split(":")[0]
    marked = page.get_by_test_id("lora").filter(has_text="picked")
    marked.wait_for()
    assert f"step {winner}" in marked.inner_text().lower() and marked.count() == 1
    other = next(step for step in (8, 16, 24) if str(step) != winner)
    page.get_by_role("button", name=f"Pick the LoRA of step {other}").click()
    page.get_by_test_id("lora").filter(has_text=f"tep {other}").filter(has_text="picked").wait_for()
    page.get_by_test_id("evolution-picked").get_by_text(f"step {other}").wait_for()
    count = len(votes(folder))
    restart = page.locator("#evolution-vote").get_by_role("button", name="Start over")
    restart.click()
    page.get_by_role("button", name=f"Forget {count} votes").click()
    page.locator("#evolution-vote").get_by_text("0 votes on 3 LoRAs").wait_for()
    page.get_by_test_id("evolution-picked").wait_for(state="detached")
    assert len(votes(folder)) == count  # the file keeps them
    return server


def cast(page, folder: Path, side: str) -> None:
    before = len(votes(folder))
    page.locator(f"[data-testid=vote-{side}] img[src]").wait_for()  # after a reload it takes a moment
    until(lambda: not page.get_by_test_id(f"vote-{side}").is_disabled(), "the pair")
    page.get_by_test_id(f"vote-{side}").click()
    until(lambda: len(votes(folder)) > before, "the vote")
    until(lambda: not page.get_by_test_id(f"vote-{side}").is_disabled(), "the next pair")
