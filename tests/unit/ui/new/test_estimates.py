"""Cost, time and disk of a run, beside its memory."""

from configure_helpers import values
from ui_helpers import write_run

import runs
from runs import history
from ui.new import form, summary


def test_cost_time_and_disk_are_beside_memory(data):
    fields = {"name": "cat", "model": "flux-dev", "tier": "20G", "trigger": "x", "spend_limit": "0.1"}
    review = form.review(values(**fields, price_per_hour="0.5"), {"": 20})
    spec, text = review.spec, summary.estimates(review)
    seconds, source = history.expected(spec, runs.planned_steps(spec, {"": 20}))
    assert f"about {0.5 * seconds / 3600:.2f}" in text and "spend limit of 0.1" in text and "RTX 4090" in source
    by_epochs = summary.estimates(form.review(values(flags="sample_every_n_epochs=2"), {"": 20}))
    assert "every 400 steps" in text and "every 2 epochs" in by_epochs
    assert "samples" in text and "Cost" not in summary.estimates(form.review(values(**fields), {"": 20}))


def test_an_earlier_run_gives_the_time_of_the_next_one(data, no_gpu):
    spec = runs.make({"name": "before", "model": "tiny-flux", "tier": "12G"})
    times = {"step_s": 2.0, "elapsed_s": 1200.0, "updated_at": "2026-01-01T00:20:00.000Z"}
    folder = write_run(data, "before", state="completed", step=500, planned_steps=500, restarts=0, **times)
    (folder / "run.toml").write_text(runs.dumps(spec))
    # 2 s for each step, and the 200 s that the earlier run took besides its steps
    assert history.expected(spec, 2000) == (4200, "measured on this machine in the run “before”")
