"""Compatibility of the patches with the real checkout and with copies of it that have changed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import record_shapes
import tiny_sd_scripts as tiny

from sd_scripts_patches import __main__ as main
from sd_scripts_patches import registry, versions


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches", *map(str, args)],
        cwd=tiny.ROOT, env=tiny.environment(tiny.ROOT), check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture
def copy(sd_scripts, tmp_path):
    """A copy of the checkout's Python files, to be broken."""
    source, folder = tiny.checkout(), tmp_path / "sd-scripts"
    folder.mkdir()
    for path in source.glob("*.py"):
        shutil.copy(path, folder)
    for package in ("library", "networks"):
        shutil.copytree(source / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_every_patch_is_compatible_with_the_pinned_checkout(sd_scripts):
    done = command("check", tiny.checkout(), "--json")
    answer = json.loads(done.stdout.splitlines()[-1])
    verdicts = {p["patch"]: p["verdict"] for p in answer["patches"]}
    assert done.returncode == 0 and answer["ok"], done.stdout
    assert set(verdicts) == set(registry.NAMES)
    assert set(verdicts.values()) <= {"guarded", "moved"}, verdicts
    for finding in answer["patches"]:
        assert finding["why"] and finding["targets"], finding


def checked(copy, capsys) -> tuple[int, str, str]:
    """Return exit code, table and errors of the command, run in this process."""
    return main.check([str(copy)]), *capsys.readouterr()


def renamed(copy):
    edit(copy / "library/custom_offloading_utils.py", "_wait_blocks_move", "_await_block")


def test_a_renamed_method_is_named_and_the_check_fails_and_imports_nothing(copy, capsys):
    renamed(copy)
    for path in copy.rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8") + "\nraise SystemExit('imported')\n", encoding="utf-8")
    code, table, errors = checked(copy, capsys)
    assert code == 1 and "missing     block_swap" in table
    assert "library.custom_offloading_utils:Offloader._wait_blocks_move: '_wait_blocks_move' is missing" in table
    assert "open: a swap thread that is stuck on a CUDA stream" in table
    assert errors.strip() == "sd_scripts_patches: not guarded: block_swap; see the table"


def test_a_missing_family_is_not_needed(copy, capsys):
    for pattern in ("library/*anima*.py", "networks/*anima*.py", "library/*lumina*.py"):
        for path in copy.glob(pattern):
            path.unlink()
    code, table, _ = checked(copy, capsys)
    assert code == 0 and "not needed  library.strategy_anima:AnimaTextEncoderOutputsCachingStrategy" in table, table


def test_a_run_that_relies_on_a_missing_target_stops_before_anything_is_loaded_and_another_one_names_it(copy):
    renamed(copy)
    (copy / "torch.py").write_text("raise SystemExit('torch was imported')")
    script = copy / "flux_train_network.py"
    for flags in (["--blocks_to_swap=4"], ["--hangproof_strict", "1"]):
        done = command(script, "--help", *flags)
        assert done.returncode == 1
        assert "'_wait_blocks_move' is missing" in done.stderr and "Nothing was loaded" in done.stderr
        assert "torch was imported" not in done.stderr
    (copy / "torch.py").unlink()
    script.write_text("raise SystemExit('the script runs')\n" + script.read_text(encoding="utf-8"), encoding="utf-8")
    said = command(script).stderr
    place = "library.custom_offloading_utils:Offloader._wait_blocks_move"
    assert f"not guarded, and not used by this run: {place} is missing" in said and "the script runs" in said


def recorded(checkout):
    """What is recorded of this checkout's commit. After another pin: tests/support/record_shapes.py CHECKOUT…"""
    (facts,) = [facts for facts in record_shapes.load() if facts["commit"] == versions.commit(checkout)]
    return facts


def test_what_is_recorded_of_sd_scripts_is_what_the_checkout_has(sd_scripts):
    assert record_shapes.record(sd_scripts) == recorded(sd_scripts)


def test_what_is_recorded_of_musubi_tuner_is_what_the_checkout_has(musubi):
    assert record_shapes.record(musubi) == recorded(musubi)


def test_every_patch_of_musubi_tuner_is_compatible(musubi, capsys):
    assert main.check([str(musubi)]) == 0
    table = capsys.readouterr().out
    assert f"{len(registry.MUSUBI_NAMES)} patches checked with {musubi}: " in table
    assert ", 0 moved, 0 changed, 0 missing, 0 not needed" in table
