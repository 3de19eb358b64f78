"""The samples and LoRAs of a run are read from their names and metadata, whatever else is in the folder."""

import re

from ui_helpers import lora_file

from runs import results


def test_names_that_are_no_samples_are_kept_apart_and_cost_no_time(tmp_path):
    assert results.read_samples(tmp_path / "none") == results.read_prompts(tmp_path / "none") == []
    for name in ("my picture.png", "notes.txt", ".cat_000010_00_20260101120000_42.png"):
        (tmp_path / name).touch()
    (found,) = results.read_samples(tmp_path)
    assert (found.path.name, found.unit, found.prompt, found.at) == ("my picture.png", "", -1, "my picture.png")
    for name, wanted in (
        ("a_000012_01_20260101120000_42.png", ("step", 12, 1, 42)),
        ("a_e000003_00_20260101120000.webp", ("epoch", 3, 0, None)),
        ("_0000019999999999999_00_20260101120000_1.jpg", ("", 0, -1, None)),
    ):
        (tmp_path / "my picture.png").rename(tmp_path / name)
        (found,) = results.read_samples(tmp_path)
        assert (found.unit, found.number, found.prompt, found.seed) == wanted
        found.path.rename(tmp_path / "my picture.png")
    for name in ("_" * 5000, "_0" * 2500, "_000000" * 700, "_e" * 2500):
        assert results.SAMPLE.search(name) is None
    assert re.compile(results.SEED).search(" --d" * 2000) is None


def test_the_final_lora_comes_first_and_one_that_is_incomplete_is_none(tmp_path):
    folder = tmp_path / "cat"
    folder.mkdir()
    for name, step, epoch in (("cat-step00000010", 0, None), ("cat-000002", 16, 2), ("cat", 20, 4), (".cat", 30, 4)):
        lora_file(folder / f"{name}.safetensors", step, epoch)
    (folder / "cut.safetensors").write_bytes((folder / "cat.safetensors").read_bytes()[:-1])
    found = results.loras(folder)
    wanted = [("cat", True, 20, 4), ("cat-000002", False, 16, 2), ("cat-step00000010", False, 10, None)]
    assert [(one.path.stem, one.final, one.step, one.epoch) for one in found] == wanted
    assert found[0].size == found[0].path.stat().st_size and results.loras(tmp_path / "none") == []
    dated = folder.rename(tmp_path / "cat-202401") / "cat-202401.safetensors"
    lora_file(dated, 20, 4)
    found = results.loras(dated.parent)
    assert [(one.step, one.epoch) for one in found if one.final] == [(20, 4)], "not the number of its name"
