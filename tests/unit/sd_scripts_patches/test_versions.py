"""A run remembers the commits it ran on; the way back to an older one changes nothing else, and no edited file."""

import shlex

import pytest
from checkout_helpers import commit, git

from sd_scripts_patches import compatibility, versions
from sd_scripts_patches.trainers import TRAINERS

TRAINER = TRAINERS["sd-scripts"]


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
    assert versions.used(run) == versions.Record("sd-scripts", str(folder), [old])
    git(folder, "checkout", "--quiet", new)
    monkeypatch.setenv("RANK", "1")
    assert versions.on_start(found) == ""
    monkeypatch.setenv("RANK", "0")
    said = versions.on_start(found)
    assert f"began on sd-scripts {old[:8]}" in said and f"continues on {new[:8]}" in said
    assert shlex.split(said.partition("fit it: ")[2])[-1] == str(folder)
    assert versions.on_start(found) == "" and versions.used(run).commits == [old, new]
    assert [path.name for path in run.iterdir()] == [versions.FILE]
    monkeypatch.setenv("HANGPROOF_RUN", str(tmp_path / "gone"))
    assert "could not be noted in" in versions.on_start(found), "and the training starts"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"trainer": 1, "checkout": 2, "commits": 3}'])
def test_what_cannot_be_read_is_not_remembered(tmp_path, text):
    (tmp_path / versions.FILE).write_text(text)
    assert versions.used(tmp_path) is None


def test_the_way_back_is_one_command_that_keeps_other_files_and_what_was_changed_by_hand(checkout):
    folder, old, new = checkout
    (folder / "train_network.py").write_text("edited")
    with pytest.raises(versions.VersionError, match=r"changed by hand \(train_network.py\)"):
        versions.go_back(folder, TRAINER, old)
    assert (folder / "train_network.py").read_text() == "edited" and versions.commit(folder) == new
    (folder / "unpacked").mkdir()
    with pytest.raises(versions.VersionError, match="not a git repository"):  # and not that of the folder around it
        versions.go_back(folder / "unpacked", TRAINER, old)
    git(folder, "checkout", "--quiet", "train_network.py")
    (folder / "mine.txt").write_text("not in git")
    assert versions.way_back(folder, TRAINER, old) == [["git", "-C", str(folder), "checkout", "--detach", old]]
    versions.go_back(folder, TRAINER, old)
    assert versions.commit(folder) == old and (folder / "train_network.py").read_text() == "old\n"
    assert (folder / "mine.txt").read_text() == "not in git" and git(folder, "rev-parse", "main") == new


@pytest.mark.parametrize("depth", [["--depth", "1"], []], ids=["shallow", "whole"])
def test_an_old_commit_that_is_not_there_is_fetched_and_history_stays_whole(checkout, tmp_path, depth):
    folder, old, _new = checkout
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", *depth, "--branch", "main", folder.as_uri(), str(clone))
    if not depth:
        git(folder, "checkout", "--quiet", "-b", "other", old)
        (folder / "train_network.py").write_text("other")
        old = commit(folder, "other")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    trainer = TRAINER.__class__(**{**vars(TRAINER), "url": folder.as_uri()})
    assert not versions.has(clone, old)
    versions.go_back(clone, trainer, old)
    assert versions.commit(clone) == old
    assert (git(clone, "rev-parse", "--is-shallow-repository") == "true") == bool(depth)
