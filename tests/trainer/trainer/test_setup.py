"""What is refused before the first step, and the workers of the loader."""

from argparse import Namespace

import pytest
from trainer_helpers import flags

from guards.heartbeat import Heartbeat
from guards.loader import die_with_parent
from trainer import setup
from trainer.arguments import parse
from trainer.errors import TrainError


def test_a_disk_without_room_for_one_save_is_refused_before_training(work, tmp_path, monkeypatch):
    argv = flags(work["model"], work["config"], tmp_path / "out", optimizer_type="adafactor")
    usage = setup.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    message = r"--output_dir .*out: 0 MB are free, but one save of this LoRA needs \d+ MB; free"
    with pytest.raises(TrainError, match=message):
        setup.build(parse(argv), Heartbeat(None))


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"a text", "deserializing header")])
def test_a_lora_to_begin_with_that_cannot_be_read_is_named_before_the_model_is_loaded(tmp_path, content, why):
    lora = tmp_path / "lora.safetensors"
    if content:
        lora.write_bytes(content)
    argv = flags(tmp_path / "no model", tmp_path / "no.toml", tmp_path / "out", network_weights=lora)
    with pytest.raises(TrainError, match=f"--network_weights .*lora.safetensors: cannot be read: .*{why}"):
        setup.build(parse(argv), Heartbeat(None))


def test_the_loaders_workers_do_not_outlive_the_trainer():
    """What that does to a worker: tests/process/guards/test_crash.py."""
    args = Namespace(max_data_loader_n_workers=1, persistent_data_loader_workers=False)
    loader = setup.make_loader(args, [((0, 0),), ((1, 0),)], Namespace(latents=[], texts=[]), Namespace(type="cpu"))
    assert loader.worker_init_fn is die_with_parent
