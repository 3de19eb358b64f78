"""Start asks once about what a person may have overlooked."""

import json
from pathlib import Path

import pytest
from draft_helpers import add_photos

from launch import rehearse
from ui.new import new_lora, run_starts, script_editor, settings

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_start_asks_once_about_images_that_nothing_describes_and_about_a_failed_rehearsal(mine, tmp_path, monkeypatch):
    begun: list[Path] = []
    monkeypatch.setattr("ui.run.control.start", begun.append)

    def start() -> tuple[str, str]:
        *_, (problem, name, _) = new_lora.start(mine, {})
        return problem, name

    add_photos(mine, tmp_path, 2)
    settings.save(mine, {"name": "bare", "model": "tiny-flux"}, typed=True)
    assert "2 of 2 images have no caption" in new_lora.review(mine)[0], "the plan says so before"
    problem, name = start()
    assert (
        "2 of 2 images have no caption" in problem and "again to start anyway" in problem and (name, begun) == ("", [])
    )

    spec = script_editor.for_run(mine, run_starts.checked(mine)[0])
    stages = [{"key": "load", "title": "Load", "state": rehearse.FAILED}]
    failed = {
        "state": rehearse.FAILED,
        "digest": rehearse.digest(spec),
        "stages": stages,
        "asked": True,
    }  # of old versions
    failed |= {"problem": {"stage": "Load", "title": "No memory."}}
    rehearsed = run_starts.rehearsal_folder(mine)
    rehearsed.mkdir()
    (rehearsed / rehearse.FILE).write_text(json.dumps(failed))
    problem, name = start()
    assert (
        "have no caption" in problem and "failed at “Load”: No memory. Press" in problem and (name, begun) == ("", [])
    )
    assert start() == ("", "bare") and [one.name for one in begun] == ["bare"]

    settings.save(mine, {"name": "described", "trigger": "tok"}, typed=True)
    (rehearsed / rehearse.FILE).unlink()
    assert start() == ("", "described")
