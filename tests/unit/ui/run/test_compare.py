"""Runs side by side, and a run's LoRAs as one archive."""

import json
import re

import pytest
from ui_helpers import a_run, write_history, write_run

import runs
from ui.api.runs import run_status
from ui.html import duration
from ui.run import compare, view


def test_runs_side_by_side(data):
    folders = [a_run(data, "low", 1e-4), a_run(data, "high", 1e-3, rank=16, min_snr_gamma=5)]
    views = compare.chosen_runs([folder.name for folder in folders])
    shown = re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td>', compare.tables(views))
    differ = [("Learning rate", "0.0001", "0.001"), ("Rank", "8", "16"), ("min_snr_gamma", "–", "5")]
    assert shown[-3:] == differ and 'scope="col">low</th><th scope="col">high</th>' in compare.tables(views)
    rows = {label: values for label, *values in shown}
    assert rows["Peak GPU memory"] == ["8.0 GB", "16.0 GB"] and rows["Steps"] == ["60 of 60 steps"] * 2
    assert rows["State"] == ["Completed", "Completed"] and rows["Restarts"] == ["1", "1"]
    assert [compare.losses(one)[-1][:2] for one in views] == [("low", 60.0), ("high", 60.0)]
    assert [caption for _, caption in compare.samples(views)] == ["low, step 60: a cat", "high, step 60: a cat"]
    for names in ([], ["low"], ["low", "low"], ["low", "../low"], ["low", "gone"], [f"r{n}" for n in range(7)]):
        with pytest.raises(runs.RunError, match="Choose 2 to 6 runs|There is no run"):
            compare.chosen_runs(names)
    for folder in folders:  # two of one label are told apart
        runs.manage.rename(folder, "cat")
    views = compare.chosen_runs(["low", "high"])
    assert {name for one in views for name, *_ in compare.losses(one)} == {"cat (low)", "cat (high)"}
    assert 'scope="col">cat (low)</th><th scope="col">cat (high)</th>' in compare.tables(views)


def test_runs_without_anything_can_be_compared(data):
    (write_run(data, "bare") / "run.toml").write_text('name = "bare"\nextra = "none"\n')
    write_run(data, "broken")
    (data / "outputs/broken/run.toml").write_text("= not TOML")
    (data / "outputs/broken/metrics.jsonl").write_bytes(b"\xff\x00{}\n[]\n")
    views = compare.chosen_runs(["bare", "broken"])
    assert compare.samples(views) == [] == [point for one in views for point in compare.losses(one)]
    assert "All settings are the same" in compare.tables(views)


def test_the_time_of_a_run_is_that_of_its_ledger_or_of_an_earlier_version_its_elapsed_time(data):
    folder = write_run(data, "old", state="completed", elapsed_s=125.0)
    assert compare.facts(view.read(folder))["Time"] == duration(125)
    write_history(folder)
    assert compare.facts(view.read(folder))["Time"] == duration(1100)
    assert compare.facts(view.read(write_run(data, "bare")))["Time"] == duration(0)


def test_texts_of_runs_stay_texts_and_their_keys_are_not_compared(data):
    for name in ("one", "two"):  # neither is a valid spec
        with (a_run(data, name, 1e-4, wandb_api_key=f"0123456789{name}") / "run.toml").open("a") as file:
            file.write(f'note = "<img src=x onerror=alert(1)> of {name}"\n[environment]\nWANDB_API_KEY = "hf_{name}"\n')
    shown = compare.tables(compare.chosen_runs(["one", "two"]))
    assert "onerror=alert(1)&gt; of two" in shown and "<img" not in shown and "hf_" not in shown
    assert "0123456789" not in shown + json.dumps([run_status(name)["settings"] for name in ("one", "two")])
