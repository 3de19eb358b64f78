"""`./start.sh doctor` says what is ready, what is not, and what to do; each of kohya's trainers is started."""

import json

import pytest
from runs_helpers import call

from doctor import NOTE, left_over
from monitor.process import spawned


def doctor(*flags: str, **environment: str) -> tuple[int, dict[str, dict], str]:
    """Its exit code, its findings by name, and its errors."""
    done = call("doctor", "--json", *flags, **environment)
    result = json.loads(done.stdout)
    assert result["ok"] == (done.returncode == 0)
    return done.returncode, {one["name"]: one for one in result["findings"]}, done.stderr


def test_a_trainer_that_no_monitor_watches_is_a_line_with_what_to_do(data, spawn):
    run = data / "outputs" / "gone"
    process = spawn(**{spawned.RUN: str(run), spawned.TOKEN: "0" * 32})
    (found,) = [one for one in left_over() if f"(sleep {process.pid})" in one.text]
    assert found.status == NOTE and f"python -m monitor stop {run}`" in found.text


@pytest.mark.slow
def test_a_folder_that_is_no_trainer_does_not_start(tmp_path):
    for name in ("my s", "v/bin"):
        (tmp_path / name).mkdir(parents=True)
    folders = {"SD_SCRIPTS_DIR": "my s", "SD_SCRIPTS_VENV": "v", "MUSUBI_DIR": "no"}
    settings = {name: str(tmp_path / folder) for name, folder in folders.items()}
    code, found, _ = doctor(**settings)
    assert [found[name]["status"] for name in ("Python", "musubi-tuner")] == ["ok", "note"]
    assert code == 1 and found["sd-scripts start"]["status"] == "failed"
    assert found["sd-scripts guards"]["action"].endswith(f" check '{tmp_path / 'my s'}'")
    assert "flux_train_network.py cannot be started with " in found["sd-scripts start"]["text"]
    again = f"Delete {tmp_path / 'v'} and run ./start.sh sd-scripts."  # a start alone installs nothing again
    assert [found[f"sd-scripts {what}"]["action"] for what in ("Python", "start")] == [again, again]
