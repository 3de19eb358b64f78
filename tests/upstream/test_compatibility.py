"""Compatibility of the patches with the real checkout and with copies of it that have changed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_sd_scripts as tiny

from sd_scripts_patches import __main__ as main
from sd_scripts_patches import registry

ROOT = Path(__file__).resolve().parents[2]


def command(*args, cwd=ROOT, **env):
    work = Path(env.pop("work", ROOT))
    return subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches", *map(str, args)],
        cwd=cwd, env=tiny.environment(work, **env), check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path):
    """A copy of the checkout's Python files, to be broken."""
    tiny.need(run=False)
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


def test_every_patch_is_compatible_with_the_pinned_checkout():
    tiny.need(run=False)
    done = command("check", tiny.checkout(), "--json")
    answer = json.loads(done.stdout.splitlines()[-1])
    verdicts = {p["patch"]: p["verdict"] for p in answer["patches"]}
    assert done.returncode == 0 and answer["ok"], done.stdout
    assert set(verdicts) == set(registry.NAMES)
    assert set(verdicts.values()) <= {"guarded", "moved"}, verdicts
    for finding in answer["patches"]:
        assert finding["why"] and finding["targets"], finding


def test_a_renamed_method_is_named_and_the_check_fails(copy):
    edit(copy / "library/custom_offloading_utils.py", "_wait_blocks_move", "_await_block")
    done = command("check", copy)
    assert done.returncode == 1
    assert "missing     block_swap" in done.stdout
    assert "library.custom_offloading_utils:Offloader._wait_blocks_move: '_wait_blocks_move' is missing" in done.stdout
    assert "open: a swap thread that is stuck on a CUDA stream" in done.stdout
    assert done.stderr.strip() == "sd_scripts_patches: not guarded: block_swap; see the table"


def checked(copy, capsys) -> tuple[int, str]:
    """Return exit code and table of the command, run in this process."""
    return main.check([str(copy)]), capsys.readouterr().out


def test_changed_parameters_are_incompatible(copy, capsys):
    edit(
        copy / "library/custom_offloading_utils.py",
        "def _wait_blocks_move(self, block_idx)",
        "def _wait_blocks_move(self, pool, block_idx)",
    )
    code, table = checked(copy, capsys)
    assert code == 1 and "takes (self, pool, block_idx), expected (self, block_idx, …)" in table


def test_another_way_to_read_a_cache_is_incompatible(copy, capsys):
    edit(copy / "library/strategy_flux.py", "data = np.load(npz_path)", "data = np.load(npz_path, mmap_mode='r')")
    code, table = checked(copy, capsys)
    assert code == 1 and "is not a guarded form of np.load" in table


def test_a_missing_family_is_not_needed(copy, capsys):
    for path in [
        *copy.glob("library/*anima*.py"),
        *copy.glob("networks/*anima*.py"),
        *copy.glob("library/*lumina*.py"),
    ]:
        path.unlink()
    code, table = checked(copy, capsys)
    assert code == 0, table
    assert "not needed  library.strategy_anima:np" in table


def test_a_run_that_relies_on_a_missing_target_stops_before_anything_is_loaded(copy):
    edit(copy / "library/custom_offloading_utils.py", "_wait_blocks_move", "_await_block")
    (copy / "torch.py").write_text("raise SystemExit('torch was imported')")
    script = copy / "flux_train_network.py"
    for flags in (["--blocks_to_swap", "4"], ["--blocks_to_swap=4"], ["--hangproof_strict", "1"]):
        done = command(script, "--help", *flags)
        assert done.returncode == 1
        assert "'_wait_blocks_move' is missing" in done.stderr and "Nothing was loaded" in done.stderr
        assert "torch was imported" not in done.stderr


def test_a_run_that_does_not_use_a_missing_target_starts_and_names_it(copy):
    edit(copy / "library/custom_offloading_utils.py", "_wait_blocks_move", "_await_block")
    script = copy / "flux_train_network.py"
    script.write_text("raise SystemExit('the script runs')\n" + script.read_text(encoding="utf-8"), encoding="utf-8")
    done = command(script)
    assert (
        "not guarded, and not used by this run: library.custom_offloading_utils:Offloader._wait_blocks_move is missing"
        in done.stderr
    )
    assert "the script runs" in done.stderr


def test_the_check_imports_nothing_of_sd_scripts(copy):
    """A checkout whose modules fail on import can still be checked."""
    for path in copy.rglob("*.py"):
        path.write_text("raise SystemExit('imported')\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    done = command("check", copy)
    assert "imported" not in done.stderr, done.stderr
