"""An import names each change of the form, and changes nothing before it is used."""

import json

from configure_helpers import DRAFT, FORM
from draft_helpers import photo

from ui.dataset import draft
from ui.new import form, importing


def test_an_import_names_each_change_of_the_form_and_its_image_folders(filled, tmp_path):
    photo(tmp_path / "there" / "10_cat" / "x.png", 3)
    text = f"image_dir = {json.dumps(str(tmp_path / 'there'))}\nnum_repeats = 4\n"
    command = "accelerate launch flux_train_network.py --network_dim 24 --noise_offset 0.1 --max_train_epochs 5"
    (tmp_path / "d.toml").write_text(f"[[datasets]]\n[[datasets.subsets]]\n{text}")
    files = importing.given_files(command, [str(tmp_path / "d.toml")])
    found, now = importing.read_files(files), form.current(DRAFT)
    values = importing.form_values(found, now)
    after = {key: then for key, (_, then) in importing.changes(values, now).items()}
    expected = {"rank": "24", "model": "FLUX.1-dev", "repeats": "4", "max_train_steps": ""}
    assert {key: after[key] for key in expected} == expected
    assert "noise_offset=0.1" in after["flags"] and "name" not in after and values["epochs"] == 5
    assert [one.path for one in found.folders if one.path] == [str(tmp_path / "there")]
    assert not importing.folder_problem(str(tmp_path / "there"))
    assert "there is no such folder" in importing.folder_problem("/nonexistent")
    assert draft.form(DRAFT) == {key: FORM[key] for key in FORM}, "nothing is changed before it is used"
    spec = form.parse({**now, **values, "flags": ""})[0]
    assert (spec.rank, spec.epochs, spec.model) == (24, 5, "flux-dev")
