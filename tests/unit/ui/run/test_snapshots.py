"""A run's snapshots from its folder: samples, LoRAs and losses at each step, whatever the files say."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st
from seeds import ANY_VALUE
from ui_helpers import lora_file
from ui_markup import sample

from runs.results import read_samples
from ui.run.charts import lines_of
from ui.run.metrics import MAX_STEP, Metrics
from ui.run.snapshots import best, table
from ui.run.view import evolution as read


def steps(found) -> list[int]:
    return [one.step for one in found.snapshots if one.step is not None]


def at_step(found, step):
    return next((one for one in found.snapshots if one.step == step), None)


def step_line(step, loss=0.5, epoch=1, **more) -> str:
    return json.dumps({"kind": "step", "step": step, "epoch": epoch, "loss": loss, **more}) + "\n"


def validation_line(step, value) -> str:
    return json.dumps({"kind": "validation", "step": step, "epoch": 1, "val_loss": value, "items": 4}) + "\n"


def test_samples_loras_and_losses_of_a_step_are_one_row(tmp_path):
    (tmp_path / "sample_prompts.txt").write_text("# none\na cat --w 64 --d 42\n\na dog --w 64\n")
    for step in (0, 10, 20):
        for prompt in (0, 1):
            sample(tmp_path, f"cat_{step:06}_{prompt:02}_20260101120000_{42 + prompt}.png")
    lora_file(tmp_path / "cat-step00000010.safetensors", 10)
    lora_file(tmp_path / f"{tmp_path.name}.safetensors", 20)
    losses = [1.0 / step for step in range(1, 21)]
    text = "".join(step_line(step, 1.0 / step, 1 + (step > 10)) for step in range(1, 21))
    (tmp_path / "metrics.jsonl").write_text(text + validation_line(0, 0.9) + validation_line(20, 0.7))
    found = read(tmp_path)
    assert [(one.number, one.text, one.seed) for one in found.prompts] == [(0, "a cat", 42), (1, "a dog", None)]
    assert steps(found) == [0, 10, 20] and found.validation == ((0, 0.9), (20, 0.7))
    start, middle, end = found.snapshots
    assert (start.at, start.lora, start.loss, start.val_loss) == ("before training", None, None, 0.9)
    assert middle.lora.path.name == "cat-step00000010.safetensors" and middle.val_loss is None
    assert end.lora.final and (end.epoch, end.val_loss) == (2, 0.7)
    assert middle.loss == pytest.approx(sum(losses[:10]) / 10) and end.loss == pytest.approx(sum(losses) / 20)
    assert [one.prompt for one in end.samples] == [0, 1] and end.samples[1].seed == 43
    assert at_step(found, 10) is middle and at_step(found, 15) is None
    assert best(((0, 0.1), (10, 0.5), (20, 0.4), (30, 0.4))) == (20, 0.4), "it has trained"
    assert best(((0, 0.1),)) is None and best(()) is None


def test_samples_before_and_after_a_restart_are_one_series_and_the_newest_counts(tmp_path):
    sample(tmp_path, "cat_000010_00_20260101120000_42.png")
    sample(tmp_path, "cat_000020_00_20260101120500_42.png")
    sample(tmp_path, "cat_000020_00_20260101130000_42.png")  # repeated after a restart
    sample(tmp_path, "cat_000030_00_20260101130500_42.png")
    sample(tmp_path, ".cat_000040_00_20260101130500_42.png")  # being written
    first = [step_line(step, 9.0, attempt=1) for step in range(1, 26)]
    second = [step_line(step, 1.0, attempt=2) for step in range(11, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(first + second))
    found = read(tmp_path)
    assert steps(found) == [10, 20, 30]
    assert at_step(found, 20).samples[0].path.name == "cat_000020_00_20260101130000_42.png"
    assert at_step(found, 30).loss == pytest.approx((10 * 9.0 + 20 * 1.0) / 30)


def test_an_epoch_becomes_its_last_step(tmp_path):
    for epoch in (0, 1, 2, 7):
        sample(tmp_path, f"cat_e{epoch:06}_00_20260101120000_42.png")
    lora_file(tmp_path / "cat-000002.safetensors", 16, 2)  # its metadata says the step
    (tmp_path / "metrics.jsonl").write_text("".join(step_line(step) for step in range(1, 9)))
    found = read(tmp_path)
    assert [(one.step, one.epoch) for one in found.snapshots] == [(0, None), (8, 1), (16, None), (None, 7)]
    assert at_step(found, 16).lora is not None and at_step(found, 16).samples
    assert found.snapshots[-1].at == "epoch 7" and steps(found) == [0, 8, 16]


def test_the_rows_of_a_long_run_do_not_each_read_all_its_steps(tmp_path, monkeypatch):
    """A page asks every second: with 500,000 steps and 400 LoRAs, it took a processor core for itself."""
    (tmp_path / "metrics.jsonl").write_text("".join(step_line(step, epoch=1 + step // 10) for step in range(1, 3001)))
    seen, losses = [], Metrics(tmp_path / "metrics.jsonl").update()

    class Counted(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *given, **more):
            seen.append(max(np.size(one) for one in given))
            plain = [one.view(np.ndarray) if isinstance(one, Counted) else one for one in given]
            return getattr(ufunc, method)(*plain, **more)

    losses.steps = {name: column.view(Counted) for name, column in losses.steps.items()}
    for step in range(0, 3001, 10):
        sample(tmp_path, f"cat_{step:06}_00_20260101120000_42.png")
    found = table([], read_samples(tmp_path / "sample"), [], losses)
    assert len(found.snapshots) == 301 and at_step(found, 3000).loss == 0.5
    assert sum(seen) < 50 * 3000, "a few looks at all steps, and not one for each row and epoch"


KEYS = ["t", "attempt", "epoch", "loss", "val_loss", "lr", "step_s", "gpu", "name", "memory_used", "memory_total"]
VALUES = ANY_VALUE | st.sampled_from(["2026-11-22T12:00:00.000Z", 1, 2, 3, 10**12])
LINES = st.binary(max_size=60) | st.builds(
    lambda kind, step, more: json.dumps({**more, "kind": kind, "step": step}).encode(),
    st.sampled_from(["step", "validation", "gpu", 3, None]),
    st.integers(-5, 300) | VALUES,
    st.dictionaries(st.sampled_from(KEYS), VALUES),
)


@given(st.lists(LINES, max_size=12), st.integers(0, 2**32))
def test_any_metrics_are_read_the_same_in_one_read_and_in_many_and_break_no_chart(tmp_path_factory, lines, seed):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    whole = b"\n".join([step_line(1).encode().rstrip(), *lines]) + b"\n"
    path.write_bytes(whole)
    once = Metrics(path).update()
    steps_read = once.steps["step"].tolist()
    assert steps_read == sorted(set(steps_read)) and all(0 <= step <= MAX_STEP for step in steps_read)
    assert not any(math.isinf(value) for value in once.validation.values())
    json.dumps(lines_of(once, 0, []), allow_nan=False)
    path.unlink()
    grows, draw, at = Metrics(path), random.Random(seed), 0
    while at < len(whole):
        end = min(len(whole), at + draw.randint(1, 60))
        with path.open("ab") as file:
            file.write(whole[at:end])
        grows.update()
        at = end
    assert repr((grows.validation, grows.steps, grows.restarts)) == repr((once.validation, once.steps, once.restarts))
    table([], [], [], once)
