"""The launcher is python to the script it runs: arguments, paths, exit codes, spawned workers. No checkout needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_sd_scripts as tiny

ROOT = Path(__file__).resolve().parent.parent

REPORT = """
import json, sys
import helper
print(json.dumps({
    "argv": sys.argv[1:], "path0": sys.path[0], "name": __name__, "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(),
    "helper": helper.VALUE,
}))
if __name__ == "__main__":
    pass
"""


def launch(script: Path, *args: str, timeout_s: float = 240, **env: str):
    return subprocess.run(
        [sys.executable, "-m", "sd_scripts_patches", str(script), *args],
        cwd=ROOT, env=tiny.environment(script.parent, **env), check=False, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_script_sees_what_python_would_show_it(tmp_path):
    write(tmp_path, "helper.py", "VALUE = 7\n")
    script = write(tmp_path, "report.py", REPORT)
    args = ["--a", "1", "--hangproof_npz_timeout_s", "9", "b c", "--hangproof_exit_grace_s=3"]
    seen = json.loads(launch(script, *args).stdout)
    plain = subprocess.run([sys.executable, str(script), "--a", "1", "b c"], check=True, capture_output=True, text=True)
    assert seen == json.loads(plain.stdout)
    assert seen["argv"] == ["--a", "1", "b c"] and seen["main"]


@pytest.mark.parametrize(
    "ending, code",
    [
        ("pass", 0),
        ("raise SystemExit(4)", 4),
        ("raise SystemExit('no')", 1),
        ("raise SystemExit", 0),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_exit_codes_are_the_scripts_own(tmp_path, ending, code):
    done = launch(write(tmp_path, "ends.py", ending + "\n"))
    assert done.returncode == code, done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (ending == "1 / 0")
    assert ("no\n" in done.stderr) == ("'no'" in ending)


def test_how_it_ended_is_in_the_heartbeat(tmp_path):
    from guards import heartbeat

    for ending, outcome, note in [
        ("pass", "done", ""),
        ("1 / 0", "failed", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(4)", "failed", "exit code 4"),
    ]:
        launch(write(tmp_path, "ends.py", ending + "\n"), HANGPROOF_HEARTBEAT=str(tmp_path / "hb"))
        (beat,) = heartbeat.read_all(tmp_path / "hb")
        assert (beat.outcome, beat.note) == (outcome, note)


def test_exit_handlers_run_and_output_is_flushed(tmp_path):
    script = write(
        tmp_path,
        "bye.py",
        "import atexit, sys\natexit.register(lambda: print('bye'))\nsys.stdout.write('no newline')\n",
    )
    assert launch(script).stdout == "no newlinebye\n"


HYGIENE = """
import os, sys
print("caption: caf\u00e9 \u2192 \u732b", sys.stdout.encoding, sys.stdout.line_buffering)
print(*(os.environ[n] for n in ("TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED", "PYTHONUTF8")))
"""


def test_output_is_utf8_and_not_held_back_and_tokenizers_start_no_threads(tmp_path):
    """In an environment that says ASCII, where a caption would end the run."""
    script = write(tmp_path, "hygiene.py", HYGIENE)
    left_out = ("PYTHONUNBUFFERED", "PYTHONUTF8", "TOKENIZERS_PARALLELISM")
    env = {k: v for k, v in tiny.environment(tmp_path).items() if k not in left_out and not k.startswith("LC_")}
    env |= {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "sd_scripts_patches", str(script)]
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "caption: caf\u00e9 \u2192 \u732b utf-8 True\nfalse 1 1\n"


SPAWN = """
import multiprocessing as mp, sys
from collections import namedtuple
Point = namedtuple("Point", "x y")

def look(point):
    import torch.utils.data.dataloader as d
    return type(point).__module__, point.x, d.__dict__.get("__hangproof__"), __name__

