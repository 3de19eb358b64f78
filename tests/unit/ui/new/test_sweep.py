"""A sweep of a draft."""

import pytest
from draft_helpers import drop, photo

import runs
from jobs import queue
from runs.files import RunError
from ui.dataset import captioning, draft
from ui.dataset.draft_store import new_id
from ui.new import form, sweep as page_sweep


def test_the_page_plans_and_makes_a_sweep_of_the_draft(base, tmp_path, monkeypatch):
    draft_id = new_id()
    drop(draft_id, photo(tmp_path / "b.png", 1), photo(tmp_path / "a.png", 2, size=(64, 96)))
    for item in draft.items(draft_id):
        draft.set_caption(draft_id, item.id, f"a photo, {item.file}")
    fields = form.defaults() | {"name": "bird", "model": "tiny-flux", "backend": "diffusers", "tier": "16G"}
    fields |= {"resolution": 64, "repeats": 3, "epochs": 1}
    draft.save_fields(draft_id, fields)
    assert page_sweep.plan(draft_id, {"batch_size": "1, 2"})["steps"] == 6 + 4, "each bucket has a smaller batch"
    draft.save_fields(draft_id, {"max_train_steps": "4"})
    values = {"rank": "2, 4", "seed": "1"}
    assert page_sweep.plan(draft_id, values) == {"runs": ["bird-r2-seed1", "bird-r4-seed1"], "steps": 8}
    for wrong in ({"rank": "x"}, {"name": "1,2"}, {"rank": "1," * 200}, {"rank": "8"}, {}):
        with pytest.raises(RunError):
            page_sweep.start(draft_id, wrong)
    with pytest.raises(RunError):
        page_sweep.start("../x", values)
    assert [folder.name for folder in runs.list_runs()] == ["cat"]
    monkeypatch.setattr(queue, "ensure_worker", lambda: False)  # nothing is trained here
    with monkeypatch.context() as patch, pytest.raises(RunError, match="Captions are still being written"):
        patch.setattr("ui.dataset.captioning.running", lambda _: True)
        captioning.begin(draft_id, {}, "all", overwrite=True)
        page_sweep.start(draft_id, values)
    assert draft.images_not_in_a_run(draft_id) == 2
    made = page_sweep.start(draft_id, values)
    assert not draft.images_not_in_a_run(draft_id)
    assert (made.name, [run for run, _ in made.runs]) == ("bird-sweep", ["bird-r2-seed1", "bird-r4-seed1"])
    (entry,) = queue.read().entries
    assert (entry.run, entry.sweep, entry.total) == ("bird-sweep", ("bird-r2-seed1", "bird-r4-seed1"), 2)
    prompts = [runs.load(runs.outputs_dir() / run).prompts for run in entry.sweep]
    assert prompts == [["a photo, b.png"]] * 2, "all draw the same"
