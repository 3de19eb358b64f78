"""Whole runs of the trainer as processes: caches, samples, saves, failures, several processes."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from trainer_helpers import ROOT, environment, flags, fork, good, make_config, make_images, sha

from guards import heartbeat
from guards.heartbeat import Heartbeat
from trainer import setup
from trainer.arguments import parse
from trainer.cache import FOLDER
from trainer.errors import TrainError
from trainer.families.flux import FAMILY
from trainer.samples import Prompt, Sampler
from trainer.setup import build


def test_a_run_encodes_once_and_again_only_what_changed_or_broke(tmp_path):
    """The model's own folder is made by the run; then a restart, then a changed caption, image, and a cut cache file."""
    from PIL import Image

    images = make_images(tmp_path / "images")
    config = make_config(tmp_path / "dataset.toml", images)

    def encoded(number):
        """How many images and texts a start of the run encodes."""
        found = {}
        watch = lambda phase, step, hb: found.update({phase: max(found.get(phase, 0), hb.record.done)})  # noqa: E731
        argv = flags(tmp_path / "models" / "tiny-flux", config, tmp_path / f"out{number}", max_train_steps=2)
        build(parse(argv), Heartbeat(None, inject=watch))
        return found.get("cache_latents", 0), found.get("cache_text", 0)

    assert encoded(1) == (5, 5)
    assert encoded(2) == (0, 0)
    (images / "0.txt").write_text("another caption", encoding="utf-8")
    Image.new("RGB", (64, 64), "red").save(images / "1.png")
    cut = sorted((images / FOLDER).glob("latents-*"))[0]
    cut.write_bytes(cut.read_bytes()[:-30])
    latents, texts = encoded(3)
    assert texts == 1 and latents in (1, 2)  # the cut one may be the changed image's
    assert len(list((images / FOLDER).glob("text-*"))) == 6


def test_a_disk_without_room_for_one_save_is_refused_before_training(work, tmp_path, monkeypatch):
    argv = flags(work["model"], work["config"], tmp_path / "out", optimizer_type="adafactor")
    usage = setup.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    message = r"--output_dir .*out: 0 MB are free, but one save of this LoRA needs \d+ MB; free"
    with pytest.raises(TrainError, match=message):
        build(parse(argv), Heartbeat(None))


def test_a_cache_that_cannot_be_written_names_its_file(work, tmp_path):
    images = make_images(tmp_path / "images", 1)
    (images / FOLDER).write_text("in the way", encoding="utf-8")
    argv = flags(work["model"], make_config(tmp_path / "dataset.toml", images), tmp_path / "out")
    with pytest.raises(OSError, match="exists") as error:
        build(parse(argv), Heartbeat(None))
    assert error.value.filename.startswith(str(images / FOLDER / "latents-"))


def test_a_truncated_image_is_named_with_what_to_do(work, tmp_path):
    images = make_images(tmp_path / "images", 2)
    file = images / "1.png"
    file.write_bytes(file.read_bytes()[:-2000])
    argv = flags(work["model"], make_config(tmp_path / "dataset.toml", images), tmp_path / "out")
    message = r"1\.png: the image cannot be read: .*; export it again as JPEG or PNG, or remove it"
    with pytest.raises(TrainError, match=message):
        build(parse(argv), Heartbeat(None))


def test_a_damaged_cache_file_is_an_error_with_its_name_and_the_next_start_encodes_it_again(work, tmp_path):
    images = make_images(tmp_path / "images", 1)
    config = make_config(tmp_path / "dataset.toml", images)
    argv = flags(work["model"], config, tmp_path / "out", max_data_loader_n_workers=1)
    long_folder = tmp_path / ("x" * 120)  # too long for the sockets of a loader's worker
    long_folder.mkdir()
    assert f"warning: TMPDIR ({long_folder}) is too long" in good(fork(argv, TMPDIR=str(long_folder))).stdout
    original = sha(tmp_path / "out" / "tiny.safetensors")
    text = next((images / FOLDER).glob("text-*"))
    data = bytearray(text.read_bytes())
    data[len(data) // 3] ^= 0xFF
    text.write_bytes(data)
    done = fork(argv)
    assert done.returncode == 1 and f"{text} is damaged" in done.stderr
    assert not text.exists() and text.with_name(text.name + ".corrupt").exists()
    assert "caching Text Encoder outputs" in good(fork(argv)).stdout
    assert sha(tmp_path / "out" / "tiny.safetensors") == original


ADAFACTOR = {"optimizer_type": "adafactor", "lr_scheduler": "constant_with_warmup", "max_grad_norm": 0.0}
ADAFACTOR["optimizer_args"] = ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
OF_THE_TIER = """
--max_train_epochs 3 --fp8_base --gradient_checkpointing --split_mode --network_args train_blocks=single --save_precision bf16
--save_state --save_every_n_steps 4 --save_last_n_steps 4 --save_every_n_epochs 1 --save_last_n_epochs 1
--sample_every_n_epochs 2 --sample_at_first --console_log_simple
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
    made = sorted(p.name for p in (output / "sample").iterdir())
    assert len(made) == 2 and made[0].startswith("tiny_e000000_00_") and made[1].startswith("tiny_e000002_00_")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 31)) and {row["attempt"] for row in rows} == {2}
    (beat,) = heartbeat.read_all(beats)
    assert (beat.step, beat.planned, beat.epoch, beat.outcome, beat.phase) == (30, 30, 3, "done", "end")


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


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of files")
def test_a_disk_without_space_is_an_error_with_the_file_and_leaves_valid_states(work, tmp_path):
    """A limit on the size of a file stands in for the full disk: the weights are below it, the optimizer state is not."""
    saves = {"max_train_steps": 4, "save_every_n_steps": 2, "save_state": True}
    argv = flags(work["model"], work["config"], tmp_path / "out", **saves)
    fault = {"HANGPROOF_INJECT": "trainer_helpers:fault", "TEST_FAULT": "fsize@300000"}
    done = fork(argv, HANGPROOF_HEARTBEAT=str(tmp_path / "beats"), **fault)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: " in done.stderr and "larger than this file system or user may write" in done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["tiny-step00000002.safetensors"]


def test_a_damaged_vae_costs_the_samples_and_not_the_training(work, tmp_path):
    """It is read again for the first sample of each attempt, long after the images were encoded."""
    import torch

    model = Path(shutil.copytree(work["model"], tmp_path / "model"))
    file = next((model / "vae").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:1000])
    transformer, messages = torch.nn.Linear(1, 1), []
    transformer.gradient_checkpointing = True
    args = SimpleNamespace(output_dir=tmp_path / "out", output_name="tiny")
    device, dtypes = torch.device("cpu"), (torch.float32, torch.float32)
    sampler = Sampler([Prompt(0, "a thing", 1)], None, model, FAMILY, args, device, dtypes, messages.append)
    assert sampler.make(transformer, None, 2, 0.1, Heartbeat.from_env(0), nullcontext, lambda: None) == []
    assert "sample image 1 is skipped: TrainError" in messages[-1] and "download it again" in messages[-1]
    assert transformer.training and transformer.gradient_checkpointing
