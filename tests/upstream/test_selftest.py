"""The self-test answers truly: it passes on a good installation and names what is broken in a bad one; nothing is left."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import tiny_musubi
import tiny_sd_scripts as tiny

from sd_scripts_patches.tiny import Installation

ROWS = ("environment", "versions", "GPU", "guards", "train", "LoRA", "hang", "resume")
MUSUBI_ROWS = (*ROWS[:4], "caches", *ROWS[4:])


def started(folder: Path, temporary: Path, *flags: str) -> subprocess.Popen:
    """The self-test of a checkout, whose temporary folder is in `temporary`."""
    trainer = Installation(folder, Path(sys.executable)).trainer
    python = tiny_musubi.python() if trainer.key == "musubi" else tiny.python()
    installed = Installation(folder, python)
    lacks = ["--without-torchvision"] if any(map(installed.lacks, installed.row.STAND_INS)) else []
    environment = {**os.environ, trainer.venv_variable: str(python.parent.parent), "TMPDIR": str(temporary)}
    return subprocess.Popen(
        [sys.executable, "-m", "sd_scripts_patches", "selftest", str(folder), *lacks, *flags],
        cwd=tiny.ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finished(folder: Path, *flags: str) -> tuple[int, dict[str, dict]]:
    """Its exit code and its checks by name. Its temporary folder has a short path, which sockets need, and stays empty."""
    with tempfile.TemporaryDirectory(prefix="hps-") as temporary:
        with started(folder, Path(temporary), "--json", *flags) as process:
            out, err = process.communicate(timeout=1000)
        assert out.count("\n") == 1, err
        result = json.loads(out)
        assert result["ok"] == (process.returncode == 0) and result["checkout"] == str(folder.resolve())
        assert left_behind(Path(temporary)) == []
    return process.returncode, {check["name"]: check for check in result["checks"]}


def left_behind(temporary: Path) -> list[str]:
    """The files in the temporary folder, and the processes that use it."""
    found = [str(path) for path in temporary.rglob("*")]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(temporary) in " ".join((*process.environ().values(), *process.cmdline())):
                found.append(f"pid {process.pid} ({process.status()})")
    return found


@pytest.fixture
def copy(newest, tmp_path) -> Path:
    """A copy of the checkout's code, for a test to damage."""
    return Path(
        shutil.copytree(tiny.checkout(), tmp_path / "copy", ignore=shutil.ignore_patterns(".git", "*.safetensors"))
    )


def files(checkout: Path) -> set[Path]:
    """The files of a checkout, without what Python compiles for another test that runs meanwhile."""
    return {path for path in checkout.rglob("*") if "__pycache__" not in path.parts}


def test_a_good_installation_passes_and_is_not_touched(newest):
    before = files(tiny.checkout())
    code, checks = finished(tiny.checkout())
    assert code == 0, checks
    assert tuple(checks) == ROWS
    for name in ("train", "LoRA", "hang", "resume"):
        assert checks[name]["status"] == "ok" and not checks[name]["action"]
    assert "waited 10 s for batch 4 of the data loader from worker 0" in checks["hang"]["text"]
    assert "all 12 losses equal digit for digit" in checks["resume"]["text"]
    assert re.search(r"torch \d.*accelerate \d.*transformers \d", checks["versions"]["text"])
    assert files(tiny.checkout()) == before


def test_a_good_installation_of_musubi_tuner_passes(musubi):
    code, checks = finished(tiny_musubi.checkout())
    assert code == 0, checks
    assert tuple(checks) == MUSUBI_ROWS
    for name in ("caches", "train", "LoRA", "hang", "resume"):
        assert checks[name]["status"] == "ok" and not checks[name]["action"]
    assert "zimage_cache_latents.py and zimage_cache_text_encoder_outputs.py wrote 12 files" in checks["caches"]["text"]
    assert "waited 10 s for batch 4 of the data loader from worker 0" in checks["hang"]["text"]
    assert "all 12 losses equal digit for digit" in checks["resume"]["text"]


def test_without_the_guard_of_the_loader_the_hang_fails(newest):
    code, checks = finished(tiny.checkout(), "--hangproof_without=dataloader")
    assert code == 1
    assert {name for name, check in checks.items() if check["status"] == "failed"} == {"hang"}, checks
    assert checks["hang"]["text"].startswith("a loader worker slept, and no guard ended the training: killed after ")
    assert "Do not train unattended" in checks["hang"]["action"]


def test_a_caching_command_that_fails_is_named(musubi, tmp_path):
    ignore = shutil.ignore_patterns(".git")
    copy = Path(shutil.copytree(tiny_musubi.checkout(), tmp_path / "copy", ignore=ignore))
    file = copy / "src/musubi_tuner/zimage_cache_text_encoder_outputs.py"
    file.write_text("raise OSError('no encoder here')\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    code, checks = finished(copy)
    assert code == 1 and checks["caches"]["status"] == "failed", checks
    assert checks["caches"]["text"].startswith(
        "zimage_cache_text_encoder_outputs.py exited with code 1: OSError: no enc"
    )
    assert [checks[name]["status"] for name in MUSUBI_ROWS[5:]] == ["not run"] * 4


def test_a_checkout_with_a_broken_import_fails_at_the_environment(copy):
    file = copy / "library" / "strategy_flux.py"
    file.write_text(file.read_text(encoding="utf-8") + "\nimport no_such_module_here\n", encoding="utf-8")
    code, checks = finished(copy)
    assert code == 1 and checks["environment"]["status"] == "failed"
    assert "No module named 'no_such_module_here'" in checks["environment"]["text"]
    assert str(copy / "requirements.txt") in checks["environment"]["action"]
    assert any("strategy_flux.py" in line for line in checks["environment"]["log"])
    assert [checks[name]["status"] for name in ("train", "LoRA", "hang", "resume")] == ["not run"] * 4


def test_a_checkout_that_lacks_a_guarded_function_fails_at_the_guards(copy):
    for path in (copy / "library").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"\bsave_state_on_train_end\b(?!\")", "save_the_end", text), encoding="utf-8")
    code, checks = finished(copy)
    assert code == 1 and checks["guards"]["status"] == "failed", checks
    assert "incompatible with" in checks["guards"]["text"] and checks["train"]["status"] == "not run"
    assert any("save_state_on_train_end" in line for line in checks["guards"]["log"])


def test_when_it_is_stopped_nothing_is_left_behind(newest):
    with tempfile.TemporaryDirectory(prefix="hps-") as folder:
        with started(tiny.checkout(), Path(folder)) as process:
            end_s = time.monotonic() + 300
            while not list(Path(folder).glob("*/undisturbed/losses")):  # both trainings are under way
                assert process.poll() is None and time.monotonic() < end_s
                time.sleep(0.05)
            assert len(psutil.Process(process.pid).children(recursive=True)) >= 2
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err
        assert left_behind(Path(folder)) == []
