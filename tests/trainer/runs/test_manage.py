"""A completed run that is started again: nothing is trained twice, and more epochs continue from its end."""

import json

from runs_helpers import contents, pictures, python
from trainer_helpers import metrics, numbers

SET = ("epochs=2", "repeats=2", "workers=0", "save_every_n_steps=3")
LIMIT_S = 400


def steps(folder) -> list[tuple[int, int]]:
    """(step, epoch) in the order they were trained."""
    return [(line["step"], line["epoch"]) for line in metrics(folder)]


def test_a_completed_run_started_again(data, tmp_path):
    given = [word for setting in SET for word in ("--set", setting)]
    made = python(
        *("-m", "runs", "new", "--name", "again", "--images", str(pictures(tmp_path / "in", 2)), "--trigger", "tok"),
        *("--model", "tiny-flux", "--tier", "16G", "--backend", "diffusers", *given),
    )
    folder = data / "outputs" / "again"
    assert made.returncode == 0, made.stderr

    def monitor(*words: str):
        done = python("-m", "monitor", *words, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    monitor("run", "again")
    expected = [(step, 1 + (step - 1) // 4) for step in range(1, 9)]
    assert steps(folder) == expected
    before, lora = contents(folder), numbers(folder / "again.safetensors")
    for command in ("start", "run"):
        printed = monitor(command, "again").stdout
        assert "already completed (8 steps)" in printed and "raise epochs" in printed
    assert json.loads(monitor("start", "again", "--json").stdout.splitlines()[-1])["pid"] is None
    assert contents(folder) == before  # not a byte of it was touched

    spec = folder / "run.toml"
    spec.write_text(spec.read_text().replace("epochs = 2", "epochs = 3"))
    assert python("-m", "runs", "render", "again").returncode == 0  # an edit counts from here on
    monitor("run", "again")
    assert steps(folder) == [*expected, *((step, 3) for step in range(9, 13))]
    assert numbers(folder / "again.safetensors") != lora
    assert json.loads((folder / "status.json").read_text())["state"] == "completed"