if __name__ == "__main__":
    for method in sys.argv[1:]:
        with mp.get_context(method).Pool(1) as pool:
            print(*pool.apply(look, [Point(3, 4)]), sep="|")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has only spawn")
def test_workers_get_the_patches_whichever_way_they_are_started(tmp_path):
    done = launch(write(tmp_path, "spawn.py", SPAWN), "fork", "spawn", "forkserver", timeout_s=400)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert len(lines) == 3
    for module, x, patches, name in lines:
        assert module in ("__main__", "__mp_main__") and x == "3"
        assert "'dataloader'" in patches and "'exit'" in patches
        assert name in ("__main__", "__mp_main__")


REWRITE = """
import ast
from sd_scripts_patches.patch import Patch, Target, find_function, find_one, wrap

def rewrite(tree):
    node = find_one(find_function(tree, "Thing.value"), lambda n: isinstance(n, ast.Constant) and n.value == 1, "the 1")
    node.value = 10
    return tree

def rewrite_main(tree):
    find_one(tree, lambda n: isinstance(n, ast.Constant) and n.value == "plain", "the word").value = "rewritten"
    return tree

def apply(module):
    wrap(module, "Thing.value", lambda original: lambda self: original(self) + 5)

def apply_main(module):
    wrap(module, "Here.who", lambda original: lambda: original() + " and patched")

PATCH = Patch(name="probe", why="a test", apply={"thing": apply, "script": apply_main}, rewrite={"thing": rewrite, "script": rewrite_main})
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
hooks.install([probe_patch.PATCH])
runner.run_script(Path({folder!r}) / "script.py", [])
"""


def drive(folder: Path, thing: str = THING, script: str = SCRIPT, before: str = ""):
    for name, text in {"probe_patch.py": REWRITE, "thing.py": thing, "script.py": script}.items():
        write(folder, name, text)
    code = before + DRIVER.format(folder=str(folder))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=240
    )


def test_a_module_and_the_script_itself_are_rewritten_and_patched(tmp_path):
    done = drive(tmp_path)
    assert done.stdout == "15 rewritten and patched\n", done.stderr
    assert drive(tmp_path).stdout == done.stdout  # a cached .pyc of the original would show here


def test_a_rewrite_composes_with_other_import_hooks(tmp_path):
    before = (
        "import importlib.abc, sys\n"
        "class L(importlib.abc.Loader):\n"
        "    def __init__(self, inner): self.inner = inner\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, m):\n        self.inner.exec_module(m); m.Thing.seen = True; print('other hook')\n"
        "class F:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name != 'thing': return None\n"
        "        from importlib.machinery import PathFinder\n"
        "        spec = PathFinder.find_spec(name, path); spec.loader = L(spec.loader); return spec\n"
        "sys.meta_path.insert(0, F())\n"
    )
    assert drive(tmp_path, before=before).stdout == "other hook\n15 rewritten and patched\n"


def test_what_cannot_be_rewritten_is_refused_with_the_patchs_name(tmp_path):
    done = drive(tmp_path, thing=THING.replace("1", "1 + 1"))
    assert done.returncode == 1 and "patch probe: thing: the 1: looked for exactly one, found 2" in done.stderr
    assert done.stdout == ""


def test_a_name_that_is_gone_at_run_time_is_refused(tmp_path):
    done = drive(tmp_path, thing=THING + "del Thing.value\n")
    assert "patch probe: thing:Thing.value: not defined there" in done.stderr and done.stdout == ""


def test_a_module_that_was_imported_too_early_is_refused(tmp_path):
    write(tmp_path, "thing.py", THING)
    done = drive(tmp_path, before=f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import thing\n")
    assert "thing was loaded without its rewrite (probe)" in done.stderr and done.stdout == ""


def test_a_script_without_a_seam_for_its_patches_is_refused(tmp_path):
    done = drive(tmp_path, script=SCRIPT.split("if __name__")[0] + "print(Here.who())\n")
    assert "no `if __name__" in done.stderr and done.stdout == ""
