"""The setup commands: a trainer is installed completely or not at all, and start.sh installs only once."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pip
import pytest
from checkout_helpers import commit, git
from runs_helpers import call, executable

import hangproof
from runs.paths import ROOT
from sd_scripts_patches import install
from sd_scripts_patches.trainers import CUDA_INDEX, TRAINERS

SD_SCRIPTS, MUSUBI = TRAINERS["sd-scripts"], TRAINERS["musubi"]
PYPROJECT = """[project]
dependencies = ["accelerate==1.6.0", "diffusers[torch]==0.32.1"]
[project.optional-dependencies]
cu124 = ["torch>=2.5.1"]
"""
FILES = {
    "sd-scripts": {"requirements.txt": "# for the project\n-e .\n", "flux_train_network.py": "print('trained')\n"},
    "musubi": {"pyproject.toml": PYPROJECT, "zimage_train_network.py": "print('trained')\n"},
}
each = pytest.mark.parametrize("key", TRAINERS)


def repository(folder: Path, key: str) -> str:
    """Make a small git repository in place of a trainer; returns its commit."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    for name, text in FILES[key].items():
        (folder / name).write_text(text)
    return commit(folder, "first")


@each
def test_the_pinned_commit_is_fetched_completely_and_once_and_another_one_is_left_alone(
    tmp_path, monkeypatch, capsys, key
):
    upstream, target = str(tmp_path / "upstream"), tmp_path / "it's there"
    commit = repository(tmp_path / "upstream", key)
    (tmp_path / ".it's there.tmp/half").mkdir(parents=True)  # of a start that was killed
    assert install.fetch(target, TRAINERS[key], upstream, commit) is True
    assert sorted(p.name for p in target.iterdir() if p.name != ".git") == sorted(FILES[key])
    assert git(target, "rev-parse", "HEAD") == commit
    assert install.fetch(target, TRAINERS[key], upstream, commit) is False
    assert sorted(p.name for p in tmp_path.iterdir()) == ["it's there", "upstream"]
    assert install.fetch(target, TRAINERS[key], upstream, "f" * 40) is False
    said = capsys.readouterr().err
    assert f"is at commit {commit[:8]}, not at the tested ffffffff; it is not changed" in said
    assert f"then ./start.sh {key}" in said and git(target, "rev-parse", "HEAD") == commit
    # The commands that are shown get the tested commit.
    git(tmp_path / "upstream", "commit", "--quiet", "--allow-empty", "-m", "second")
    new = git(tmp_path / "upstream", "rev-parse", "HEAD")
    install.fetch(target, TRAINERS[key], upstream, new)
    shown = re.search(r"To get the tested one: (git .*), then \./start\.sh", capsys.readouterr().err)
    assert shown and subprocess.run(["bash", "-c", shown[1]], check=False, capture_output=True).returncode == 0
    assert install.fetch(target, TRAINERS[key], upstream, new) is False
    assert "is at commit" not in capsys.readouterr().err
    # An unpacked ZIP in our own folder: a command with git would change Hangproof itself.
    (tmp_path / "upstream/unpacked").mkdir()
    monkeypatch.setattr(install, "START", r".\start.bat")  # as on Windows
    assert install.fetch(tmp_path / "upstream/unpacked", TRAINERS[key]) is False
    said = capsys.readouterr().err
    assert "is not a git checkout" in said and "git -C" not in said and rf"then .\start.bat {key}" in said


def command(folder: Path, key: str, *words: str):
    """`./start.sh KEY` without setup.sh; every GitHub address leads to a port at which nobody answers."""
    own = {TRAINERS[key].folder_variable: str(folder / "s"), TRAINERS[key].venv_variable: str(folder / "v")}
    own |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "url.http://127.0.0.1:9/.insteadOf"}
    return call("sd_scripts_patches.install", key, *words, **own, GIT_CONFIG_VALUE_0="https://github.com/")


def test_a_second_start_waits_until_the_first_one_has_installed(tmp_path, monkeypatch, capsys):
    """Two at once removed each other's environment."""
    done, said = list[str](), ""

    def fetch(*_):
        done.append("second")
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "fetch", fetch)
    with ThreadPoolExecutor() as pool:
        with install.alone():
            second = pool.submit(install.main, ["musubi"])
            while "another start installs a trainer; waiting until it ends" not in said:
                assert not second.done()
                said += capsys.readouterr().err
            done.append("first")
        assert second.result(60) == 1 and done == ["first", "second"]
    assert capsys.readouterr().err.endswith("musubi: interrupted. No incomplete files were left.\n"), "Ctrl-C"


