"""The set-up commands: sd-scripts' checkout and environment come whole or not at all; start.sh installs only once."""

import os
import shutil
import subprocess
import sys

import pytest

from runs.paths import ROOT
from sd_scripts_patches import install


@pytest.fixture
def repository(tmp_path):
    """A small git repository that stands for sd-scripts' own, and its commit."""
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


def test_the_pinned_commit_is_fetched_whole_and_once(tmp_path, repository):
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
    assert f"is at commit {commit[:8]}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/nowhere.git", "/no/such/folder"])
def test_without_a_network_nothing_half_made_is_left(tmp_path, url):
    with pytest.raises(install.InstallError, match="fetch .*failed"):
        install.fetch(tmp_path / "sd-scripts", url, install.COMMIT)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_so_and_exits_1(tmp_path):
    environment = {**os.environ, "SD_SCRIPTS_DIR": str(tmp_path / "s"), "SD_SCRIPTS_VENV": str(tmp_path / "v")}
    environment["GIT_CONFIG_COUNT"] = "1"  # every GitHub address leads to a closed port on this machine
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
    assert "no network?" in done.stderr and "Nothing half-made" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_requirements_are_the_checkouts_own_with_torchvision_and_without_itself(repository):
    wanted = install.requirements(repository[0])
    assert "torchvision==" in wanted and "-e ." not in wanted and "# for the project" in wanted


def test_an_environment_is_stamped_last_made_once_and_removed_when_it_fails(tmp_path, monkeypatch):
    place, first = tmp_path / "v", tmp_path / "first"
    assert install.make_environment(place, "# nothing to install\n") is True
    assert install.make_environment(place, "# nothing to install\n") is False
    shutil.copytree(place, first, symlinks=True)
    made = []
    monkeypatch.setattr(
        install.venv, "create", lambda to, **how: made.append(shutil.copytree(first, to, symlinks=True))
    )
    (place / ".installed").unlink()  # as after a kill in the middle
    (first / ".installed").unlink()
    assert install.make_environment(place, "# nothing to install\n") is True and made == [place]
    with pytest.raises(install.InstallError, match="requirements"):
        install.make_environment(place, "this is no requirement !!\n")
    assert not place.exists()


def test_a_second_start_takes_no_install_step(tmp_path):
    """setup.sh in a folder of its own, with a requirements file that needs nothing."""
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
