"""A slow run is changed once where that is allowed, and the change is taken back where it does not help.

python -m pytest tests/campaigns/test_slowdown.py          1 minute
"""

import json
import subprocess

from monitor_helpers import ROOT, environment, events
from run_facts import status

import runs
from benchmarks import toy_loop
from benchmarks.trial import ours

SPILL = {"used_gib": 23.8, "utilization": 100, "power_w": 55, "limit_w": 320}  # of 24 GiB


def test_one_change_is_made_where_it_is_allowed_and_taken_back_where_it_does_not_help(tmp_path):
    job = ours(tmp_path, steps=180, every=40, limits="[slow]\nwindow_s = 4\nchanges_count = 1\n")
    batch = (job.folder / "run.toml").read_text().replace("batch_size = 1", "batch_size = 2")
    (job.folder / "run.toml").write_text(batch if "batch_size = 2" in batch else f"batch_size = 2\n{batch}")
    runs.render(job.folder)
    values = tmp_path / "gpu.json"
    values.write_text(json.dumps(SPILL))
    # Steps of its first two attempts are slow.
    slow = {"HANGPROOF_INJECT": "benchmarks.injector:fire", "HANGPROOF_SLOW": f"70:0.9:{job.folder}/train.attempt-3.sh"}
    env = environment(job.folder, TOY_LEDGER=str(tmp_path / "ledger"), TOY_STEP_S="0.1", **job.environment)
    env |= slow | {"PYTHONPATH": str(ROOT / "tests/support/shims/nvml")}
    env |= {"HANGPROOF_GPUS": "0", "HANGPROOF_NEEDS_GPU": "0"}
    env |= {"FAULTS_NVML_VALUES": str(values), "FAULTS_NVML_WSL": "1"}
    done = subprocess.run(job.command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert events(job.folder, "slowdown")[0]["cause"] == "vram_spill"
    assert len(events(job.folder, "mitigated")) == 1, "once"
    assert len(events(job.folder, "reverted")) == 1 and not status(job.folder)["changes"]
    assert status(job.folder)["attempt"] == 3 and status(job.folder)["restarts"] == 0
    assert not events(job.folder, "hang") and not events(job.folder, "crash")
    assert (job.folder / "toy.safetensors").read_bytes() == toy_loop.expected(180)
