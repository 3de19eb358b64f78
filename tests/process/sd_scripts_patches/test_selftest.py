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
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tiny_musubi
import tiny_sd_scripts as tiny

from sd_scripts_patches import selftest, trial
from sd_scripts_patches.tiny import Installation
from sd_scripts_patches.trial import Trial

pytestmark = pytest.mark.timeout(1200)
ROWS = ("environment", "versions", "GPU", "guards", "train", "LoRA", "hang", "resume")
MUSUBI_ROWS = (*ROWS[:4], "caches", *ROWS[4:])
musubi = pytest.mark.skipif(bool(tiny_musubi.why_not()), reason=tiny_musubi.why_not() or "-")


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


def finished(folder: Path, temporary: Path, *flags: str) -> tuple[int, dict[str, dict]]:
    """Its exit code and its checks by name."""
    with started(folder, temporary, "--json", *flags) as process:
        out, err = process.communicate(timeout=1000)
    assert out.count("\n") == 1, err
    result = json.loads(out)
    assert result["ok"] == (process.returncode == 0) and result["checkout"] == str(folder.resolve())
    assert left_behind(temporary) == []
    return process.returncode, {check["name"]: check for check in result["checks"]}


def left_behind(temporary: Path) -> list[str]:
    """The files in the temporary folder, and the processes that use it."""
    found = [str(path) for path in temporary.rglob("*")]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(temporary) in " ".join((*process.environ().values(), *process.cmdline())):
                found.append(f"pid {process.pid} ({process.status()})")
    return found


def statuses(checks: dict[str, dict]) -> dict[str, str]:
    return {name: check["status"] for name, check in checks.items()}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder with a short path, which sockets need."""
    with tempfile.TemporaryDirectory(prefix="hps-") as folder:
        yield Path(folder)


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the checkout's code, for a test to damage."""
    tiny.need()
    return Path(
        shutil.copytree(tiny.checkout(), tmp_path / "copy", ignore=shutil.ignore_patterns(".git", "*.safetensors"))
    )


def test_a_good_installation_passes_and_is_not_touched(temporary):
    tiny.need()
    before = sorted(str(path) for path in tiny.checkout().rglob("*"))
    code, checks = finished(tiny.checkout(), temporary)
    assert code == 0, checks
    assert tuple(checks) == ROWS
    for name in ("train", "LoRA", "hang", "resume"):
        assert checks[name]["status"] == "ok" and not checks[name]["action"]
    assert "waited 10 s for batch 4 of the data loader from worker 0" in checks["hang"]["text"]
    assert "all 12 losses equal digit for digit" in checks["resume"]["text"]
    assert re.search(r"torch \d.*accelerate \d.*transformers \d", checks["versions"]["text"])
    assert sorted(str(path) for path in tiny.checkout().rglob("*")) == before


@musubi
def test_a_good_installation_of_musubi_tuner_passes_and_is_not_touched(temporary):
    before = sorted(str(path) for path in tiny_musubi.checkout().rglob("*"))
    code, checks = finished(tiny_musubi.checkout(), temporary)
    assert code == 0, checks
    assert tuple(checks) == MUSUBI_ROWS
    for name in ("caches", "train", "LoRA", "hang", "resume"):
        assert checks[name]["status"] == "ok" and not checks[name]["action"]
    assert "zimage_cache_latents.py and zimage_cache_text_encoder_outputs.py wrote 12 files" in checks["caches"]["text"]
    assert "waited 10 s for batch 4 of the data loader from worker 0" in checks["hang"]["text"]
    assert "all 12 losses equal digit for digit" in checks["resume"]["text"]
    assert sorted(str(path) for path in tiny_musubi.checkout().rglob("*")) == before


@musubi
def test_without_the_guard_of_the_resume_musubi_tuner_trains_all_steps_again(temporary):
    code, checks = finished(tiny_musubi.checkout(), temporary, "--hangproof_without=resume")
    assert code == 1 and "left out by you: resume" in checks["guards"]["text"]
    assert {name for name, status in statuses(checks).items() if status == "failed"} == {"resume"}, checks


