"""The launcher and its check: wrong usage, how a script ends, and what is refused before anything is loaded."""

import json
import os

import pytest
from patches_helpers import launch, write

from guards import gate, heartbeat
from sd_scripts_patches import __main__ as main
from sd_scripts_patches import compatibility, registry


def test_a_folder_without_sd_scripts_is_refused_by_name(tmp_path, capsys):
    assert main.main(["check", str(tmp_path)]) == 1
    assert "is not an sd-scripts checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "usage:"),
        (["check"], "usage:"),
        (["-m"], "usage:"),
        (["no-such-script.py"], "no-such-script.py: script not found"),
        (["x.py", "--hangproof_nonsense=3"], "unknown flag --hangproof_nonsense=3"),
        (["x.py", "--hangproof_npz_timeout_s=soon"], "HANGPROOF_NPZ_TIMEOUT_S='soon': expected seconds"),
        (["x.py", "--hangproof_npz_timeout_s=nan"], "expected seconds"),
        (["x.py", "--hangproof_without=nothing"], "unknown patch: nothing"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_message(args, message, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a flag sets a variable
    registry.patches.cache_clear()
    assert main.main(args) == 2
    assert message in capsys.readouterr().err
    registry.patches.cache_clear()


@pytest.mark.parametrize(
    ("body", "code", "outcome", "note", "said"),
    [
        ("if __name__ == '__main__':\n    raise SystemExit(3)", 3, "failed", "exit code 3", ""),
        ("raise SystemExit('no data set')", 1, "failed", "exit code 1", "no data set"),
        ("raise SystemExit", 0, "done", "", ""),
        ("import sys; assert sys.argv[1:] == ['--lr=1']", 0, "done", "", "only installed packages are guarded"),
        ("1 / 0", 1, "failed", "ZeroDivisionError: division by zero", "ZeroDivisionError"),
    ],
)
def test_the_end_of_a_script_is_the_end_of_the_launcher_and_on_record(tmp_path, body, code, outcome, note, said):
    script, beats = write(tmp_path, "script.py", f"{body}\n"), tmp_path / "beats"
    done = launch(script, "--lr=1", HANGPROOF_HEARTBEAT=str(beats))
    assert done.returncode == code and said in done.stderr, done.stderr
    (beat,) = heartbeat.read_all(beats)
    assert (beat.outcome, beat.note) == (outcome, note)


@pytest.fixture
def bare(tmp_path):
    """A folder that looks like a checkout and has none of what is guarded."""
    for name in ("train_network.py", "library/x.py", "networks/x.py", "elsewhere/x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("print('trained')\n")
    return tmp_path


def test_a_check_reports_each_patch_and_names_those_that_are_open(bare, capsys):
    assert main.main(["check", str(bare), "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    missing = [row["patch"] for row in found["patches"] if row["verdict"] in compatibility.OPEN]
    assert found["checkout"] == str(bare) and found["ok"] is False and "heartbeat" in missing
    assert [row["patch"] for row in found["patches"]] == [patch.name for patch in registry.patches()]
    assert sum(found["counts"].values()) == sum(len(row["targets"]) for row in found["patches"])
    assert err == f"sd_scripts_patches: not guarded: {', '.join(missing)}; see the table\n"
    assert main.check([str(bare)]) == 1
    out, _ = capsys.readouterr()
    assert f"{len(found['patches'])} patches checked with {bare}: {found['counts']['guarded']} guarded, " in out


def test_a_script_that_would_train_unguarded_is_refused_and_a_standby_caches_nothing(bare):
    done = launch(bare / "train_network.py")
    assert done.returncode == 1 and "missing" in done.stderr and not done.stdout
    caches = write(bare / "elsewhere", "zimage_cache_latents.py", "print('cached')\n")
    done = launch(caches, **{gate.VARIABLE: "99"})
    assert (done.returncode, done.stdout) == (0, ""), "the attempt that trains has finished the caches"
