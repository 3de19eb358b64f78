"""The rehearsal: the real trainers on tiny models; what fails in each stage, and that nothing of it is left."""

import os
import time

import pytest
from runs_helpers import contents, picture, spec
from short_run_helpers import launched, nothing_runs, states, tiny_run

import runs
from launch import rehearse
from launch.common import LaunchError
from launch.rehearse import DONE, FAILED, PASSED, SKIPPED
from monitor.process import spawned
from ui.run import run_page


@pytest.mark.slow
def test_a_rehearsal_measures_the_run_and_leaves_nothing(data, one_cpu):
    folder = tiny_run(data, epochs=10, repeats=4, price_per_hour=3.6)
    before = contents(data)
    code, found, said = launched("rehearse", folder)
    assert code == 0, said[-5000:]
    assert found["state"] == PASSED and set(states(found).values()) == {DONE}
    measured, predicted = found["measured"], found["forecast"]
    for key in ("load_s", "cache_s", "step_s", "sample_s", "save_s", "state_bytes", "lora_bytes", "host_bytes"):
        assert measured[key] > 0, key
    assert measured["images"] == 2 and predicted["steps"] == 3 * 4 * 10
    assert predicted["ends_s"] == pytest.approx(time.time() + predicted["seconds"], abs=120)
    assert predicted["cost"] == pytest.approx(predicted["seconds"] / 1000, abs=0.02)
    assert "120 steps take about" in said and "the run ends on" in said
    left = contents(data)
    left.pop(f"outputs/{folder.name}/rehearsal.json")
    left.pop(rehearse.LOCK)
    assert {name: content for name, content in left.items() if not name.startswith("models/")} == before
    assert nothing_runs(data)
    assert rehearse.read(folder).state == PASSED and rehearse.objection(folder, runs.load(folder)) == ""


def test_a_missing_model_is_said_at_once_and_start_asks_once(data, monkeypatch):
    picture(data / "pictures" / "a.png")
    folder = runs.create(spec(name="big", tier="16G"), data / "pictures")
    code, found, said = launched("rehearse", folder, HF_HUB_OFFLINE="1", HF_HOME=str(data / "hf"))
    assert code == 1 and (states(found)["check"], states(found)["load"]) == (FAILED, SKIPPED), said
    assert "flux" in found["problem"]["text"].lower()
    assert "Failed at “Check the settings and files”" in said

    made = runs.load(folder)
    text = rehearse.objection(folder, made)
    assert text.startswith("The rehearsal failed at “Check the settings and files”: ")
    assert rehearse.objection(folder, made.changed(rank=7)) == ""  # other settings were not rehearsed
    started = []
    monkeypatch.setattr("ui.run.actions.start", started.append)
    asked = run_page.start(folder.name, None)
    assert "Press the button again to start anyway" in asked and "Check the settings" in asked and started == []
    run_page.start(folder.name, None)
    assert started == [folder]


def test_the_digest_follows_what_decides_whether_it_trains():
    made = spec(name="a")
    same = [{"name": "b"}, {"epochs": 99}, {"max_train_steps": 7}, {"price_per_hour": 1.0}, {"seed": 1}, {"repeats": 3}]
    other = [{"rank": 3}, {"resolution": 640}, {"batch_size": 4}, {"workers": 3}, {"sample_every_n_steps": 50}]
    assert {rehearse.digest(made.changed(**one)) for one in same} == {rehearse.digest(made)}
    assert rehearse.digest(made) not in {rehearse.digest(made.changed(**one)) for one in other}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": 3}', '{"stages": [{}]}', '{"stages": 5}'])
def test_a_damaged_result_is_a_lost_one(tmp_path, content):
    (tmp_path / "rehearsal.json").write_text(content)
    assert rehearse.read(tmp_path).state == "lost"
    assert rehearse.objection(tmp_path, spec()) == ""


def test_what_a_killed_one_left_goes_with_what_it_started_and_one_runs_at_a_time(data, spawn):
    run = data / rehearse.SCRATCH / "outputs" / rehearse.NAME
    (run / "cache").mkdir(parents=True)
    left = spawn(**{spawned.RUN: str(run), spawned.TOKEN: "0" * 32})
    environment = dict(os.environ)
    with rehearse.scratch() as scratch:
        assert left.wait(10) < 0, "it was killed"
        assert scratch == run and not (run / "cache").exists()
        assert os.environ["HANGPROOF_DATA"] == str(data / rehearse.SCRATCH)
        os.environ["HANGPROOF_DATA"] = str(data)
        with pytest.raises(LaunchError, match="another run is being rehearsed"), rehearse.scratch():
            pass
    assert [path.name for path in data.iterdir()] == [rehearse.LOCK] and dict(os.environ) == environment