@musubi
def test_a_caching_command_that_fails_is_named(temporary, tmp_path):
    ignore = shutil.ignore_patterns(".git")
    copy = Path(shutil.copytree(tiny_musubi.checkout(), tmp_path / "copy", ignore=ignore))
    file = copy / "src/musubi_tuner/zimage_cache_text_encoder_outputs.py"
    file.write_text("raise OSError('no encoder here')\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    code, checks = finished(copy, temporary)
    assert code == 1 and checks["caches"]["status"] == "failed", checks
    assert checks["caches"]["text"].startswith(
        "zimage_cache_text_encoder_outputs.py exited with code 1: OSError: no enc"
    )
    assert [checks[name]["status"] for name in MUSUBI_ROWS[5:]] == ["not run"] * 4


def test_a_checkout_with_a_broken_import_fails_at_the_environment(temporary, copy):
    file = copy / "library" / "strategy_flux.py"
    file.write_text(file.read_text(encoding="utf-8") + "\nimport no_such_module_here\n", encoding="utf-8")
    code, checks = finished(copy, temporary)
    assert code == 1 and checks["environment"]["status"] == "failed"
    assert "No module named 'no_such_module_here'" in checks["environment"]["text"]
    assert str(copy / "requirements.txt") in checks["environment"]["action"]
    assert any("strategy_flux.py" in line for line in checks["environment"]["log"])
    assert [checks[name]["status"] for name in ("train", "LoRA", "hang", "resume")] == ["not run"] * 4


def test_without_the_guard_of_the_resume_the_resume_fails(temporary):
    tiny.need()
    code, checks = finished(tiny.checkout(), temporary, "--hangproof_without=resume")
    assert code == 1 and "left out by you: resume" in checks["guards"]["text"]
    assert {name for name, status in statuses(checks).items() if status == "failed"} == {"resume"}, checks
    assert "resumed from tiny-step00000008-state" in checks["resume"]["text"]
    assert "commit" in checks["resume"]["action"]


def test_without_the_guard_of_the_loader_the_hang_fails(temporary):
    tiny.need()
    code, checks = finished(tiny.checkout(), temporary, "--hangproof_without=dataloader")
    assert code == 1
    assert {name for name, status in statuses(checks).items() if status == "failed"} == {"hang"}, checks
    assert checks["hang"]["text"].startswith("a loader worker slept, and no guard ended the training: killed after ")
    assert "Do not train unattended" in checks["hang"]["action"]


def test_a_checkout_that_lacks_a_guarded_function_fails_at_the_guards(temporary, copy):
    for path in (copy / "library").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"\bsave_state_on_train_end\b(?!\")", "save_the_end", text), encoding="utf-8")
    code, checks = finished(copy, temporary)
    assert code == 1 and checks["guards"]["status"] == "failed", checks
    assert "incompatible with" in checks["guards"]["text"] and checks["train"]["status"] == "not run"
    assert any("save_state_on_train_end" in line for line in checks["guards"]["log"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_it_is_stopped_nothing_is_left_behind(temporary, number):
    tiny.need()
    with started(tiny.checkout(), temporary) as process:
        end_s = time.monotonic() + 300
        while not list((temporary).glob("*/undisturbed/losses")):  # both trainings are under way
            assert process.poll() is None and time.monotonic() < end_s
            time.sleep(0.05)
        assert len(psutil.Process(process.pid).children(recursive=True)) >= 2
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert left_behind(temporary) == []


# The parts, without a checkout.

TREE = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('x', flush=True); time.sleep(600)"


@pytest.mark.skipif(sys.platform == "win32", reason="process groups as on Unix")
def test_a_process_is_killed_with_its_children_at_its_limit():
    with Trial(60) as here:
        job = here.start([sys.executable, "-c", TREE], os.environ, here.folder, "tree")
        while "x" not in job.log:
            time.sleep(0.05)
        (child,) = psutil.Process(job.process.pid).children()
        here.wait(job, 0.2)
        assert job.code is None and job.outcome().startswith("did not end within")
        child.wait(30)
    assert not here.folder.exists()


def test_the_overall_limit_ends_a_wait():
    with Trial(0.5) as here:
        job = here.start([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, here.folder, "long")
        with pytest.raises(trial.LimitReached, match="the limit of 0 s|the limit of 1 s"):
            here.wait(job, 60)
    assert not psutil.pid_exists(job.process.pid) and not here.folder.exists()


ALLOCATE = "import time; b = bytearray(200_000_000); b[::4096] = b'x' * len(b[::4096]); del b; time.sleep({pause}); raise OSError('disk full')"


@pytest.mark.parametrize("own", [0, 600_000_000], ids=["small", "after this process was large"])
def test_a_job_reports_its_error_code_and_memory(own):
    """Linux counts the memory of the process that starts a job in the job's maximum; the job's own is what is told."""
    held = bytearray(own)
    held[::4096] = b"x" * len(held[::4096])
    del held  # the maximum of this process stays
    with Trial(60) as here:
        script = ALLOCATE.format(pause=1)
        job = here.wait(here.start([sys.executable, "-c", script], os.environ, here.folder, "job"), 60)
        assert (job.code, job.error(), job.outcome()) == (1, "OSError: disk full", "exited with code 1")
        assert sys.platform == "win32" or 200e6 < job.peak_bytes < 300e6


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux counts")
def test_the_memory_of_a_short_job_is_known_too():
    """As the canary runs: in a small process, whose memory is less than the job's."""
    source = (
        "import os, sys; from sd_scripts_patches.trial import Trial\n"
        f"with Trial(60) as here: print(here.wait(here.start([sys.executable, '-c', {ALLOCATE.format(pause=0)!r}], os.environ, here.folder, 'j'), 60).peak_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=tiny.ROOT, capture_output=True, text=True, timeout=120)
    assert 200e6 < int(done.stdout) < 300e6, done.stderr


def test_sockets_in_the_temporary_folder_stay_below_the_length_that_systems_allow(tmp_path, monkeypatch):
    """A path that is too long loses each batch in the loader's worker."""
    for folder, private in ((tmp_path / ("x" * 150), False), (Path(tempfile.gettempdir()), True)):
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setenv("TMPDIR", "of the user")
        with Trial(60) as here:
            given = here.environment(tiny.installation(), here.folder)["TMPDIR"]
            assert given == (str(here.folder / "t") if private else "of the user")
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.delenv("TMPDIR")


@pytest.mark.parametrize("command", ["selftest", "canary"])
def test_a_folder_that_is_no_checkout_is_wrong_usage(tmp_path, command):
    done = subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches", command, str(tmp_path), str(tmp_path)][: 5 if command == "selftest" else 6],
        cwd=tiny.ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (
        done.returncode == 2
        and "is not a checkout of sd-scripts or musubi-tuner" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_the_environment_is_the_named_one_or_that_of_sd_scripts(tmp_path, monkeypatch):
    checkout = tmp_path / "with @ in its name"
    checkout.mkdir()
    (checkout / "flux_train_network.py").touch()
    for name in ("one", "two"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    monkeypatch.setenv("SD_SCRIPTS_VENV", str(tmp_path / "one"))
    assert trial.installation(str(checkout)).python == tmp_path / "one/bin/python"
    assert trial.installation(f"{checkout}@{tmp_path / 'two'}").python == tmp_path / "two/bin/python"
    monkeypatch.delenv("SD_SCRIPTS_VENV")
    monkeypatch.setattr(trial.sys, "prefix", str(tmp_path / "of sd-scripts"))
    assert trial.installation(str(checkout)).python == Path(sys.executable)
    monkeypatch.setattr(trial.sys, "prefix", str(trial.ROOT / ".venv"))
    monkeypatch.setenv("MUSUBI_VENV", str(tmp_path / "two"))
    other = tmp_path / "musubi"
    for name in (
        "src/musubi_tuner/training/trainer_base.py",
        "src/musubi_tuner/dataset/x.py",
        "zimage_train_network.py",
    ):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).touch()
    assert trial.installation(str(other)).python == tmp_path / "two/bin/python"
    monkeypatch.setattr(trial, "ROOT", tmp_path)
    monkeypatch.setattr(trial.sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(trial.argparse.ArgumentTypeError, match=r"\.venv-sd-scripts.* is missing.*start\.sh sd-scripts"):
        trial.installation(str(checkout))


def test_a_failed_check_shows_what_where_and_what_to_do():
    check = selftest.Check(
        "train", "failed", "the tiny training exited with code 1", "Look it up.", ("line 1", "line 2")
    )
    assert selftest.shown(check).splitlines() == [
        "failed   train        the tiny training exited with code 1",
        "         | line 1",
        "         | line 2",
        "         → Look it up.",
    ]
