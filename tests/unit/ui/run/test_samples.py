"""The pictures of a run: in order, with any text, and only those that the page sends."""

import json
import shutil

import pytest
from ui_helpers import lora_file, photos, write_run

from ui.api.runs import run_samples
from ui.run import blind_vote, cards, samples, view

HOSTILE = "a dog </p><img src=x onerror=alert(1)>"


@pytest.fixture
def folder(data):
    """A run with two prompts at three steps, and an image of another name."""
    made = write_run(data, "my cat")
    (made / "sample").mkdir()
    (made / "sample_prompts.txt").write_text(f"a cat\n{HOSTILE}\n")
    for step in (8, 16, 24):
        for prompt in (0, 1):
            shutil.copy(photos("coffee.png")[0], made / "sample" / f"cat_{step:06}_{prompt:02}_20260101120000_42.png")
    shutil.copy(photos("coffee.png")[0], made / "sample" / "mine.png")
    return made


def test_pictures_are_in_the_order_of_their_steps_and_nothing_from_elsewhere_is_among_them(folder, tmp_path_factory):
    def captions(prompt: int = samples.ALL) -> list[str]:
        return [caption for _, caption in samples.pictures(view.evolution(folder), prompt)]

    assert samples.prompts(view.evolution(folder)) == {0: "a cat", 1: HOSTILE}
    assert (
        captions()[:3] == ["Step 8 · a cat", f"Step 8 · {HOSTILE}", "Step 16 · a cat"] and captions()[-1] == "mine.png"
    )
    assert captions(0) == [f"Step {n} · a cat" for n in (8, 16, 24)]
    outside = shutil.copy(photos("coffee.png")[0], tmp_path_factory.mktemp("outside") / "secret.png")
    (folder / "sample" / "mine.png").unlink()
    (folder / "sample" / "mine.png").symlink_to(outside)
    (folder / "sample" / "cat_000008_00_20260101120000_42.png").unlink()
    assert captions()[0] == f"Step 8 · {HOSTILE}" and len(captions()) == 5 and "mine.png" not in captions()


def test_texts_stay_texts_and_a_run_without_samples_says_how_to_get_them(folder, data):
    empty = write_run(data, "empty")
    assert "“Sample prompts”" in samples.summary(view.evolution(empty), empty)
    assert samples.summary(view.evolution(folder), folder) == ""
    (folder / "metrics.jsonl").write_text('{"kind": "validation", "step": 16, "val_loss": 0.25}\n')
    assert "0.25 at step 16" in samples.summary(view.evolution(folder), folder)


def test_the_api_has_each_saved_step_and_the_last_mark_counts(folder):
    for step in (8, 16, 24):
        lora_file(folder / f"my-cat-step{step:08}.safetensors", step)
    lines = [{"kind": "step", "step": step, "epoch": 1, "loss": 0.5} for step in range(1, 25)]
    lines += [{"kind": "validation", "step": step, "epoch": 1, "val_loss": 1 / step} for step in (8, 16)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run_samples("my-cat")
    assert (found["run"], found["name"], found["picked"]) == ("my-cat", "my cat", None)
    assert found["best"] == {"step": 16, "val_loss": 0.0625}
    assert [one["prompt"] for one in found["prompts"]] == ["a cat", HOSTILE]
    one = found["snapshots"][1]
    assert (one["step"], one["loss"], one["val_loss"]) == (16, 0.5, 0.0625) and one["time"].endswith("+00:00")
    assert one["lora"]["name"] == "my-cat-step00000016.safetensors" and one["lora"]["size"] > 100
    assert (one["samples"][0]["prompt"], one["samples"][0]["seed"]) == ("a cat", 42)

    blind_vote.mark(folder, 8)
    with (folder / blind_vote.FILE).open("a") as file:
        file.write('{"kind": "pick", "st')  # a power cut
    assert blind_vote.picked(folder) == 8
    blind_vote.mark(folder, 24)
    assert run_samples("my-cat")["picked"] == 24
    shown = cards.loras(folder, view.loras(folder), view.evolution(folder), blind_vote.picked(folder))
    assert shown.count(">picked<") == 1 and ">picked<" in shown.partition("my-cat-step00000024.safetensors")[0]
    blind_vote.mark(folder, None)
    assert blind_vote.picked(folder) is None