@each
def test_the_command_reports_a_missing_network_and_exits_1(tmp_path, key):
    done = command(tmp_path, key, "--json")
    assert done.returncode == 1
    assert (said := done.stderr.splitlines()[-1]).startswith(f"{key}: fetch https://github.com/kohya-ss/")
    assert said == f"{key}: {json.loads(done.stdout)['failed']}."
    assert "network" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_checkout_and_an_environment_of_the_users_own_stay_and_json_says_how_it_ended(tmp_path, monkeypatch):
    """The small repository fails the check; then it has no list of requirements."""
    repository(tmp_path / "s", "musubi")
    (tmp_path / "v").mkdir()
    (tmp_path / "v/mine").touch()
    done = command(tmp_path, "musubi", "--json")
    assert done.returncode == 1 and f"{tmp_path / 'v'} was not made by Hangproof, so it is used as it is" in done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {
        "trainer": "musubi", "folder": str(tmp_path / "s"), "environment": str(tmp_path / "v"), "new": False,
        "commit": MUSUBI.commit, "failed": "the check of the patches failed, see above",
    }  # fmt: skip
    monkeypatch.setattr(install, "ROOT", tmp_path)  # as SD_SCRIPTS_VENV=.venv, which is Hangproof's own
    assert install.make_environment(tmp_path / "v", "# nothing\n", MUSUBI) is False
    assert [path.name for path in (tmp_path / "v").iterdir()] == ["mine"]
    shutil.rmtree(tmp_path / "v")
    (tmp_path / "s/pyproject.toml").unlink()
    done = command(tmp_path, "musubi")
    assert done.returncode == 1 and "it is not changed" in done.stderr and not (tmp_path / "v").exists()
    assert f"{tmp_path / 's'} lists no requirements, neither in requirements.txt nor" in done.stderr


def test_the_requirements_are_the_checkouts_own_with_torchvision_and_without_itself(tmp_path):
    for key in TRAINERS:
        repository(tmp_path / key, key)
    wanted = install.requirements(tmp_path / "sd-scripts", SD_SCRIPTS).splitlines()
    assert any(line.startswith("torchvision==") for line in wanted)
    assert "-e ." not in wanted and "# for the project" in wanted
    wanted = install.requirements(tmp_path / "musubi", MUSUBI).splitlines()
    assert any(line.startswith("torch==") for line in wanted)
    assert wanted[-2:] == ["accelerate==1.6.0", "diffusers[torch]==0.32.1"] and "torch>=2.5.1" not in wanted


def test_on_windows_with_an_nvidia_driver_pip_finds_pytorchs_cuda_builds(tmp_path, monkeypatch):
    """PyPI's builds for Windows train on the processor alone; of two builds of a version, pip takes that with a suffix."""
    repository(tmp_path / "sd-scripts", "sd-scripts")
    for system, driver in (("linux", "/usr/bin/nvidia-smi"), ("win32", None), ("win32", "C:/nvidia-smi.exe")):
        monkeypatch.setattr(install.sys, "platform", system)
        monkeypatch.setattr(install.shutil, "which", lambda program, driver=driver: driver)
        wanted = install.requirements(tmp_path / "sd-scripts", SD_SCRIPTS)
        assert (f"--extra-index-url {CUDA_INDEX}\n" in wanted) is (system == "win32" and driver is not None)
    start = (ROOT / "start.bat").read_text()
    assert f'where nvidia-smi >nul 2>&1 && set "cuda=--extra-index-url {CUDA_INDEX}"' in start
    assert "%cuda% -r requirements.txt" in start


def test_a_python_that_the_trainer_supports_is_found_or_the_ones_found_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PYTHON", raising=False)
    executable(tmp_path / "this", "#!/bin/sh\necho 3 14 0\n")
    monkeypatch.setattr(install.sys, "executable", str(tmp_path / "this"))
    executable(tmp_path / "python3.12", "#!/bin/sh\nprintf '\\377'\nexit 127\n")  # a shim that says why, not in UTF-8
    executable(tmp_path / "python3", "#!/bin/sh\necho 3 13 1\n")
    needs = "musubi-tuner needs Python 3.10 to 3.12, and this machine has 3.14.0, 3.13.1. Install Python 3.12"
    with pytest.raises(install.InstallError, match=f"{needs}.*then run ./start.sh musubi again$"):
        install.interpreter(MUSUBI)
    assert install.interpreter(SD_SCRIPTS) == [str(tmp_path / "this")]
    executable(tmp_path / "python3.11", "#!/bin/sh\necho 3 11 9\n")
    assert install.interpreter(MUSUBI) == ["python3.11"]
    executable(tmp_path / "mine", "#!/bin/sh\necho 3 10 2\n")
    monkeypatch.setenv("PYTHON", str(tmp_path / "mine"))
    assert install.interpreter(MUSUBI) == [str(tmp_path / "mine")]


