"""A run remembers the commits it ran on, and names the command for the way back."""

import shlex
import subprocess

import pytest
from checkout_helpers import git

from sd_scripts_patches import compatibility, versions


def test_the_commit_is_read_from_branches_packed_ones_detached_heads_and_worktrees(checkout, tmp_path):
    folder, old, new = checkout
    assert versions.commit(folder) == new
    git(folder, "pack-refs", "--all")
    assert versions.commit(folder) == new
    git(folder, "checkout", "--quiet", old)
    assert versions.commit(folder) == old
    git(folder, "worktree", "add", "--quiet", "-b", "side", str(tmp_path / "w"), new)
    assert versions.commit(tmp_path / "w") == new
    assert versions.commit(tmp_path) == ""


def test_a_run_remembers_its_commits_and_says_when_it_changed(checkout, tmp_path, monkeypatch):
    folder, old, new = checkout
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv("HANGPROOF_RUN", str(run))
    found = compatibility.Checkout(compatibility.SD_SCRIPTS, folder)
    git(folder, "checkout", "--quiet", old)
    assert versions.on_start(found) == "" and versions.on_start(found) == ""
    assert versions.used(run, "sd-scripts") == [old] and versions.used(run, "musubi") == []
    git(folder, "checkout", "--quiet", new)
    monkeypatch.setenv("RANK", "1")
    assert versions.on_start(found) == ""
    monkeypatch.setenv("RANK", "0")
    said = versions.on_start(found)
    assert f"began on sd-scripts {old[:8]}" in said and f"continues on {new[:8]}" in said
    assert shlex.split(said.partition("fit it: ")[2])[-1] == str(folder)
    back = said.partition("To go back: ")[2].partition(". To see")[0]
    subprocess.run(["bash", "-c", back], check=True, capture_output=True)
    assert versions.commit(folder) == old
    git(folder, "checkout", "--quiet", new)
    assert versions.on_start(found) == "" and versions.used(run, "sd-scripts") == [old, new]
    assert [path.name for path in run.iterdir()] == [versions.FILE]
    monkeypatch.setenv("HANGPROOF_RUN", str(tmp_path / "gone"))
    assert "could not be noted in" in versions.on_start(found), "and the training starts"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"trainer": "sd-scripts", "commits": 3}'])
def test_what_cannot_be_read_is_not_remembered(tmp_path, text):
    (tmp_path / versions.FILE).write_text(text)
    assert versions.used(tmp_path, "sd-scripts") == []
