"""Which names a run can have, and the folder that each makes."""

import errno
import json
import os
from pathlib import Path

import pytest
from runs_helpers import PROJECT, python

import runs
from runs import paths


def test_names_make_folders():
    for name, folder in (
        ("My LoRA_v1.0", "My-LoRA_v1-0"), ("  déjà vu ", "deja-vu"), ("../../etc", "etc"), ("日本", "Ri-Ben"),
        ("a" * 200, "a" * 80), ("-rf", "rf"), ("$(id)", "id"), ("com10", "com10"),
    ):  # fmt: skip
        assert runs.slug(name) == folder
    for name in ("", "  ", "☃", "__", "nul", "COM1", "...", "/"):
        with pytest.raises(runs.RunError):
            runs.slug(name)


def test_a_free_name_is_found_for_every_name(data):
    long = "a very long name of a LoRA that goes on and on until its folder's name is cut " * 2
    long_names = ["é" * 200, long, "x" * 500, long.strip() + " 9", "a" * 79 + " 9"]
    for name in ["my lora", "my lora 2", "v2", "7", "2024 12", *long_names]:
        used = set()
        for _ in range(4):
            free = runs.free_name(name)
            assert runs.slug(free).casefold() not in used
            used.add(runs.slug(free).casefold())
            (data / "outputs" / runs.slug(free)).mkdir(parents=True)
    assert runs.free_name("my lora") == "my lora 9"  # 2 to 8 are taken by the names above
    (data / "datasets" / "Alone").mkdir(parents=True)
    assert runs.free_name("alone") == "alone 2"


def test_a_run_of_another_account_hides_no_other_run(data, monkeypatch):
    for name in ("a", "theirs"):
        (runs.outputs_dir() / name).mkdir(parents=True)
        (runs.outputs_dir() / name / "run.toml").touch()
    stat = Path.stat

    def denied(path: Path, **more: bool) -> os.stat_result:
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", denied)
    assert [folder.name for folder in runs.list_runs()] == ["a"]


def test_programs_scripts_and_settings_are_where_the_platform_and_the_environment_say(tmp_path, monkeypatch):
    assert [paths.script_name(1, "linux"), paths.script_name(3, "win32")] == ["train.sh", "train.attempt-3.bat"]
    venv = Path("v")
    assert paths.venv_program(venv, "python", "win32") == venv / "Scripts" / "python.exe"
    assert paths.venv_program(venv, "python", "darwin") == venv / "bin" / "python"
    for name in ("XDG_CONFIG_HOME", "SD_SCRIPTS_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("MUSUBI_VENV", "~/venv")
    monkeypatch.delenv("SD_SCRIPTS_VENV", raising=False)
    wanted = [paths.ROOT / ".venv", paths.ROOT / ".venv-sd-scripts", tmp_path / "venv"]
    assert list(map(paths.backend_venv, ("diffusers", "sd-scripts", "musubi"))) == wanted
    assert paths.config_dir() == tmp_path / "hangproof"
    checkout = paths.CHECKOUTS["sd-scripts"]
    assert checkout.script("train_network.py") == tmp_path / "train_network.py" and not checkout.installed()


def test_a_relative_path_in_a_variable_is_one_of_the_users_folder_for_every_process(tmp_path):
    given = {"HANGPROOF_DATA": "my data", "HANGPROOF_LIMITS": "my.toml", "MUSUBI_DIR": "~noone/x", "HF_HOME": ""}
    said = "import json, os, runs.paths as p; os.chdir('/'); print(json.dumps([str(p.data_root()), dict(os.environ)]))"
    data, seen = json.loads(python("-c", said, cwd=tmp_path, PYTHONPATH=str(PROJECT), **given).stdout)
    wanted = {name: str(tmp_path / value) if value else "" for name, value in given.items()}
    assert {name: seen[name] for name in given} == wanted and data == wanted["HANGPROOF_DATA"]
