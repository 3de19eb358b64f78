"""Where names are found, which folder is a checkout of what, and what wrong usage says: without a checkout."""

import ast
import os

import pytest

from sd_scripts_patches import __main__ as main
from sd_scripts_patches import compatibility, hooks, patch, registry


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


def test_names_are_found_where_python_finds_them(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library/m.py").write_text(
        "import numpy as np\ntry:\n    import fast\nexcept ImportError:\n    def f(a, b): ...\n"
        "if True:\n    class A:\n        class B:\n            def g(self, x=1): ...\n"
    )

    def found(name, **more):
        return compatibility.check_target(patch.Target("library.m", name, **more), tmp_path)

    for name in ("np", "fast", "f", "A.B.g"):
        assert found(name).verdict == "guarded", name
    assert found("A.B.g", params=("self", "x")).verdict == "guarded"
    assert "takes (self, x), expected (x" in found("A.B.g", params=("x",)).reason
    assert found("A.h").verdict == "missing" and "'h' is missing" in found("A.h").reason


def test_find_one_refuses_none_and_several():
    tree = ast.parse("a = 1\nb = 2\nb = 2\n")

    def assigns(name):
        return lambda n: n.targets[0].id == name

    assert patch.find_one(tree, ast.Assign, assigns("a"), "a = …").lineno == 1
    for name, found in (("b", 2), ("c", 0)):
        with pytest.raises(patch.Incompatible, match=f"found {found}"):
            patch.find_one(tree, ast.Assign, assigns(name), f"{name} = …")


def checkout(folder, *files):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_a_checkout_is_recognized_by_its_modules_wherever_its_scripts_lie(tmp_path):
    root = checkout(tmp_path / "m", "src/musubi_tuner/training/trainer_base.py", "src/musubi_tuner/dataset/x.py")
    expected = compatibility.Checkout(compatibility.MUSUBI, root / "src")
    assert compatibility.find_checkout(root) == expected
    assert compatibility.find_checkout(root / "src/musubi_tuner") == expected
    other = checkout(tmp_path / "s", "train_network.py", "library/x.py", "networks/x.py")
    assert compatibility.find_checkout(other) == compatibility.Checkout(compatibility.SD_SCRIPTS, other)
    assert compatibility.find_checkout(tmp_path) is None


def test_a_script_is_known_by_the_name_of_its_module(tmp_path, monkeypatch):
    monkeypatch.setenv(hooks.CHECKOUT_VARIABLE, str(tmp_path / "src"))
    assert hooks.module_name(tmp_path / "src/musubi_tuner/wan_train.py") == "musubi_tuner.wan_train"
    assert hooks.module_name(tmp_path / "zimage_train_network.py") == "zimage_train_network"


def test_the_shared_patches_keep_only_what_is_installed():
    for one in registry.patches(compatibility.MUSUBI):
        assert not [target for target in one.targets if target.module.startswith(("library.", "networks."))]
    assert {one.name for one in registry.patches(compatibility.MUSUBI)} == set(registry.MUSUBI_NAMES)
