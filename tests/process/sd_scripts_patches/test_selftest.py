"""The parts of the self-test: jobs within limits, which environment is tried."""

import os
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import tiny_sd_scripts as tiny
from monitor_helpers import wait_for

from sd_scripts_patches import trial
from sd_scripts_patches.trial import Trial

TREE = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('x', flush=True); time.sleep(600)"


@pytest.mark.skipif(sys.platform == "win32", reason="process groups as on Unix")
def test_a_process_is_killed_with_its_children_at_its_limit():
    with Trial() as here:
        job = here.start([sys.executable, "-c", TREE], os.environ, here.folder, "tree")
        wait_for(lambda: "x" in job.log)
        (child,) = psutil.Process(job.process.pid).children()
        here.wait(job, 0.2)
        assert job.code is None and job.outcome().startswith("did not end within")
        child.wait(30)
    assert not here.folder.exists()


def test_sockets_in_the_temporary_folder_stay_below_the_length_that_systems_allow(tmp_path, monkeypatch):
    """A path that is too long loses each batch in the loader's worker."""
    for folder, private in ((tmp_path / ("x" * 150), False), (Path(tempfile.gettempdir()), True)):
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setenv("TMPDIR", "of the user")
        with Trial() as here:
            given = here.environment(tiny.installation(), here.folder)["TMPDIR"]
            assert given == (str(here.folder / "t") if private else "of the user")
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.delenv("TMPDIR")


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
