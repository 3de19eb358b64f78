"""A script of one process starts the trainer without `accelerate launch`, and trains the same LoRA, byte for byte."""

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

from runs_helpers import pictures

import runs

LAUNCHER = (
    "launch --mixed_precision no --num_processes 1 --num_machines 1 --dynamo_backend no --num_cpu_threads_per_process 1"
)


def test_the_lora_is_the_one_that_the_launcher_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path))
    fields = {"name": "one", "trigger": "t", "model": "tiny-flux", "backend": "diffusers", "mixed_precision": "no"}
    fields |= {"max_train_steps": 4, "save_every_n_steps": 2, "sample_every_n_steps": 0, "resolution": 64, "workers": 0}
    folder = runs.create(runs.make(fields), pictures(tmp_path / "photos"))

    def trained(script: str) -> str:
        (folder / "train.sh").write_text(script)
        env = {k: v for k, v in os.environ.items() if k not in ("ACCELERATE", "TRAINER_PYTHON")}
        env |= {"CUDA_VISIBLE_DEVICES": "", "TRAINER_PYTHON": sys.executable}
        done = subprocess.run(
            ["bash", str(folder / "train.sh")], env=env, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lora = folder / "one.safetensors"
        found = hashlib.sha256(lora.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors"):
            path.unlink()
        return found

    direct = (folder / "train.sh").read_text()
    accelerate = shlex.quote(str(Path(sys.executable).with_name("accelerate")))
    launched = direct.replace('exec "$python" -m', f"exec {accelerate} {LAUNCHER} -m")
    for name in ("OMP_NUM_THREADS", *(f"ACCELERATE_{rest}" for rest in ("USE_CPU", "DYNAMO", "MIXED"))):
        launched = "".join(f"unset {name}\n" if f"export {name}" in line else line
                           for line in launched.splitlines(keepends=True))  # fmt: skip
    assert launched != direct
    assert trained(direct) == trained(launched)
