"""What the page says of a draft's settings: the plan, the notes on the model."""

import json

import pytest
from configure_helpers import GPU, NO_GPU, values
from draft_helpers import add_photos
from families import MODELS

import presets
import runs
from runs import history
from ui.dataset import bucket_preview, draft
from ui.new import form, summary

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_a_change_of_the_form_is_parsed_once_and_a_word_is_not_judged_again(mine, monkeypatch, tmp_path):
    add_photos(mine, tmp_path, 2)
    calls = []
    for place, name in ((form, "make"), (bucket_preview, "plan"), (form, "judge")):
        act = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, name=name, act=act: calls.append(name) or act(*given))
    draft.save_fields(mine, values())
    said = summary.save_settings(mine, {})["said"]
    assert calls == ["make", "judge"] and "320 steps" in said[0]
    assert json.dumps(said), "a browser gets all of it"
    summary.save_settings(mine, {"trigger": "another"})
    assert calls == ["make", "judge", "make"]
    assert "160 steps" in summary.save_settings(mine, {"batch_size": 2})["said"][0]
    assert calls[3:] == ["make", "plan", "judge"], "of batches of several images, buckets are counted"


def test_cost_time_and_disk_are_beside_memory(data):
    fields = {"name": "cat", "model": "flux-dev", "tier": "20G", "trigger": "x", "spend_limit": "0.1"}
    review = form.review(values(**fields, price_per_hour="0.5"), {"": 20})
    spec, text = review.spec, summary.estimates(review)
    seconds, source = history.expected(spec, runs.planned_steps(spec, {"": 20}))
    assert f"about {0.5 * seconds / 3600:.2f}" in text and "spend limit of 0.1" in text and "RTX 4090" in source
    by_epochs = summary.estimates(form.review(values(flags="sample_every_n_epochs=2"), {"": 20}))
    assert "every 400 steps" in text and "every 2 epochs" in by_epochs
    assert "samples" in text and "Cost" not in summary.estimates(form.review(values(**fields), {"": 20}))


@pytest.mark.parametrize(("key", "backend"), MODELS)
def test_the_notes_and_the_table_say_what_every_tier_needs(data, key, backend):
    given = values(model=key, **form.model_values(key, backend, "person", NO_GPU))
    assert given["backend"] == backend and form.parse(given)[1] == [], "the values of a model are valid for it"
    by_page = presets.backends()[backend]["loads"] == "files" and not presets.models()[key]["generated"]
    assert summary.model_to_fetch(given) == (key if by_page else "")
    choices = {key: dict(map(reversed, found)) for key, found in summary.gpu_choices(given).items()}
    (cells,) = [cells for cells in summary.rows_of(key) if form.BACKENDS[backend] in cells[1]]
    for name, row in presets.tiers_of(key, backend).items():
        shown = summary.model_notes({**given, "tier": name}, None)
        assert f"{row['label']}{' is too small' if row['problem'] else ': '}" in shown
        assert summary.esc(row["basis"]) in shown
        needs = "too small" if row["problem"] else f"{row['needs_gb']:g} GB"
        assert choices["tier"][name] == f"{row['label']} · {'' if row['problem'] else 'uses '}{needs}"
        assert cells.pop(2) == needs
    assert cells == [presets.models()[key]["name"], cells[1], presets.models()[key]["licence"]]
    fitting = {name for name, label in choices["backend"].items() if not label.endswith(" · not for this model")}
    assert fitting == set(presets.backends_of(key))


def test_the_table_has_every_model_and_marks_the_choice_that_suits_the_gpu():
    shown = summary.table_html(GPU)
    assert all(f">{summary.esc(model['name'])}<" in shown for model in presets.models().values())
    assert "12 GB (your GPU)" in shown and shown.count("(your GPU)") == 1
    assert "(your GPU)" not in summary.table_html(NO_GPU)
