"""The buckets are those of the files that a run gets (tests/upstream compares them with the trainers' own)."""

from draft_helpers import item

import runs
from ui.dataset import bucket_preview


def test_the_settings_are_those_of_the_files_that_a_run_gets():
    spec = runs.make({"name": "x", "backend": "musubi", "model": "z-image", "resolution": 768, "batch_size": 2})
    found = bucket_preview.by_folder(spec, [item("a", 768, 768), item("b", 1536, 768, folder="5_dog")])
    assert {folder: len(sizes) for folder, sizes in found.items()} == {"": 1, "5_dog": 1}
    spec = runs.make({"name": "x", "resolution": 512, "batch_size": 4, "repeats": 3})
    found = bucket_preview.by_folder(spec, [item("a", 512, 512), item("b", 600, 600), item("c", 900, 512, weight=2)])
    assert found == {"": [(512, 512), (512, 512)], "weight-2": [(640, 384)]}
