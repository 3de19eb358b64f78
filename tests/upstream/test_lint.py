"""A script that lint has fixed is taken by the real launcher."""

import os
import subprocess

import tiny_sd_scripts

from presets.fix import fix


def test_a_fixed_12g_script_of_fluxgym_is_taken_by_the_real_launcher(newest, tmp_path):
    """The fixed line starts the guarded launcher with sd-scripts' script; its patches match (it stops at --help)."""
    tiny_sd_scripts.write_site(tmp_path)
    script = tiny_sd_scripts.checkout() / "flux_train_network.py"
    text = f"{tiny_sd_scripts.python()} {script} --help\n"
    environment = tiny_sd_scripts.environment(tmp_path) | {"PYTHONPATH": str(tmp_path / "site")}
    given = {"input": fix(text).text, "env": environment, "cwd": tmp_path, "timeout": 300}
    done = subprocess.run(["bash"], text=True, capture_output=True, check=False, **given)
    assert done.returncode == 0 and "--split_mode" in done.stdout, done.stderr[-1500:]
    assert "sd_scripts_patches" in fix(text).text and os.sep in str(script)
