"""The script of a run with two processes, as a person starts it: the real launcher and trainer; no GPU is visible.

python -m pytest tests/campaigns/test_world_script.py          20 seconds
"""

from runs_helpers import pictures, run_script, spec

import runs


def test_the_script_trains_with_two_processes_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    sizes = {"resolution": 64, "max_train_steps": 2, "mixed_precision": "no", "sample_every_n_steps": 0}
    folder = runs.create(spec(model="tiny-flux", gpus=2, **sizes), pictures(tmp_path / "images"))
    done = run_script(folder / "train.sh", None, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    output = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, output[-3000:]
    assert "PyTorch finds no GPU here: 2 processes train together on processors (gloo)" in output
    assert output.count("model saved.") == 1 and (folder / "my-lora.safetensors").is_file()
