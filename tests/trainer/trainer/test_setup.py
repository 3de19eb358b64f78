"""What is refused before the first step."""

import pytest
from trainer_helpers import flags

from guards.heartbeat import Heartbeat
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
