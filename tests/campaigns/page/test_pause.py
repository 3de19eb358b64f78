"""A run that is sampled, paused and resumed from two browsers and logged to trackio, while the page's server is killed three times.

TRACKIO_VENV names an environment with trackio; without one, a module of the same name stands in for it, which writes a file.
"""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file
from two_browsers import open_run, status, trained_steps, two_browsers
from ui_helpers import PACED, PROJECT, kill_runs, photos, serving
from ui_page import RUN_S, reaches, state_is, until

import runs

STEPS = 20
STAND_IN = """
import json, os
class Run:
    def log(self, values, step):
        with open(os.environ["LOGGED"], "a") as file:
            file.write(json.dumps([step, values["loss"]]) + "\\n")
    def finish(self):
        pass
def init(**known):
    return Run()
"""


def create(name: str, **fields) -> Path:
    """A run of the tiny model."""
    known = {"model": "tiny-flux", "backend": "diffusers", "trigger": "tok", "prompts": ["a cup"], "sample_steps": 1}
    length = {"max_train_steps": STEPS, "save_every_n_steps": 100, "sample_every_n_steps": 100}
    return runs.create(runs.make({"name": name, **known, **length, "workers": 0, **fields}), photos("coffee.png"))


def tracker(folder: Path) -> tuple[dict[str, str], Callable[[], list[int]]]:
    """(the environment with trackio or its stand-in, a function that returns the steps that it has in their order)."""
    if venv := os.environ.get("TRACKIO_VENV"):
        database = folder / "trackio" / "hangproof.db"

        def stored() -> list[int]:
            with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
                return [row[0] for row in connection.execute("SELECT step FROM metrics ORDER BY id")]

        modules = next(Path(venv).glob("lib/python*/site-packages"))
        return {"PYTHONPATH": str(modules), "TRACKIO_DIR": str(folder / "trackio")}, stored
    (folder / "modules").mkdir()
    (folder / "modules" / "trackio.py").write_text(STAND_IN)
    file = folder / "logged"
    return (
        {"PYTHONPATH": str(folder / "modules"), "LOGGED": str(file)},
        lambda: [json.loads(line)[0] for line in file.read_text().splitlines()],
    )


def lora(folder: Path) -> dict[str, numpy.ndarray]:
    """The tensors of a run's LoRA."""
    return load_file(folder / f"{folder.name}.safetensors")


def sampled_at(page) -> int:
    """The step of the sample that the page shows."""
    page.locator("#samples-fold button.label-wrap").first.click()
    shown = page.locator("#samples-gallery img").first
    shown.wait_for(timeout=RUN_S * 1000)
    return int(shown.get_attribute("alt").partition(" · ")[0].removeprefix("Step "))


@pytest.mark.timeout(1800)
def test_a_run_is_sampled_paused_and_resumed_in_two_browsers_while_the_server_is_killed(browser, tmp_path, monkeypatch):
    data = tmp_path / "data"
    monkeypatch.setenv("HANGPROOF_DATA", str(data))
    cat, twin = create("cat", trackers="trackio"), create("twin")
    modules, logged = tracker(tmp_path)
    env = {**PACED, "HANGPROOF_PACE_S": "1.5", **modules}
    try:
        with two_browsers(browser) as (first, second):
            with serving(data, **env) as server:
                open_run(server, "cat", first, second)
                first.locator("#go").click()
                for page in (first, second):
                    state_is(page, "running")
                    reaches(page, 2)
                second.get_by_test_id("do-sample").click()
                second.get_by_test_id("action-note").get_by_text("requested").wait_for()
                server.stop(hard=True)  # while the sample is awaited

            with serving(data, port=server.port, **env) as server:
                assert sampled_at(first) == sampled_at(second) >= 2, "each browser shows the sample, without a reload"
                first.get_by_test_id("do-pause").click()
                server.stop(hard=True)  # during the pause
            until(lambda: status(cat)["state"] == "paused", "the pause, without the page", RUN_S)
            paused_at = status(cat)["step"]
            assert 2 <= paused_at < STEPS and trained_steps(cat) == list(range(1, paused_at + 1))

            with serving(data, port=server.port, **env) as server:
                for page in (first, second):
                    state_is(page, "paused")
                    page.locator("#go", has_text="Resume").wait_for()
                second.locator("#go").click()  # not the browser that paused it
                for page in (first, second):
                    state_is(page, "running")
                    reaches(page, paused_at + 1)
                server.stop(hard=True)  # while it trains again

            with serving(data, port=server.port, **env):
                for page in (first, second):
                    state_is(page, "completed")
                    page.get_by_role("link", name="cat.safetensors").first.wait_for()
        assert trained_steps(cat) == list(range(1, STEPS + 1)), "no step is lost, and none is trained twice"
        until(lambda: logged() == list(range(1, STEPS + 1)), "trackio has each step once")
        command = [sys.executable, "-m", "monitor", "run", str(twin)]
        assert subprocess.run(command, cwd=PROJECT, timeout=RUN_S, check=False).returncode == 0
        undisturbed = lora(twin)
        assert all(numpy.array_equal(undisturbed[name], values) for name, values in lora(cat).items())
    finally:
        kill_runs(data)