@pytest.fixture
def interpreter(tmp_path, monkeypatch) -> str:
    """A Python whose new environments take pip from this one, because to install one of their own is slow."""
    monkeypatch.setenv("PYTHONPATH", str(Path(pip.__file__).parents[1]))
    text = f'#!/bin/sh\n[ "$2" != venv ] || set -- "$@" --without-pip\nexec "{sys.executable}" "$@"\n'
    return str(executable(tmp_path / "python", text))


@pytest.mark.slow
def test_an_environment_is_stamped_last_made_once_and_removed_when_it_fails(tmp_path, monkeypatch, interpreter, capfd):
    target, wanted = tmp_path / "v", "# nothing to install\n"
    monkeypatch.setattr(install, "interpreter", lambda trainer: [interpreter])
    assert install.make_environment(target, wanted, MUSUBI) is True
    assert install.make_environment(target, wanted, MUSUBI) is False
    (target / install.STAMP).unlink()  # as if the installation was killed
    (target / "half").touch()
    assert install.make_environment(target, wanted, MUSUBI) is True
    assert not (target / "half").exists()
    with pytest.raises(install.InstallError, match="requirements of musubi-tuner"):
        install.make_environment(target, "this is no requirement !!\n", MUSUBI)
    assert install.make_environment(target, wanted, MUSUBI) is False, "that of before is there again"
    assert not target.with_name("v.before").exists()
    shutil.rmtree(target)
    debian = str(executable(tmp_path / "debian", "#!/bin/sh\necho ensurepip is not available\nexit 1\n"))
    monkeypatch.setattr(install, "interpreter", lambda trainer: [debian])
    with pytest.raises(install.InstallError, match="create the environment .*: failed, see the messages above"):
        install.make_environment(target, wanted, MUSUBI)
    assert not target.exists() and "ensurepip is not available" in capfd.readouterr().err


def test_a_training_script_starts_or_what_it_lacks_is_named(tmp_path):
    repository(tmp_path / "s", "sd-scripts")
    python = executable(tmp_path / "v/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    assert install.starts(tmp_path / "s", tmp_path / "v", SD_SCRIPTS) == ""
    (tmp_path / "s" / SD_SCRIPTS.script).write_text("import no_such_module\n")
    said = f"flux_train_network.py does not start with {python}: ModuleNotFoundError: No module named 'no_such_module'"
    assert install.starts(tmp_path / "s", tmp_path / "v", SD_SCRIPTS) == said


@each
def test_start_sh_knows_the_trainer(tmp_path, key):
    shutil.copy(ROOT / "start.sh", tmp_path)
    (tmp_path / "setup.sh").write_text("set_up() { :; }\n")
    executable(tmp_path / ".venv/bin/python", '#!/bin/sh\necho "$PWD" "$@"\n')
    for words, program in (([key, "--json"], "hangproof.py"), (["--no-browser"], "app.py"), ([], "app.py")):
        said = subprocess.check_output(["bash", str(tmp_path / "start.sh"), *words], text=True, cwd="/")
        assert said.split() == ["/", str(tmp_path / program), *words], "paths are those of the user's folder"
    assert hangproof.OTHERS[key] == ["-m", "sd_scripts_patches.install", key]


@pytest.mark.slow
def test_a_second_start_installs_nothing(tmp_path, interpreter):
    """setup.sh in its own folder, with an empty requirements file; also one that starts while the first one installs,
    and one in a folder that was moved meanwhile."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(ROOT / "setup.sh", root)
    (root / "requirements.txt").write_text("# nothing\n")
    command = ["bash", "-c", ". ./setup.sh && set_up requirements.txt"]
    executable(tmp_path / "my python" / "python3", f'#!/bin/sh\ntouch {tmp_path / "used"}\nexec {interpreter} "$@"\n')
    env = {**os.environ, "PYTHON": str(tmp_path / "my python" / "python3")}

    def started():
        return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=400, check=False)

    with ThreadPoolExecutor() as pool:
        both = [pool.submit(started) for _ in range(2)]
    early, first = sorted((one.result() for one in both), key=lambda done: "creating" in done.stderr)
    assert (early.returncode, early.stderr) == (0, "Hangproof: another start installs; waiting until it ends …\n")
    second = started()
    assert first.returncode == 0 and "installing" in first.stderr and first.stdout == "", first.stderr
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "") and (tmp_path / "used").exists()
    (root / "requirements.txt").write_text("# changed\n")
    assert "installing" in started().stderr
    (library,) = (root / ".venv" / "lib").iterdir()
    library.rename(library.with_name("python3.9"))
    after = started()
    assert after.returncode == 0 and "creating .venv" in after.stderr, "the system has another Python now"
    assert library.is_dir() and started().stderr == ""
    executable(root / ".venv/bin/hf", f"#!{root}/.venv/bin/python\nprint('logged in')\n")
    root = root.rename(tmp_path / "moved here")
    assert started().stderr == "" and subprocess.check_output([root / ".venv/bin/hf"]) == b"logged in\n"
