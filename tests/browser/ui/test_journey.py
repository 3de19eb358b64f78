"""The page in a real browser: from images to a LoRA, errors that are shown and lose nothing, a full disk."""

import re

import pytest
from PIL import Image
from safetensors import safe_open
from ui_helpers import photos, serving, small_disk
from ui_page import (
    caption,
    captions,
    choose_tiny,
    drop,
    field,
    gpu_fold,
    hold,
    open_page,
    saved,
    set_up_run,
    state_is,
    until,
)


@pytest.mark.journey
def test_from_images_and_captions_to_a_lora(tab, data, tmp_path):
    with serving(data) as server:
        folder = set_up_run(tab, server, "first", repeats="1", epochs="1")
        assert (data / "datasets" / "first" / "chelsea.txt").read_text() == "tok, a tabby cat\n"
        state_is(tab, "completed")
        tab.locator("[data-testid=steps][data-step='4']").wait_for()
        with tab.expect_download() as download:
            tab.get_by_test_id("download").click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
    assert path.name == "first.safetensors" and path.read_bytes() == (folder / path.name).read_bytes()
    with safe_open(path, framework="numpy") as lora:
        assert any("lora" in key for key in lora.keys())  # noqa: SIM118


def test_the_form_waits_for_the_draft_and_each_error_is_shown_beside_what_is_wrong(tab, server, tmp_path):
    calls = re.compile("/(queue/join|component_server)")
    pointer_events = "getComputedStyle(document.querySelector('.hp-step')).pointerEvents"
    with hold(tab, to=calls) as asks:
        tab.goto(server.url)
        tab.locator("#start").wait_for()
        asks()
        assert tab.evaluate(pointer_events) == "none"
    tab.locator("body.hp-open").wait_for()
    assert tab.evaluate(pointer_events) == "auto"

    # What is chosen before an answer stays.
    gpu_fold(tab)
    tab.locator("#plan .hp-plan").wait_for()  # it moves what is below it
    with hold(tab, to=calls) as asks:
        choose_tiny(tab)
        asks()
        tab.get_by_label("kohya's sd-scripts").click()
    until(lambda: tab.wait_for_timeout(50) or field(tab, "resolution").input_value() == "64", "the model's resolution")
    tab.wait_for_timeout(300)
    assert tab.get_by_label("kohya's sd-scripts").is_checked()

    # Errors.
    field(tab, "trigger").fill("tok")
    tab.locator("#start").click()
    problem = tab.locator("#problem")
    problem.get_by_text("Name: Give your LoRA a name").wait_for()
    assert "Images: Add at least one image" in problem.inner_text()
    tab.locator("#name .hp-field-error").get_by_text("Give your LoRA a name").wait_for()
    (tmp_path / "fake.png").write_text("I am text")
    Image.new("1", (30_000, 1_000)).save(tmp_path / "huge.png")
    drop(tab, tmp_path / "fake.png", tmp_path / "huge.png", *photos("coffee.png"), count=1)
    problem.locator(".hp-bad").wait_for(state="hidden")  # the images have changed
    notes = tab.locator(".hp-notes")
    for text in ("fake.png: not a", "huge.png: .*too large"):
        notes.get_by_text(re.compile(text, re.IGNORECASE)).wait_for()
    field(tab, "name").fill("no start")

    # A caption that cannot be saved.
    tab.get_by_label("Built-in").click()
    caption(tab, "coffee.png").fill("x" * 20_001)
    tab.locator(".hp-card .hp-saved").get_by_text("not saved").wait_for()
    banner = tab.get_by_test_id("unsaved-banner")
    banner.get_by_text("shorten it to 20000").wait_for()
    tab.locator("#start").click()
    problem.get_by_text("Captions or masks not saved: 1").wait_for()
    caption(tab, "coffee.png").fill("a cup")
    saved(tab, "coffee.png")
    banner.wait_for(state="hidden")
    assert field(tab, "trigger").input_value() == "tok" and captions(tab) == {"coffee.png": "a cup"}
    assert not (server.data / "outputs" / "no-start").exists()


def test_a_full_disk_during_an_upload_is_reported_and_loses_nothing(tab, tmp_path):
    with small_disk(tmp_path, "3m") as disk, serving(disk) as server:
        open_page(tab, server)
        drop(tab, *photos("coins.png"), count=1)
        caption(tab, "coins.png").fill("old coins")
        saved(tab, "coins.png")
        many = photos("astronaut.png", "motorcycle_left.png", "motorcycle_right.png", "hubble_deep_field.jpg")
        tab.get_by_test_id("image-picker").set_input_files([str(p) for p in many])
        tab.locator(".hp-notes").get_by_text("disk is full").wait_for()
        assert captions(tab)["coins.png"] == "old coins"
        assert "Drop images or folders here" in tab.locator(".hp-drop").inner_text()
