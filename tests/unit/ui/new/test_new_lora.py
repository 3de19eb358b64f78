"""The tab New LoRA: what it shows of a draft, and when Start refuses."""

import pytest
from draft_helpers import add_photos

import presets
from ui.dataset import draft
from ui.new import form, new_lora, summary

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_a_table_of_models_that_becomes_invalid_while_the_page_is_open_loses_nothing(data, mine, tmp_path):
    add_photos(mine, tmp_path, 1)
    (data / "models.toml").write_text("[models.")
    typed = {"trigger": "kept", "epochs": 3, "model": "tiny-flux"}
    answer = summary.save_settings(mine, typed)
    assert (answer["values"], answer["marks"]) == (typed, {}) and "models.toml" in answer["said"][0]
    with pytest.raises(presets.PresetError):
        form.current(mine)
    opened = new_lora.load(mine)
    assert opened[0] == mine and "models.toml" in opened[2] and opened[3 + form.KEYS.index("trigger")] == "kept"
    *_, (problem, name, _) = new_lora.start(mine, {})
    assert "models.toml" in problem and name == "" and not list((data / "outputs").glob("*"))
    (data / "models.toml").unlink()
    assert form.current(mine)["trigger"] == "kept" and len(draft.items(mine)) == 1


@pytest.mark.parametrize("key", list(new_lora.NOT_ARRIVED))
def test_start_refuses_while_the_browser_holds_something(mine, key):
    *_, (problem, name, _) = new_lora.start(mine, {key: 2})
    assert "not saved" in problem or "not uploaded" in problem
    assert name == ""
