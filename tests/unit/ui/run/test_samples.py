"""The pictures of a run: in order, with any text, and only those that the page sends."""

import shutil

from ui_helpers import photos, write_run
from ui_markup import PROMPT

from ui.run import samples, view


def test_pictures_are_in_the_order_of_their_steps_and_nothing_from_elsewhere_is_among_them(sampled, tmp_path_factory):
    def captions(prompt: int = samples.ALL) -> list[str]:
        return [caption for _, caption in samples.pictures(view.evolution(sampled), prompt)]

    assert samples.prompts(view.evolution(sampled)) == {0: "a cat", 1: PROMPT}
    assert captions()[:3] == ["Step 8 · a cat", f"Step 8 · {PROMPT}", "Step 16 · a cat"]
    assert captions()[-1] == "mine.png"
    assert captions(0) == [f"Step {n} · a cat" for n in (8, 16, 24)]
    outside = shutil.copy(photos("coffee.png")[0], tmp_path_factory.mktemp("outside") / "secret.png")
    (sampled / "sample" / "mine.png").unlink()
    (sampled / "sample" / "mine.png").symlink_to(outside)
    (sampled / "sample" / "cat_000008_00_20260101120000_42.png").unlink()
    assert captions()[0] == f"Step 8 · {PROMPT}" and len(captions()) == 5 and "mine.png" not in captions()


def test_texts_stay_texts_and_a_run_without_samples_says_how_to_get_them(sampled, data):
    empty = write_run(data, "empty")
    assert "“Sample prompts”" in samples.summary(view.evolution(empty), empty)
    assert samples._next(empty)[-1]["visible"] is False, "no buttons to vote on nothing"
    assert samples.summary(view.evolution(sampled), sampled) == ""
    (sampled / "metrics.jsonl").write_text('{"kind": "validation", "step": 16, "val_loss": 0.25}\n')
    assert "0.25 at step 16" in samples.summary(view.evolution(sampled), sampled)


def test_of_many_samples_some_steps_can_be_compared_and_those_that_are_chosen(sampled, monkeypatch):
    found = view.evolution(sampled)
    everything = [(caption, path) for path, caption in samples.pictures(found)]
    assert samples._choices(found) == {"choices": everything, "info": None}
    monkeypatch.setattr(samples, "MOST", 2)
    chosen = next(path for caption, path in everything if caption == "Step 16 · a cat")
    shown = samples._choices(found, chosen, None)
    kept = [*(caption for caption, _ in everything[:3]), *(caption for caption, _ in everything[4:])]
    assert [caption for caption, _ in shown["choices"]] == kept and "One in 4 steps" in shown["info"]
