"""The samples and LoRAs of a run are read from their names and metadata, whatever else is in the folder."""

import contextlib
import re

from hypothesis import given, settings, strategies as st
from ui_helpers import lora_file

from runs import results

LETTERS = st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",))
NAMES = st.text(LETTERS, min_size=1, max_size=40) | st.builds(
    "{}_{}{}_{}_{}_{}.png".format,
    st.sampled_from(["a", "a_000001_00", "", "_"]),
    st.sampled_from(["", "e", "E"]),
    st.sampled_from(["000001", "999999999999", "0000019999999999999", "x", "٣٣٣٣٣٣"]),
    st.sampled_from(["00", "999999", "-1", "٣"]),
    st.sampled_from(["20260101120000", "0", "99999999999999999999"]),
    st.sampled_from(["42", "", "99999999999999999999999", "4x"]),
)


@given(st.lists(NAMES, max_size=8))
@settings(max_examples=40)
def test_any_file_name_is_a_sample_or_none(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("names")
    for name in names:
        with contextlib.suppress(OSError):  # longer than the file system allows, or not a name
            (folder / name).touch()
    for one in results.read_samples(folder):
        assert one.path.parent == folder and one.path.is_file() and one.path.suffix == ".png"
        assert (one.unit in ("step", "epoch") and one.number < 10**12) or (one.unit, one.prompt) == ("", -1)


def test_names_that_are_no_samples_are_kept_apart_and_cost_no_time(tmp_path):
    assert results.read_samples(tmp_path / "none") == results.read_prompts(tmp_path / "none") == []
    for name in ("my picture.png", "notes.txt", ".cat_000010_00_20260101120000_42.png"):
        (tmp_path / name).touch()
    (found,) = results.read_samples(tmp_path)
    assert (found.path.name, found.unit, found.prompt, found.at) == ("my picture.png", "", -1, "my picture.png")
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
    assert [(one.step, one.epoch) for one in results.loras(dated.parent) if one.final] == [(20, 4)], (
        "the number of its name"
    )
