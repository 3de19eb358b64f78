"""Does a patch fit? Judged against the real checkout, and against copies of it that have moved on."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_sd_scripts as tiny

from sd_scripts_patches import __main__ as main
from sd_scripts_patches import fits, patch, registry

ROOT = Path(__file__).resolve().parent.parent


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


def test_every_patch_fits_the_pinned_checkout():
    tiny.need(run=False)
    done = command("check", tiny.checkout(), "--json")
    answer = json.loads(done.stdout.splitlines()[-1])
    verdicts = {p["patch"]: p["verdict"] for p in answer["patches"]}
    assert done.returncode == 0 and answer["ok"], done.stdout
    assert set(verdicts) == set(registry.NAMES)
    assert set(verdicts.values()) == {"fits"}, verdicts
    for finding in answer["patches"]:
        assert finding["why"] and finding["binds"], finding


def test_a_renamed_method_is_named_and_the_check_fails(copy):
    edit(copy / "library/custom_offloading_utils.py", "_wait_blocks_move", "_await_block")
    done = command("check", copy)
    assert done.returncode == 1
    assert "does not fit  block_swap" in done.stdout
    assert "library.custom_offloading_utils:Offloader._wait_blocks_move: there is no '_wait_blocks_move'" in done.stdout
    assert done.stderr.strip() == "sd_scripts_patches: does not fit: block_swap"


def checked(copy, capsys) -> tuple[int, str]:
    """As the command does, in this process: exit code, table."""
    return main.check([str(copy)]), capsys.readouterr().out


def test_changed_parameters_do_not_fit(copy, capsys):
    edit(
        copy / "library/custom_offloading_utils.py",
        "def _wait_blocks_move(self, block_idx)",
        "def _wait_blocks_move(self, pool, block_idx)",
    )
    code, told = checked(copy, capsys)
    assert code == 1 and "takes (self, pool, block_idx), expected (self, block_idx, …)" in told


def test_a_cache_that_is_read_in_another_way_does_not_fit(copy, capsys):
    edit(copy / "library/strategy_flux.py", "data = np.load(npz_path)", "data = np.load(npz_path, mmap_mode='r')")
    code, told = checked(copy, capsys)
    assert code == 1 and "is no read that is known" in told


def test_a_family_that_is_not_there_is_not_needed(copy, capsys):
    for path in [
        *copy.glob("library/*anima*.py"),
        *copy.glob("networks/*anima*.py"),
        *copy.glob("library/*lumina*.py"),
    ]:
        path.unlink()
    code, told = checked(copy, capsys)
    assert code == 0, told
    assert "library.strategy_anima:np (not needed)" in told


def test_a_run_that_does_not_fit_stops_before_anything_is_loaded(copy):
    edit(copy / "library/custom_offloading_utils.py", "_wait_blocks_move", "_await_block")
    (copy / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = command(copy / "flux_train_network.py", "--help")
    assert done.returncode == 1
    assert "there is no '_wait_blocks_move'" in done.stderr and "nothing was loaded" in done.stderr
    assert "torch was imported" not in done.stderr


def test_a_folder_without_sd_scripts_is_refused_by_name(tmp_path):
    done = command("check", tmp_path)
    assert done.returncode == 1 and "no sd-scripts checkout" in done.stderr


def test_the_check_imports_nothing_of_sd_scripts(copy):
    """A checkout whose modules would fail on import is judged all the same."""
    for path in copy.rglob("*.py"):
        path.write_text("raise SystemExit('imported')\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    done = command("check", copy)
    assert "imported" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "args, says",
    [
        ([], "usage:"),
        (["check"], "usage:"),
        (["-m"], "usage:"),
        (["no-such-script.py"], "no-such-script.py: no such script"),
        (["x.py", "--hangproof_nonsense=3"], "--hangproof_nonsense=3: no such flag"),
        (["x.py", "--hangproof_npz_timeout_s=soon"], "HANGPROOF_NPZ_TIMEOUT_S='soon': expected seconds"),
        (["x.py", "--hangproof_npz_timeout_s=nan"], "expected seconds"),
        (["x.py", "--hangproof_without=nothing"], "no such patch: nothing"),
    ],
)
def test_wrong_usage_is_code_2_and_says_what(args, says):
    done = command(*args)
    assert done.returncode == 2 and says in done.stderr


def test_names_are_found_where_python_would_find_them():
    tree = ast.parse(
        "import numpy as np\ntry:\n    import fast\nexcept ImportError:\n    def f(a, b): ...\n"
        "if True:\n    class A:\n        class B:\n            def g(self, x=1): ...\n"
    )
    assert fits._find(tree, "np") and fits._find(tree, "fast") and fits._find(tree, "f")
    assert fits._parameters(fits._find(tree, "A.B.g")) == ("self", "x")
    with pytest.raises(patch.DoesNotFit, match="no 'h'"):
        fits._find(tree, "A.h")


def test_find_one_refuses_none_and_several():
    tree = ast.parse("a = 1\nb = 2\nb = 2\n")

    def assigns(name):
        return lambda n: isinstance(n, ast.Assign) and n.targets[0].id == name

    assert patch.find_one(tree, assigns("a"), "a = …").lineno == 1
    for name, found in (("b", 2), ("c", 0)):
        with pytest.raises(patch.DoesNotFit, match=f"found {found}"):
            patch.find_one(tree, assigns(name), f"{name} = …")
