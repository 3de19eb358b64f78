"""The comparison of two versions of a trainer finds none in a copy, and names what differs in one that was changed."""

import shutil
from pathlib import Path

import canary
import pytest
import tiny_musubi
import tiny_sd_scripts as tiny

LORA = {tiny: "networks/lora_flux.py", tiny_musubi: "src/musubi_tuner/networks/lora.py"}
SCALED = """
_init = LoRAModule.__init__
def _other(self, *a, **k):
    _init(self, *a, **k)
    self.scale *= 30
LoRAModule.__init__ = _other
"""


def named(here, folder: Path | None = None) -> str:
    """A checkout with the trainer's environment, as the command line names it."""
    return f"{folder or here.checkout()}@{here.python().parent.parent}"


def copied(here, tmp_path: Path) -> Path:
    """A copy of a checkout; skips where there is none."""
    if reason := here.why_not():
        pytest.skip(reason)
    return Path(shutil.copytree(here.checkout(), tmp_path / "copy", ignore=shutil.ignore_patterns(".git")))


def test_an_update_that_learns_otherwise_is_found_and_a_copy_trains_the_same(tmp_path, capsys):
    copy = copied(tiny, tmp_path)
    assert canary.main([named(tiny), named(tiny, copy), "--tolerance", "0"]) == 0
    assert "NEW trains as OLD" in capsys.readouterr().out
    file = copy / LORA[tiny]
    file.write_text(file.read_text(encoding="utf-8") + SCALED, encoding="utf-8")
    assert canary.main([named(tiny), named(tiny, copy)]) == 1
    assert "the losses differ from step 2 on, by up to " in capsys.readouterr().out


def test_musubi_tuner_is_compared_too(tmp_path, capsys):
    copy = copied(tiny_musubi, tmp_path)
    file = copy / LORA[tiny_musubi]
    file.write_text(file.read_text(encoding="utf-8") + "\nraise RuntimeError('broken update')\n", encoding="utf-8")
    assert canary.main([named(tiny_musubi), named(tiny_musubi, copy)]) == 1
    assert f"{copy}: zimage_train_network.py exited with code 1: RuntimeError" in capsys.readouterr().out
