"""A run's folder that can be compared with others: settings, losses, a GPU's samples, images."""

import json

from PIL import Image
from ui_helpers import write_run


def a_run(data, name: str, rate: float, rank: int = 8, losses: int = 60, **extra):
    """A run with settings, losses, a GPU's samples and one image."""
    status = {"planned_steps": losses, "step": losses, "loss": rate * 100, "restarts": 1, "step_s": 0.5}
    folder = write_run(data, name, state="completed", **status)
    lines = [f"name = {json.dumps(name)}", f"learning_rate = {rate}", f"rank = {rank}", 'model = "tiny"', "[extra]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in extra.items()]
    (folder / "run.toml").write_text("\n".join(lines) + "\n")
    step = {"kind": "step", "attempt": 1, "lr": rate, "step_s": 0.5}
    gpu = {"kind": "gpu", "t": "2026-11-22T12:00:05Z", "gpu": 0, "memory_total": 24e9}
    found = [{**gpu, "memory_used": used} for used in (7e9, rank * 1e9)]
    for n in range(1, losses + 1):
        found.append({**step, "t": f"2026-11-22T12:00:{n % 60:02d}.000Z", "step": n, "loss": rate * 100 / n})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    (folder / "sample_prompts.txt").write_text("a cat --w 64\n")
    (folder / "sample").mkdir()
    for step in (20, losses):
        path = folder / "sample" / f"{folder.name}_{step:06d}_00_20261122120000.png"
        Image.new("RGB", (32, 32), (rank, step, 9)).save(path)
    return folder
