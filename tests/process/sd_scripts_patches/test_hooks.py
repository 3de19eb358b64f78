"""Modules and scripts that are rewritten and patched as they are imported."""

import children
import pytest
from patches_helpers import write

from sd_scripts_patches import hooks

REWRITE = """
import ast
from sd_scripts_patches.patch import Patch, Target, find_function, find_one, wrap

def rewrite(tree):
    node = find_one(find_function(tree, "Thing.value"), ast.Constant, lambda n: n.value == 1, "the 1")
    node.value = 10
    return tree

def rewrite_main(tree):
    find_one(tree, ast.Constant, lambda n: n.value == "plain", "the word").value = "rewritten"
    return tree

VALUE = Target("thing", "Thing.value", make=lambda original: lambda self: original(self) + 5)
WHO = Target("script", "Here.who", make=lambda original: lambda: original() + " and patched")

PATCH = Patch(name="probe", why="a test", targets=(VALUE, WHO), rewrites=((VALUE, rewrite), (WHO, rewrite_main)))
"""
THING = "class Thing:\n    def value(self):\n        return 1\n"
SCRIPT = """
from thing import Thing
class Here:
    @staticmethod
    def who():
        return "plain"
if __name__ == "__main__":
    print(Thing().value(), Here.who())
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from sd_scripts_patches import hooks, runner
import probe_patch
hooks.install([probe_patch.PATCH], Path({folder!r}))
runner.run_script(Path({folder!r}) / "script.py", [])
"""
TOO_EARLY = "import sys\nsys.path.insert(0, {folder!r})\nimport thing\n"


def drive(folder, thing: str = THING, script: str = SCRIPT, before: str = ""):
    for name, text in {"probe_patch.py": REWRITE, "thing.py": thing, "script.py": script}.items():
        write(folder, name, text)
    return children.run((before + DRIVER).format(folder=str(folder)))


def test_a_module_and_the_script_itself_are_rewritten_and_patched(tmp_path):
    done = drive(tmp_path)
    assert done.stdout == "15 rewritten and patched\n", done.stderr
    assert drive(tmp_path).stdout == done.stdout  # a cached .pyc of the original would be used here


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"thing": THING.replace("1", "1 + 1")}, "patch probe: thing: the 1: expected exactly one, found 2"),
        ({"thing": THING + "del Thing.value\n"}, "patch probe: thing:Thing.value: not defined there"),
        ({"before": TOO_EARLY}, "thing was loaded without its rewrite (probe)"),
        ({"script": SCRIPT.split("if __name__")[0] + "print(Here.who())\n"}, "there is no `if __name__"),
    ],
)
def test_what_cannot_be_rewritten_or_patched_is_refused_by_name(tmp_path, changed, reason):
    done = drive(tmp_path, **changed)
    assert done.returncode == 1 and reason in done.stderr and done.stdout == ""


def test_a_script_is_known_by_the_name_of_its_module(tmp_path, monkeypatch):
    monkeypatch.setenv(hooks.CHECKOUT_VARIABLE, str(tmp_path / "src"))
    assert hooks.module_name(tmp_path / "src/musubi_tuner/wan_train.py") == "musubi_tuner.wan_train"
    assert hooks.module_name(tmp_path / "zimage_train_network.py") == "zimage_train_network"
