"""Whole runs of the trainer as processes: saves, samples and metrics, masks, and a loss that is no number."""

import re
import subprocess
import sys

from mask_helpers import EPOCHS, NO_LEARNING, check, mask_images
from safetensors import safe_open
from trainer_helpers import ROOT, environment, flags, fork, good, make_config, make_images, metrics, trained

from guards import heartbeat

ADAFACTOR = {"optimizer_type": "adafactor", "lr_scheduler": "constant_with_warmup", "max_grad_norm": 0.0}
ADAFACTOR["optimizer_args"] = ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
OF_THE_TIER = """
--max_train_epochs 3 --fp8_base --gradient_checkpointing --split_mode --network_args train_blocks=single
--save_precision bf16 --save_state --save_every_n_steps 4 --save_last_n_steps 4
--save_every_n_epochs 1 --save_last_n_epochs 1 --sample_every_n_epochs 2 --sample_every_n_steps 4 --sample_at_first
--console_log_simple
"""


def test_a_launched_run_saves_samples_and_metrics_as_it_should(work, tmp_path):
    """Through `accelerate launch`, with the settings of the 12G tier, in bf16 and float8."""
    output = tmp_path / "out"
    (tmp_path / "prompts.txt").write_text("a thing --w 64 --h 64 --s 2 --d 5\n", encoding="utf-8")
    argv = flags(work["model"], work["config"], output, max_train_steps=None, mixed_precision="bf16", **ADAFACTOR)
    argv += ["--sample_prompts", str(tmp_path / "prompts.txt"), *OF_THE_TIER.split()]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    launcher += ["--num_machines", "1", "--mixed_precision", "bf16", "--dynamo_backend", "no", "-m", "trainer"]
    run, beats = tmp_path / "run", tmp_path / "beats"
    run.mkdir()
    watched = environment(HANGPROOF_RUN=str(run), HANGPROOF_ATTEMPT="2", HANGPROOF_HEARTBEAT=str(beats))
    done = subprocess.run([*launcher, *argv], env=watched, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("epoch")] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert f"saving checkpoint: {output / 'tiny-000002.safetensors'}" in lines and lines[-1] == "model saved."
    assert re.search(r"steps: 100%\|.*\| 30/30 \[.*avr_loss=\d", done.stderr)
    kept = {p.name for p in output.iterdir() if "cache" not in p.name}
    saved = ("tiny", "tiny-000002", "tiny-step00000024", "tiny-step00000028")
    assert kept == {"sample", *(f"{name}{end}" for name in saved for end in ("-state", ".safetensors"))}
    made = sorted(p.name for p in (output / "sample").iterdir())  # where epochs are given, steps do not count
    assert len(made) == 2 and made[0].startswith("tiny_e000000_00_") and made[1].startswith("tiny_e000002_00_")
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 31)) and {row["attempt"] for row in rows} == {2}
    (beat,) = heartbeat.read_all(beats)
    assert (beat.step, beat.planned, beat.epoch, beat.outcome, beat.phase) == (30, 30, 3, "done", "end")
    with safe_open(output / "tiny.safetensors", "pt") as lora:
        about = lora.metadata()
    assert (about["ss_network_dim"], about["ss_steps"], about["ss_epoch"]) == ("4", "30", "3")
    assert all(beat.reached), "every check point by its name, as kohya's trainers in tests/upstream"


def test_a_learning_rate_that_adafactor_finds_is_not_reported_as_the_users(work, tmp_path):
    argv = flags(work["model"], work["config"], tmp_path, optimizer_type="adafactor", max_train_steps=1)
    done = good(fork(argv, HANGPROOF_RUN=str(tmp_path)))
    assert "add --optimizer_args relative_step=False to use --learning_rate" in done.stdout
    assert [row["lr"] for row in metrics(tmp_path)] == [None]


def test_a_loss_that_is_no_number_ends_the_run_names_its_images_and_nothing_of_it_is_saved(work, tmp_path):
    argv = flags(work["model"], work["config"], tmp_path, learning_rate=1e30, max_train_steps=9, save_every_n_steps=3)
    done = fork(argv, HANGPROOF_HEARTBEAT=str(tmp_path / "beats"))
    assert done.returncode == 1
    said = r"^error: the loss of step 2 is (nan|inf): training stops here, and this step is not saved"
    assert re.search(said + r".*; its images are \d\.png(, \d\.png)*; lower --learning_rate", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.safetensors"))
    (beat,) = heartbeat.read_all(tmp_path / "beats")
    assert beat.outcome == "failed" and beat.note.startswith("the loss of step 2")


def test_the_built_in_trainer_leaves_the_ignored_part_out_of_its_loss(work, tmp_path):
    """A learning rate that changes no weight makes the losses of two runs comparable step by step: below a black mask
    the loss is exactly 0, with a white one it is that of the image without a mask, with half a mask that of the other
    half."""
    images = make_images(tmp_path / "images")
    plain, config, three = (tmp_path / f"{name}.toml" for name in ("plain", "masked", "three"))
    for path, size in ((plain, 1), (config, 1), (three, 3)):
        make_config(path, images, repeats=1, batch_size=size)
        path.write_text(path.read_text() + ("" if path == plain else "alpha_mask = true\n"))
    settings = {"max_train_steps": None, "max_train_epochs": EPOCHS, "learning_rate": NO_LEARNING}

    def losses(config, name: str) -> list[float]:
        return [row["loss"] for row in metrics(trained(work, name, config=config, **settings))]

    whole = losses(plain, "whole")
    mask_images(images)
    masked = losses(config, "masked")
    check(whole, masked, 5)
    cached = {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")}
    assert losses(config, "again") == masked  # from the cache, which has the masks
    assert {path: path.stat().st_mtime_ns for path in images.glob(".hangproof-cache/latents-*")} == cached
    # The third image is a batch of its own, the first is in one with two that are trained.
    assert losses(three, "three").count(0) == EPOCHS
