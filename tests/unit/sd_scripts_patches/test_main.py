"""The launcher and its check: wrong usage, how a script ends, and what is refused before anything is loaded."""

import json
import os

import pytest
import record_shapes
from patches_helpers import launch, write

from guards import gate, heartbeat
from sd_scripts_patches import __main__ as main, compatibility, registry
from sd_scripts_patches.trainers import TRAINERS


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "usage:"),
        (["check"], "usage:"),
        (["-m"], "usage:"),
        (["no-such-script.py"], "no-such-script.py: script not found"),
        (["x.py", "--hangproof_nonsense=3"], "unknown flag --hangproof_nonsense=3"),
        (["x.py", "--hangproof_npz_timeout_s=soon"], "HANGPROOF_NPZ_TIMEOUT_S='soon': expected seconds"),
        (["x.py", "--hangproof_skip_images", "many"], "HANGPROOF_SKIP_IMAGES='many': expected a whole number"),
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
        ("raise KeyboardInterrupt", 130, "failed", "KeyboardInterrupt", ""),
    ],
)
def test_the_end_of_a_script_is_the_end_of_the_launcher_and_on_record(tmp_path, body, code, outcome, note, said):
    """Exit handlers run, and output is flushed."""
    before = "import atexit, sys\natexit.register(lambda: print('bye'))\nsys.stdout.write('no newline')\n"
    script, beats = write(tmp_path, "script.py", f"{before}{body}\n"), tmp_path / "beats"
    without = ["--hangproof_without=exit"] if code == 3 else []
    done = launch(script, "--lr=1", *without, HANGPROOF_HEARTBEAT=str(beats))
    assert (done.returncode, done.stdout) == (code, "no newlinebye\n") and said in done.stderr, done.stderr
    (beat,) = heartbeat.read_all(beats)
    assert (beat.outcome, beat.note) == (outcome, note)


def test_what_is_open_in_a_checkout_is_reported_by_the_check_and_refused_at_a_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a flag sets a variable
    assert main.main(["check", str(tmp_path)]) == 1
    assert "is not an sd-scripts checkout" in capsys.readouterr().err
    assert main.main(["check", "--help"]) == 0 and capsys.readouterr().out.startswith("usage:")
    write(tmp_path, "train_network.py", "print('trained')\n")
    for name in ("library", "networks"):
        (tmp_path / name).mkdir()
    assert main.main(["check", str(tmp_path), "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    missing = [row["patch"] for row in found["patches"] if row["verdict"] in compatibility.OPEN]
    assert found["checkout"] == str(tmp_path) and found["ok"] is False and "heartbeat" in missing
    assert [row["patch"] for row in found["patches"]] == [patch.name for patch in registry.patches()]
    assert sum(found["counts"].values()) == sum(len(row["targets"]) for row in found["patches"])
    assert err == f"sd_scripts_patches: not guarded: {', '.join(missing)}; see the table\n"
    assert main.main([str(tmp_path / "train_network.py"), "--hangproof_strict=1"]) == 1
    out, err = capsys.readouterr()
    assert "incompatible with" in err and not out


def test_a_target_that_a_run_does_not_rely_on_is_named_and_the_run_starts(tmp_path):
    (facts,) = [one for one in record_shapes.load() if one["commit"] == TRAINERS["sd-scripts"].commit]
    folder = record_shapes.write_checkout(facts, tmp_path)
    (folder / "library/custom_offloading_utils.py").unlink()
    end = "if __name__ == '__main__':\n    print('trained')\n"
    script = write(folder, "train_network.py", f"{(folder / 'train_network.py').read_text()}\n{end}")
    reads_code = [one.name for one in registry.patches() if any(target.check for target in one.targets)]
    done = launch(script, f"--hangproof_without={','.join(reads_code)}")
    missing = "library.custom_offloading_utils:Offloader._wait_blocks_move is missing"
    assert done.stdout == "trained\n", done.stderr
    assert f"not guarded, and not used by this run: {missing}" in done.stderr


def test_a_standby_caches_nothing(tmp_path, monkeypatch):
    """The attempt that trains has finished the caches."""
    monkeypatch.setenv(gate.VARIABLE, "99")
    assert main.main([str(write(tmp_path, "zimage_cache_latents.py", "1 / 0\n"))]) == 0
