"""A setting is declared once, and every reader of the declaration has it."""

from runs_helpers import spec

import runs
from runs import fields, flags
from runs.foreign import read
from runs.foreign_spec import convert


def test_a_setting_that_is_declared_once_is_in_the_form_the_command_the_import_and_the_data_set(tmp_path):
    """`caption_dropout` has one declaration, in RunSpec; docs/settings.md has it by test_documentation.py."""
    shown = next(one for one in fields.MORE if one.key == "caption_dropout")
    assert (shown.label, shown.kind, fields.EMPTY["caption_dropout"]) == ("Uses without a caption", "text", 0.0)
    row = f"| `caption_dropout` | {shown.label}: {shown.info} | `0.0` | `caption_dropout_rate` |"
    assert row in fields.reference().splitlines()
    made = runs.make(flags.settings(["caption_dropout_rate=0.25"], {"name": "x", "backend": "diffusers"})[0])
    assert made.caption_dropout == 0.25
    assert runs.dataset_tables(made)["general"]["caption_dropout_rate"] == 0.25
    assert "caption_dropout_rate" not in runs.dataset_tables(spec(backend="diffusers"))["general"]
    ours = convert(read([("train.sh", "python -m trainer --network_dim 8 --caption_dropout_rate 0.25")]))
    assert ours.fields["caption_dropout"] == "0.25"
    theirs = convert(read([("train.sh", "python flux_train_network.py --network_dim 8 --caption_dropout_rate 0.25")]))
    assert "caption_dropout" not in theirs.fields, "kohya's trainers encode captions once"
    row = next(one for one in theirs.rows if one.name == "--caption_dropout_rate")
    assert row.outcome == "unsupported" and "encode captions once" in row.text
