"""One click trains a first LoRA with samples, and leaves the draft as it is: two minutes."""

import json

import pytest
from ui_helpers import alone, serving, squares
from ui_page import RUN_S, caption, captions, drop, field, open_page, saved, state_is


@pytest.mark.timeout(1200)
def test_one_click_trains_a_lora_and_leaves_the_draft_as_it_is(tab, data, tmp_path):
    with serving(data, **alone(tmp_path)) as server:
        open_page(tab, server)
        field(tab, "name").fill("my own")
        drop(tab, *squares(tmp_path / "own", 1), count=1)
        caption(tab, "0000.png").fill("mine")
        saved(tab, "0000.png")
        tab.locator("#try-it").click()
        tab.get_by_test_id("run-name").get_by_text("first-try").wait_for()
        state_is(tab, "completed", seconds=RUN_S)
        folder = data / "outputs" / "first-try"
        assert (folder / "first-try.safetensors").is_file()
        assert len(list((folder / "sample").glob("*.png"))) >= 10
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        assert status["restarts"] == 0 and status["step"] == status["planned_steps"] == 320
        tab.get_by_role("tab", name="New LoRA").click()
        assert captions(tab) == {"0000.png": "mine"} and field(tab, "name").input_value() == "my own"
        tab.locator("#try-it").click()  # and again: another name
        tab.get_by_test_id("run-name").get_by_text("first-try 2").wait_for()
