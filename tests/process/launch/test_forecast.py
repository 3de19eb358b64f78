"""What a rehearsal measured, as the time, the disk and the cost of the complete run."""

import time

import pytest
from runs_helpers import spec

from launch import forecast

MEASURED = {
    "load_s": 60.0, "cache_s": 20.0, "image_s": 0.5, "step_s": 2.0, "sample_s": 10.0, "save_s": 3.0, "images": 2,
    "state_bytes": 400_000_000, "lora_bytes": 100_000_000, "cache_bytes": 4_000_000, "host_bytes": 8_000_000_000,
    "gpu_bytes": 15_700_000_000, "gpu_total_bytes": 16_000_000_000, "gpu_before_bytes": 0,
}  # fmt: skip


def test_the_forecast_counts_all_parts(data):
    made = spec(
        max_train_steps=1000, save_every_n_steps=100, sample_every_n_steps=250, prompts=["a", "b"], keep_states=2,
        save_every_n_epochs=0, price_per_hour=2.0, spend_limit=0.5,
    )  # fmt: skip
    found = forecast.of(MEASURED, made, {"": 22})
    parts = {"loading": 60.0, "encoding": 30.0, "training": 2000.0, "samples": 80.0, "checkpoints": 33.0}
    assert found["parts_s"] == parts and found["seconds"] == sum(parts.values())
    assert found["ends_s"] == pytest.approx(time.time() + 2203, abs=60)
    assert found["cost"] == pytest.approx(2203 / 3600 * 2, abs=0.01)
    assert found["disk_bytes"] == 3 * 400_000_000 + 3 * 100_000_000 + 22 * 2_000_000
    said = " ".join(found["warnings"])
    assert "nearly full: 15.7 GB of 16.0 GB" in said and "more than the spend limit of 0.5" in said
    assert forecast.of({}, made, {"": 22}) == {} and forecast.lines({}) == []
    text = "\n".join(forecast.lines(found))
    assert "1,000 steps take about 36 min 43 s: started now, the run ends on" in text and "Cost: about 1.22." in text


def test_a_run_by_epochs_without_a_gpu_a_price_or_samples(data):
    every = {"save_every_n_epochs": 2, "save_every_n_steps": 0, "sample_every_n_steps": 0}
    made = spec(epochs=10, repeats=1, keep_states=3, spend_limit=1, **every)
    none = dict.fromkeys(("gpu_bytes", "gpu_total_bytes", "sample_s"))
    found = forecast.of({**MEASURED, **none, "images": 0, "state_bytes": 10**18}, made, {"": 4})
    assert found["steps"] == 40 and found["cost"] is None and found["parts_s"]["samples"] == 0
    assert found["parts_s"]["checkpoints"] == 5 * 3.0 and found["parts_s"]["encoding"] == 20 + 3 * 0.5
    assert round(found["disk_bytes"] / 1e18) == 3 + 3 + 1 and [one.split()[0] for one in found["warnings"]] == ["The"]
    text = "\n".join(forecast.lines(found))
    assert "Cost" not in text and "GPU" not in text and "Free some disk space." in text
    assert forecast.of(MEASURED, made.changed(max_train_steps=9), {"": 4})["parts_s"]["checkpoints"] == 2 * 3.0
