"""tests/support/get_checkouts.sh: where kohya's trainers cannot be fetched, one line says why, and nothing else happens."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/support/get_checkouts.sh"


@pytest.mark.skipif(sys.platform == "win32", reason="a script of bash")
@pytest.mark.parametrize(
    ("source", "reason"), [("nowhere", "does not appear to be a git repository"), ("other", "not our ref")]
)
def test_a_machine_that_cannot_fetch_them_says_so_in_one_line(tmp_path, source, reason):
    """There is no repository; or there is one without the pinned commit."""
    (tmp_path / "tests/support").mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, tmp_path / SCRIPT)
    shutil.copytree(ROOT / "sd_scripts_patches", tmp_path / "sd_scripts_patches")
    shutil.copytree(ROOT / "guards", tmp_path / "guards")
    other = tmp_path / "other/sd-scripts"
    subprocess.run(["git", "init", "--quiet", str(other)], check=True)
    env = {**os.environ, "HANGPROOF_UPSTREAM": str(tmp_path / source), "PYTHON": sys.executable, "LC_ALL": "C"}
    done = subprocess.run(
        ["bash", SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("Hangproof: kohya's trainers cannot be fetched here (") and reason in done.stderr
    assert done.stderr.endswith("); tests/upstream is skipped\n")
    assert not (tmp_path / ".upstream/environment").exists()
