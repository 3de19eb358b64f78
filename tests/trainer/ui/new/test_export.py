"""An exported draft trains in another folder."""

import subprocess
import sys

import pytest
from configure_helpers import DRAFT, exported

from ui.new import script_editor

pytestmark = pytest.mark.slow


def test_an_exported_zip_trains_in_another_folder_with_the_edited_script(filled, tmp_path):
    mine = 'set -eu\ntouch "$HANGPROOF_DATA/mine"\n'
    script_editor.save(DRAFT, script_editor.shown(DRAFT).text.replace("set -eu\n", mine, 1))
    path, there = exported(), tmp_path / "else where"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(path), str(there)], check=True)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(there / "cat" / "train.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (there / "cat" / "outputs" / "cat" / "cat.safetensors").is_file() and (there / "cat" / "mine").exists()
