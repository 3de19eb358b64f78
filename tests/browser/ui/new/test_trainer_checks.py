"""After an update the page names both versions and what fits, and says how the old one comes back."""

from checkout_helpers import used
from ui_helpers import serving
from ui_page import assert_accessible, open_page

from sd_scripts_patches.trainers import TRAINERS


def test_an_update_is_named_with_the_way_back(tmp_path, tab, checkout):
    folder, old, new = checkout
    data = tmp_path / "data"
    with serving(data, SD_SCRIPTS_DIR=str(folder), SD_SCRIPTS_VENV=str(tmp_path / "none")) as server:
        open_page(tab, server)
        tab.get_by_label("kohya's sd-scripts").check()
        changed = tab.get_by_test_id("trainer-changed")
        changed.get_by_text("which Hangproof is not tested with").wait_for()  # no run used it
        assert new[:8] in changed.inner_text() and TRAINERS["sd-scripts"].commit[:8] in changed.inner_text()
        tab.get_by_label("Built-in").check()
        changed.wait_for(state="detached")

        used(data, folder, old)
        tab.get_by_label("kohya's sd-scripts").check()
        changed.get_by_text("sd-scripts was changed").wait_for()
        text = changed.inner_text()
        assert f"It used {old[:8]}; now it is {new[:8]}." in text
        assert f"python -m sd_scripts_patches.versions sd-scripts {old}" in text
        assert_accessible(tab, "#backend")
        assert "is not a checkout of sd-scripts or musubi-tuner" in text  # so no guard fits it
