"""Templates: settings under a name. No name is a path, and no window overwrites another one's by chance. An
import names each change of the form, and changes nothing before it is used."""

import errno
import json
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from configure_helpers import DRAFT, FORM
from draft_helpers import drawn, photo
from hypothesis import HealthCheck, given, settings, strategies as st

from runs.files import RunError, atomic_write
from ui.dataset import draft
from ui.new import form, templates

VALUES = {**form.defaults(), "rank": 24, "prompts": "a cat\na dog", "name": "secret name", "trigger": "ohwx"}
pytestmark = pytest.mark.usefixtures("data")


def test_a_template_keeps_all_settings_but_name_trigger_and_images():
    saved = templates.save_template("My portraits", VALUES)
    (one,) = templates.listing()
    assert (one["key"], one["name"]) == (saved["key"], "My portraits")
    values = templates.values_of(saved["key"])
    assert values["rank"] == 24 and values["prompts"] == "a cat\na dog"
    assert not {"name", "trigger", "control_dir"} & values.keys() and values.keys() <= set(form.KEYS)


def test_a_name_that_is_taken_is_replaced_only_on_purpose():
    first = templates.save_template("A", VALUES)
    with pytest.raises(RunError, match="exists already"):
        templates.save_template("  a ", {**VALUES, "rank": 1})
    assert templates.values_of(first["key"])["rank"] == 24
    assert templates.save_template("A", {**VALUES, "rank": 2}, replace=True) == first and len(templates.listing()) == 1
    assert templates.values_of(first["key"])["rank"] == 2


def test_of_two_windows_that_save_one_name_at_the_same_time_one_is_refused(monkeypatch):
    def slow(path, content):
        time.sleep(0.3)
        atomic_write(path, content)

    monkeypatch.setattr(templates, "atomic_write", slow)
    with ThreadPoolExecutor() as windows:
        saving = [windows.submit(templates.save_template, "A", {**VALUES, "rank": rank}) for rank in (1, 2)]
    (refused,) = filter(None, (one.exception() for one in saving))
    (saved,) = (rank for rank, one in zip((1, 2), saving, strict=True) if not one.exception())
    assert "exists already" in str(refused) and templates.values_of(templates.listing()[0]["key"])["rank"] == saved


def test_a_template_that_a_full_disk_does_not_take_leaves_its_name_free(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="cannot save the template: the disk is full"):
        patch.setattr(templates, "atomic_write", full)
        templates.save_template("A", VALUES)
    assert templates.listing() == [] and templates.save_template("A", VALUES)["name"] == "A"


def test_a_template_of_another_model_also_sets_what_the_form_shows_already(mine):
    usual = form.current(mine)
    form.save(mine, {"model": "sdxl", "learning_rate": usual["learning_rate"], "resolution": usual["resolution"]})
    saved, other = form.current(mine), draft.new_id()
    key = templates.save_template("Mine", saved)["key"]
    run, _ = drawn(templates.draw, other)
    assert " fields.<" in run["on_use"](run["on_template"](key)[-1])[0]
    assert templates.changes(saved, form.current(other)) == {}


def test_a_damaged_template_is_listed_with_its_file_and_can_be_deleted(monkeypatch):
    key = templates.save_template("A", VALUES)["key"]
    path = templates.folder() / f"{key}.json"
    of_a_time, of_half = '{"name": "x", "values": {}, "saved_at": 5}', r'{"name": "\ud83d", "values": {}}'
    for text in ("", "[]", '{"name": 1, "values": {}}', '{"name": "x"}', "\x00", of_a_time, of_half):
        path.write_text(text)
        (one,) = templates.listing()
        assert str(path) in one["about"]
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_text", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        assert "Input/output error; check its disk" in templates.listing()[0]["about"], "that is no reason to delete it"
    templates.delete_template(key)
    assert not templates.listing()


