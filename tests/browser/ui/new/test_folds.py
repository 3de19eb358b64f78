"""The folds of the tab New LoRA are made when they are opened: templates, an import, a sweep's plan, a rehearsal."""

import json
import re

from draft_helpers import photo
from ui_page import become, choose_tiny, drop, field, open_page, shows, unfold, until

TRAIN = "accelerate launch -m trainer --pretrained_model_name_or_path tiny-flux --network_dim 6 --blocks_to_swap 4\n"


def test_settings_come_from_a_template_and_a_file_and_a_sweep_is_planned(tab, server, tmp_path):
    open_page(tab, server)
    tab.get_by_role("button", name="Sample images during training").hover()
    tab.mouse.down()
    field(tab, "epochs").fill("-1")
    tab.locator("#note-epochs-0").wait_for()  # moves the page: the release is beside the button
    tab.mouse.up()
    field(tab, "prompts").wait_for()
    field(tab, "epochs").fill("3")
    field(tab, "name").fill("walk")
    field(tab, "trigger").fill("ohwx")
    choose_tiny(tab)
    tab.get_by_role("button", name="More settings").click()
    assert tab.locator("#template, #sweep-rank, #rehearse").count() == 0
    for name in ("setup", "sweep", "rehearsal"):
        unfold(tab.locator(f"#{name} button.label-wrap").first)

    field(tab, "rank").fill("32")
    own = tab.get_by_label("Name of a new template")
    own.fill("Mine <img src=x>")
    own.press("Enter")
    tab.locator("#setup").get_by_text("Saved as “Mine <img src=x>”.", exact=True).wait_for()
    field(tab, "rank").fill("8")
    field(tab, "template").click()
    tab.get_by_role("option", name=re.compile("^Mine")).click()
    tab.locator("#use-settings").click()
    become(tab, rank="32")
    field(tab, "template").click()
    tab.get_by_role("option", name=re.compile("^Mine")).click()
    for label in ("Delete this template", "Delete it now? Press again"):
        tab.get_by_role("button", name=label).click()
    tab.locator("#setup").get_by_text("Deleted.", exact=True).wait_for()

    (tmp_path / "train.sh").write_text(TRAIN)
    images = photo(tmp_path / "photos" / "0.png", 0).parent
    photo(images / "1.png", 1)
    (tmp_path / "dataset.toml").write_text(
        f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = {json.dumps(str(images))}\n"
    )
    files = [str(tmp_path / name) for name in ("train.sh", "dataset.toml")]
    tab.locator("#import-files input[type=file]").set_input_files(files)
    tab.locator("#import-files").get_by_text("dataset").first.wait_for()
    tab.locator("#import-read").click()
    tab.locator("#setup-preview").get_by_text("Left out: can hang").first.wait_for()
    assert field(tab, "rank").input_value() == "32", "nothing changes before it is used"
    tab.locator("#import-images").click()
    shows(tab, 2)
    tab.locator("#use-settings").click()
    become(tab, rank="6")

    field(tab, "sweep-rank").fill("2, four")
    plan, go = tab.locator("#sweep-plan"), tab.locator("#sweep-start")
    plan.get_by_text("'four' is not").wait_for()
    until(go.is_disabled, "a sweep with a wrong value cannot be queued")
    field(tab, "sweep-rank").fill("2, 4")
    plan.get_by_text("walk-r2, walk-r4").wait_for()
    until(go.is_enabled, "the sweep can be queued")
    tab.locator("#rehearse").wait_for()
    assert not list((server.data / "outputs").glob("walk*")), "nothing is written before a button is pressed"


def test_the_plan_and_the_other_tabs_follow_the_edited_script(tab, server, tmp_path):
    open_page(tab, server)
    field(tab, "name").fill("edited")
    choose_tiny(tab)
    drop(tab, photo(tmp_path / "0.png", 0), count=1)
    unfold(tab.locator("#script-fold button.label-wrap").first)
    tab.locator("#edit-script").click()
    tab.locator("#script .cm-content[contenteditable=true]").click()
    for key in ("Control+End", "Backspace"):
        tab.keyboard.press(key)
    tab.keyboard.insert_text(" --max_train_epochs 3\n")
    tab.locator("#plan").get_by_text("× 3 epochs").wait_for()
    second = tab.context.new_page()
    open_page(second, server)
    second.locator("#plan").get_by_text("× 3 epochs").wait_for()
    for label in ("Use the generated script", "Discard your script? Press again"):
        tab.get_by_role("button", name=label).click()
    for page in (tab, second):
        page.locator("#plan").get_by_text("× 3 epochs").wait_for(state="detached")

    # The reasons why there is no script are not edited.
    tab.locator("#edit-script").click()
    for name, editable in (("edited", "true"), ("", "false"), ("again", "true")):
        field(tab, "name").fill(name)
        tab.locator(f"#script .cm-content[contenteditable={editable}]").wait_for()
