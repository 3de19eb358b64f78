"""From an import to a finished run of the edited script, in two windows; the server is killed. Two minutes."""

import json
import re
from pathlib import Path

import pytest
from draft_helpers import photo
from ui_helpers import Server
from ui_page import a_tab, field, more_settings, open_page, shows, state_is, until

import runs

HANGPROOF = """accelerate launch -m trainer --pretrained_model_name_or_path tiny-flux --network_dim 6 --network_alpha 3 \\
  --learning_rate 1e-3 --max_train_steps 4 --save_every_n_steps 2 --mixed_precision no --blocks_to_swap 4"""


@pytest.mark.timeout(1200)
def test_from_an_import_to_a_finished_run_of_the_edited_script(browser, data, tmp_path):
    photos = tmp_path / "photos"
    for number in range(3):
        photo(photos / f"{number}.png", number)
    server = Server(data)
    try:
        server.wait_for_output("Hangproof is running at")
        with a_tab(browser) as page:
            open_page(page, server)
            more_settings(page)
            field(page, "trigger").fill("ohwx")
            page.locator("#setup button.label-wrap").first.click()
            files = page.locator("#import-files input[type=file]")
            (tmp_path / "train.sh").write_text(HANGPROOF)
            subset = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = {json.dumps(str(photos))}\nnum_repeats = 1\n"
            (tmp_path / "dataset.toml").write_text(subset)
            files.set_input_files([str(tmp_path / "train.sh"), str(tmp_path / "dataset.toml")])
            page.locator("#import-files").get_by_text("dataset").first.wait_for()
            page.locator("#import-read").click()
            page.locator("#setup-preview").get_by_text("Left out: can hang").first.wait_for()
            assert field(page, "rank").input_value() == "16", "nothing changes before it is used"
            page.locator("#import-images").click()
            shows(page, 3)
            page.locator("#use-settings").click()
            until(lambda: field(page, "rank").input_value() == "6", "the imported rank")
            until(lambda: field(page, "max_train_steps").input_value() == "4", "the imported length")

            field(page, "name").fill("walk")
            page.locator("#script-fold button.label-wrap").first.click()
            page.locator("#edit-script").click()
            page.locator("#script .cm-content[contenteditable=true]").wait_for()
            insert_line(page, MARK)
            server.stop(hard=True)  # before the page has sent it
            server = Server(data, port=server.port)
            server.wait_for_output("Hangproof is running at")
            until(lambda: MARK in script_of(data), "the line that was typed while the server was away")
            page.reload()
            page.locator("body.hp-open").wait_for()
            page.get_by_role("button", name=re.compile("^The script")).click()
            until(lambda: MARK in editor(page), "the edited script after a reload")

            second = page.context.new_page()
            open_page(second, server)
            second.get_by_role("button", name=re.compile("^The script")).click()
            until(lambda: MARK in editor(second), "the edited script in a second window")
            insert_line(second, "# second window")
            until(lambda: "# second window" in script_of(data), "the second window's line")
            page.bring_to_front()
            until(lambda: "# second window" in editor(page), "the first window follows")
            second.close()

            page.get_by_role("button", name="Start training").click()
            state_is(page, "completed")
        folder = data / "outputs" / "walk"
        assert (folder / "train.sh").read_text() == script_of(data) and (data / "edited").exists()
        spec = runs.load(folder)
        assert (spec.rank, spec.alpha, spec.max_train_steps) == (6, 3.0, 4) and (folder / "walk.safetensors").is_file()
    finally:
        server.stop(hard=True)


MARK = 'touch "$HANGPROOF_DATA/edited"'


def insert_line(page, text):
    """Add a line below the first one."""
    page.locator("#script .cm-content").click()
    page.keyboard.press("Control+Home")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(text)


def editor(page) -> str:
    return page.locator("#script .cm-content").inner_text()


def script_of(data: Path) -> str:
    """The edited script that the only draft has; "" before one is stored."""
    return next((json.loads(path.read_text())["script"] for path in data.glob("datasets/.drafts/*/script.json")), "")
