"""What the page says of a base model: its VRAM choices, what is missing, and which models it downloads."""

import pytest
from configure_helpers import GPU, NO_GPU, PAIRS, values

import presets
from ui.new import form, summary


def test_every_trainer_that_loads_files_gets_a_download(data):
    for key, model in presets.models().items():
        for backend in presets.backends_of(key):
            by_page = presets.backends()[backend]["loads"] == "files" and not model["generated"]
            assert summary.model_to_fetch({"model": key, "backend": backend}) == (key if by_page else "")


@pytest.mark.parametrize(("key", "backend"), PAIRS)
def test_the_notes_say_what_every_tier_needs(data, key, backend):
    given = values(model=key, **form.model_values(key, backend, "person", NO_GPU))
    assert given["backend"] == backend and form.parse(given)[1] == [], "the values of a model are valid for it"
    choices = {key: dict(map(reversed, found)) for key, found in summary.gpu_choices(given).items()}
    for name, row in presets.tiers_of(key, backend).items():
        shown = summary.model_notes({**given, "tier": name}, None)
        assert f"{row['label']}{' is too small' if row['problem'] else ': '}" in shown
        assert form.esc(row["basis"]) in shown
        needs = "too small" if row["problem"] else f"uses {row['needs_gb']:g} GB"
        assert choices["tier"][name] == f"{row['label']} · {needs}"
    fitting = {name for name, label in choices["backend"].items() if not label.endswith(" · not for this model")}
    assert fitting == set(presets.backends_of(key))


def test_the_table_has_every_model_with_every_tier():
    shown = summary.table_html(GPU)
    for key, model in presets.models().items():
        for backend in presets.backends_of(key):
            (row,) = [row for row in summary.rows_of(key) if form.BACKENDS[backend] in row[1]]
            needs = presets.tiers_of(key, backend).values()
            figures = ["too small" if one["problem"] else f"{one['needs_gb']:g} GB" for one in needs]
            assert row == [model["name"], row[1], *figures, model["licence"]]
            assert "".join(f"<td>{form.esc(cell)}</td>" for cell in row[1:]) in shown
    assert "12 GB (your GPU)" in shown and shown.count("(your GPU)") == 1
    assert "(your GPU)" not in summary.table_html(NO_GPU)
