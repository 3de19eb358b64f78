"""A run is copied into the tab New LoRA."""

import pytest
from runs_helpers import sources
from ui_helpers import photos

import presets
import runs
from ui.dataset import draft
from ui.new import settings
from ui.run import run_page


@pytest.mark.parametrize("backend, model", {presets.backend_of(one): one for one in presets.models()}.items())
def test_a_run_of_every_trainer_brings_its_settings_images_and_captions(data, backend, model):
    fields = {"name": f"of {model}", "model": model, "trigger": "tok", "epochs": 7, "backend": backend}
    spec = runs.make({**fields, "tier": presets.smallest_tier(model, backend)})
    folder = runs.create(spec, sources(photos("coffee.png", "chelsea.png"), {"coffee.png": "tok, a cup"}))
    mine = draft.new_id()
    list(run_page.copy_to_new_lora(folder.name, "", mine))
    values = settings.current(mine)
    assert {key: values[key] for key in fields} == {**fields, "name": f"of {model} 2"}
    assert values["tier"] == spec.tier
    assert {item.file: item.caption for item in draft.items(mine)} == {"coffee.png": "tok, a cup", "chelsea.png": "tok"}
