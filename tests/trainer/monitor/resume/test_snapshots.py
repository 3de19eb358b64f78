"""The built-in trainer goes on from a snapshot in memory as if nothing had happened: the same losses, the same LoRA."""

import random
from pathlib import Path

import pytest
from trainer_helpers import good, metrics, sha, train

from guards import checkpoint
from monitor.resume.checkpoints import memory_summary

COMMON = {"max_train_steps": 16, "save_every_n_steps": 8, "lr_scheduler": "cosine", "lr_warmup_steps": 4}
COMMON |= {"network_dropout": 0.1, "optimizer_type": "adamw8bit", "optimizer_args": ["min_8bit_size=16"]}
pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")


def attempt(work, name, number, ring=None, fault=""):
    """One attempt, and the step of the snapshot that it goes on from."""
    found = next(iter(checkpoint.guards(ring).values()), None) if ring else None
    _, done = train(work, name, fault, ring=ring, env={"HANGPROOF_ATTEMPT": str(number)}, **COMMON)
    return done, found["step"] if found else 0


def losses(folder):
    """(attempt, step, loss) of every step that was trained."""
    return [(line["attempt"], line["step"], line["loss"]) for line in metrics(folder)]


def test_kills_at_random_change_no_digit(work, ring):
    good(attempt(work, "plain", 1)[0])
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    print(f"moments drawn with seed {seed}")
    kills = [f"kill@{at + draw.randrange(3)}+{draw.random() * 0.05:.4f}" for at in (3, 11)]
    kills.append(f"save@8+{1 + draw.randrange(5)}")
    resumed = []
    for number, fault in enumerate(sorted(kills, key=lambda text: int(text[5:].split("+")[0])), 1):
        done, step = attempt(work, "killed", number, ring, fault)
        assert done.returncode == -9, done.stderr[-2000:]
        assert not any(checkpoint.problems(state, deep=True) for state in checkpoint.states(work["folder"] / "killed"))
        resumed.append(step)
    done, last = attempt(work, "killed", 9, ring)
    good(done)
    expected = {step: loss for _, step, loss in losses(work["folder"] / "plain")}
    trained = losses(work["folder"] / "killed")
    assert [entry for entry in trained if expected[entry[1]] != entry[2]] == []
    assert {step for _, step, _ in trained} == set(expected)
    assert resumed == sorted(resumed) and last > max(1, resumed[1]), "attempts went on from later records"
    for name in ("tiny.safetensors", "tiny-state/model.safetensors", "tiny-state/optimizer.bin"):
        assert sha(work["folder"] / "killed" / name) == sha(work["folder"] / "plain" / name), name
    assert memory_summary(str(ring))["off"] == "" and memory_summary(str(ring))["step"] >= last
