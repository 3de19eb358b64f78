"""Which base models the page downloads."""

import presets
from ui.new import model_note


def test_every_trainer_that_loads_files_gets_a_download(data):
    for key, model in presets.models().items():
        for backend in presets.backends_of(key):
            by_page = presets.backends()[backend]["loads"] == "files" and not model["generated"]
            assert model_note.model_to_fetch({"model": key, "backend": backend}) == (key if by_page else "")