def test_what_no_longer_exists_is_left_out():
    key = templates.save_template("A", {**VALUES, "model": "flux-dev", "tier": "12G"})["key"]
    path = templates.folder() / f"{key}.json"
    table = json.loads(path.read_text())
    table["values"] |= {"model": "gone", "unheard": 1, "rank": [1]}
    path.write_text(json.dumps(table))
    values = templates.values_of(key)
    assert values["model"] == form.defaults()["model"] and values["tier"] == "12G" and "unheard" not in values
    assert "rank" not in values


@pytest.mark.parametrize("name", ["", "  ", "\0", "x" * 81, None, 7, ["a"]])
def test_a_name_must_be_one_line(name):
    with pytest.raises(RunError, match="1 to 80 characters"):
        templates.save_template(name, VALUES)


@pytest.mark.parametrize("key", ["../x", "", None, "a" * 25, "/etc/passwd", "A" * 24, 3])
def test_a_key_is_never_a_path(key):
    for act in (templates.delete_template, templates.values_of):
        with pytest.raises(RunError, match="no such template"):
            act(key)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    st.text(max_size=90),
    st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=20) | st.none(), max_size=4),
)
def test_any_name_and_values_stay_inside_the_folder(name, values):
    try:
        saved = templates.save_template(name, values)
    except RunError:
        return
    assert {path.name for path in templates.folder().parent.iterdir()} == {"templates"}
    assert [one["name"] for one in templates.listing()] == [saved["name"]]
    templates.delete_template(saved["key"])


def test_an_import_names_each_change_of_the_form_and_its_image_folders(filled, tmp_path):
    photo(tmp_path / "there" / "10_cat" / "x.png", 3)
    text = f"image_dir = {json.dumps(str(tmp_path / 'there'))}\nnum_repeats = 4\n"
    command = "accelerate launch flux_train_network.py --network_dim 24 --noise_offset 0.1 --max_train_epochs 5"
    (tmp_path / "d.toml").write_text(f"[[datasets]]\n[[datasets.subsets]]\n{text}")
    files = templates.given_files(command, [str(tmp_path / "d.toml")])
    found, now = templates.read_files(files), form.current(DRAFT)
    values = templates.form_values(found, now)
    after = {key: then for key, (_, then) in templates.changes(values, now).items()}
    expected = {"rank": "24", "model": "FLUX.1-dev", "repeats": "4", "max_train_steps": ""}
    assert {key: after[key] for key in expected} == expected
    assert "noise_offset=0.1" in after["flags"] and "name" not in after and values["epochs"] == 5
    assert [one.path for one in found.folders if one.path] == [str(tmp_path / "there")]
    assert not templates.folder_problem(str(tmp_path / "there"))
    assert "No such file or directory" in templates.folder_problem("/nonexistent")
    assert draft.form(DRAFT) == {key: FORM[key] for key in FORM}, "nothing is changed before it is used"
    spec = form.parse({**now, **values, "flags": ""})[0]
    assert (spec.rank, spec.epochs, spec.model) == (24, 5, "flux-dev")
    subset = "[general]\nkeep_tokens = 2\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = '/x'\n"
    without_model = templates.read_files([("dataset.toml", subset)])
    for flags, after in (("a=1\n", "a=1\nkeep_tokens=2\n"), (None, "keep_tokens=2\n")):  # null: a program's
        assert templates.form_values(without_model, {**now, "flags": flags})["flags"] == after
    config = 'training_comment = "x\\nstore=s3://theirs"\nhuggingface_token = "hf_x\\u2028save_dir=/theirs"\n'
    config += 'network_dim = 8\nnetwork_args = ["a=1\\u2028save_dir=/theirs\\u2028"]\n'
    spec = form.parse({**now, **templates.form_values(templates.read_files([("x.toml", config)]), now)})[0]
    assert (spec.store, spec.save_dir) == ("", ""), "a value has no options of its own"
    assert spec.extra["training_comment"] == "x store=s3://theirs"
    assert spec.environment == {"HF_TOKEN": "hf_x save_dir=/theirs"}
