"""What a killed writer leaves, and what a verification says where torch is broken: in processes of their own."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import children
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from guards import checkpoint

WRITER = """
import sys
from pathlib import Path
from guards import checkpoint
folder, step = Path(sys.argv[1]), 0
while True:
    step += 1
    with checkpoint.writing(folder / f"lora-step{step % 3:08d}-state", step=step, epoch=1) as temporary:
        for part in range(4):
            (temporary / f"part{part}.bin").write_bytes(str(step).encode() * 20000)
    print(step, flush=True)
"""


def test_kills_at_any_moment_never_leave_an_incomplete_state_that_verifies(tmp_path):
    """Each state that verifies is complete, at most one step is lost, and a sweep removes what killed writers left."""
    dice = random.Random(7)
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = children.start(WRITER, folder)
        steps = [int(process.stdout.readline()) for _ in range(2)]
        time.sleep(dice.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        steps += [int(line) for line in process.communicate()[0].split("\n") if line]
        newest = checkpoint.newest_valid(folder)
        step = checkpoint.guard_of(newest)["step"]
        assert step in (steps[-1], steps[-1] + 1)
        assert all((newest / f"part{p}.bin").read_bytes() == str(step).encode() * 20000 for p in range(4))
        checkpoint.sweep(folder)
        assert [p for p in folder.iterdir() if p.name.startswith(".")] == []


def verify(state: Path, **environment: str) -> tuple[int, dict]:
    command = [sys.executable, "-m", "guards.checkpoint", "verify", str(state), "--deep", "--json"]
    env = children.environment(**environment)
    done = subprocess.run(command, cwd=children.ROOT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


BROKEN = {
    "no driver": "raise RuntimeError('CUDA driver initialization failed')",
    "no module": "import a_module_that_is_missing",
    "no memory": "def load(*args, **kwargs): raise MemoryError",
    "no memory for a tensor": 'def load(*a, **k): raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory")',
}


@pytest.mark.parametrize("broken", BROKEN)
def test_where_torch_cannot_check_the_optimizer_the_hashes_count(tmp_path, broken):
    state = tmp_path / "lora-step00000010-state"
    with checkpoint.writing(state, step=10, epoch=1) as temporary:
        save_file({"w": np.ones((8, 8), dtype=np.float32)}, temporary / "model.safetensors")
        torch.save({"state": {0: torch.ones(3)}}, temporary / "optimizer.bin")
    (tmp_path / "torch.py").write_text(BROKEN[broken])
    code, answer = verify(state, PYTHONPATH=str(tmp_path))
    assert (code, answer["problems"], answer["error"], answer["usable"], answer["step"]) == (0, [], "", True, 10)
    assert len(answer["unchecked"]) == 1 and answer["unchecked"][0].startswith("optimizer.bin: ")
    if broken == "no module":
        os.truncate(state / "model.safetensors", 30)
        code, answer = verify(state, PYTHONPATH=str(tmp_path))
        assert code == 1 and "truncated" in answer["problems"][0]
