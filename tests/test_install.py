"""The setup commands: sd-scripts is installed completely or not at all, and start.sh installs only once."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import tiny_sd_scripts

from runs.paths import ROOT
from sd_scripts_patches import install


@pytest.fixture
def repository(tmp_path):
    """A small git repository in place of sd-scripts, and its commit."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (folder / "requirements.txt").write_text("# for the project\n-e .\n")
    (folder / "flux_train_network.py").write_text("print('trained')\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    return folder, commit


def test_the_pinned_commit_is_fetched_completely_and_once(tmp_path, repository):
    upstream, commit = repository
    target = tmp_path / "sd-scripts"
    assert install.fetch(target, str(upstream), commit) is True
    assert (target / "flux_train_network.py").read_text() == "print('trained')\n"
    assert install.fetch(target, str(upstream), commit) is False
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sd-scripts", "upstream"]


def test_a_checkout_of_another_commit_is_left_alone_and_named(tmp_path, repository, capsys):
    upstream, commit = repository
    target = tmp_path / "sd-scripts"
    install.fetch(target, str(upstream), commit)
    assert install.fetch(target, str(upstream), "f" * 40) is False
    said = capsys.readouterr().err
    assert f"is at commit {commit[:8]}, not at the tested ffffffff; it is not changed" in said
    assert (target / "flux_train_network.py").read_text() == "print('trained')\n"


def test_the_commands_that_are_shown_get_the_tested_commit(tmp_path, repository, capsys):
    upstream, old = repository
    target = tmp_path / "sd-scripts"
    install.fetch(target, str(upstream), old)
    (upstream / "flux_train_network.py").write_text("print('newer')\n")
    git = ["git", "-C", str(upstream), "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run([*git, "commit", "--quiet", "-am", "second"], check=True)
    new = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    install.fetch(target, str(upstream), new)
    shown = re.search(r"To get the tested one: (git .*), then \./start\.sh", capsys.readouterr().err)
    assert shown and subprocess.run(["bash", "-c", shown[1]], check=False, capture_output=True).returncode == 0
    assert (target / "flux_train_network.py").read_text() == "print('newer')\n"
    assert install.fetch(target, str(upstream), new) is False
    assert "is at commit" not in capsys.readouterr().err


def test_the_pinned_version_is_v0_11_1():
    assert install.COMMIT == "6721028c79ee85a78b3a06dfd8954dae310a1cce"


def test_a_folder_that_cannot_train_fails_the_installation(tmp_path, capfd):
    (tmp_path / "train_network.py").touch()
    assert install.verify(tmp_path, tmp_path / "v") == "the check of the patches"
    assert "is not an sd-scripts checkout" in capfd.readouterr().err


@pytest.mark.timeout(900)
def test_the_installation_ends_with_the_self_test(capfd):
    tiny_sd_scripts.need()
    environment = tiny_sd_scripts.python().parent.parent
    lacks = tiny_sd_scripts.installation().lacks("torchvision")
    assert install.verify(tiny_sd_scripts.checkout(), environment) == ("the self-test" if lacks else "")
    said = capfd.readouterr().out
    assert ("torchvision is missing, and sd-scripts imports it" in said) == lacks
    assert ("Passed in" in said) == (not lacks)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/nowhere.git", "/no/such/folder"])
def test_without_a_network_nothing_is_left_behind(tmp_path, url):
    with pytest.raises(install.InstallError, match="fetch .*failed"):
        install.fetch(tmp_path / "sd-scripts", url, install.COMMIT)
    assert list(tmp_path.iterdir()) == []


def test_the_command_reports_a_missing_network_and_exits_1(tmp_path):
    environment = {**os.environ, "SD_SCRIPTS_DIR": str(tmp_path / "s"), "SD_SCRIPTS_VENV": str(tmp_path / "v")}
    environment["GIT_CONFIG_COUNT"] = "1"  # every GitHub URL goes to a closed port on this machine
    environment["GIT_CONFIG_KEY_0"] = "url.http://127.0.0.1:9/.insteadOf"
    environment["GIT_CONFIG_VALUE_0"] = "https://github.com/"
    done = subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches.install"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 1
    assert "network" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_requirements_are_the_checkouts_own_with_torchvision_and_without_itself(repository):
    wanted = install.requirements(repository[0])
    assert "torchvision==" in wanted and "-e ." not in wanted and "# for the project" in wanted


def test_an_environment_is_stamped_last_made_once_and_removed_when_it_fails(tmp_path, monkeypatch):
    target, first = tmp_path / "v", tmp_path / "first"
    assert install.make_environment(target, "# nothing to install\n") is True
    assert install.make_environment(target, "# nothing to install\n") is False
    shutil.copytree(target, first, symlinks=True)
    made = []
    monkeypatch.setattr(
        install.venv, "create", lambda to, **how: made.append(shutil.copytree(first, to, symlinks=True))
    )
    (target / ".installed").unlink()  # as if the installation was killed
    (first / ".installed").unlink()
    assert install.make_environment(target, "# nothing to install\n") is True and made == [target]
    with pytest.raises(install.InstallError, match="requirements"):
        install.make_environment(target, "this is no requirement !!\n")
    assert not target.exists()


def test_a_second_start_installs_nothing(tmp_path):
    """setup.sh in its own folder, with an empty requirements file."""
    (tmp_path / "setup.sh").write_bytes((ROOT / "setup.sh").read_bytes())
    (tmp_path / "requirements.txt").write_text("# nothing\n")
    command = ["bash", "-c", f"cd '{tmp_path}' && . ./setup.sh && set_up requirements.txt"]
    environment = {**os.environ, "PYTHON": sys.executable}
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert first.returncode == 0, first.stderr
    assert "installing" in first.stderr and first.stdout == ""
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    (tmp_path / "requirements.txt").write_text("# changed\n")
    third = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert "installing" in third.stderr
