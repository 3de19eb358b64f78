"""Cost, time and disk of a run, beside its memory."""

from configure_helpers import values

import runs
from presets.estimate import whole
from ui.new import estimates, form


def test_cost_time_and_disk_are_beside_memory(data):
    fields = {"name": "cat", "model": "flux-dev", "tier": "20G", "trigger": "x", "spend_limit": "0.1"}
    review = form.review(values(**fields, price_per_hour="0.5"), {"": 20})
    spec, text = review.spec, estimates.html(review)
    seconds, source = estimates.time_of(spec, runs.planned_steps(spec, {"": 20}))
    assert f"about {0.5 * seconds / 3600:.2f}" in text and "spend limit of 0.1" in text and "RTX 4090" in source
    assert "samples" in text and "Cost" not in estimates.html(form.review(values(**fields), {"": 20}))
    found = whole(spec.model_dump(), {"": 18, "2_more": 1})
    assert found["steps"] == runs.planned_steps(spec, {"": 18, "2_more": 1})
    assert found["seconds"] > found["steps"] and "RTX 4090" in found["time_source"]
