"""The launcher runs a script as Python does: arguments, paths, exit codes, spawned workers. No checkout needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_sd_scripts as tiny

from guards import heartbeat

ROOT = Path(__file__).resolve().parents[3]

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


def test_a_script_sees_what_python_shows_it(tmp_path):
    write(tmp_path, "helper.py", "VALUE = 7\n")
    script = write(tmp_path, "report.py", REPORT)
    args = ["--a", "1", "--hangproof_npz_timeout_s", "9", "b c", "--hangproof_exit_grace_s=3"]
    seen = json.loads(launch(script, *args).stdout)
    plain = subprocess.run([sys.executable, str(script), "--a", "1", "b c"], check=True, capture_output=True, text=True)
    assert seen == json.loads(plain.stdout)
    assert seen["argv"] == ["--a", "1", "b c"] and seen["main"]


@pytest.mark.parametrize(
    "ending, code, outcome, note",
    [
        ("pass", 0, "done", ""),
        ("raise SystemExit(4)", 4, "failed", "exit code 4"),
        ("raise SystemExit('no')", 1, "failed", None),
        ("1 / 0", 1, "failed", "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", 130, None, None),
    ],
)
def test_exit_codes_are_the_scripts_own_and_the_outcome_is_in_the_heartbeat(tmp_path, ending, code, outcome, note):
    """Exit handlers run, and output is flushed."""
    before = "import atexit, sys\natexit.register(lambda: print('bye'))\nsys.stdout.write('no newline')\n"
    done = launch(write(tmp_path, "ends.py", before + ending + "\n"), HANGPROOF_HEARTBEAT=str(tmp_path / "hb"))
    assert (done.returncode, done.stdout) == (code, "no newlinebye\n"), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (ending == "1 / 0")
    assert ("no\n" in done.stderr) == ("'no'" in ending)
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert outcome in (None, beat.outcome) and note in (None, beat.note)


UPLOAD = """
import os, sys, time
from guards import heartbeat
from sd_scripts_patches import hub
def upload():
    time.sleep(float(sys.argv[1]))
    (beat,) = heartbeat.read_all(os.environ["HANGPROOF_HEARTBEAT"])
    print("in the upload:", beat.phase, beat.outcome, beat.note, flush=True)
hub.fire_in_daemon(upload)
"""


def test_a_run_is_done_only_after_its_uploads(tmp_path):
    """From the outcome on, the monitor allows little time: an upload that is still in progress would be killed."""
    script = write(tmp_path, "uploads.py", UPLOAD)
    done = launch(script, "1.5", HANGPROOF_HEARTBEAT=str(tmp_path / "hb"))
    assert done.returncode == 0
    assert "in the upload: end running waiting for 1 uploads to the hub\n" in done.stdout, done.stderr
    (beat,) = heartbeat.read_all(tmp_path / "hb")
    assert (beat.phase, beat.outcome) == ("end", "done")


def test_a_failed_run_reports_its_error_before_it_waits_for_uploads(tmp_path):
    script = write(tmp_path, "uploads.py", UPLOAD + "1 / 0\n")
    done = launch(script, "1.5", HANGPROOF_HEARTBEAT=str(tmp_path / "hb"))
    assert "in the upload: import failed ZeroDivisionError: division by zero\n" in done.stdout, done.stderr
    late = launch(script, "3600", "--hangproof_exit_grace_s=2")
    assert late.returncode == 1
    assert "hangproof: waited 1 s for 1 uploads to the hub; exiting without them" in late.stderr


HYGIENE = """
import os, sys
print("caption: caf\u00e9 \u2192 \u732b", sys.stdout.encoding, sys.stdout.line_buffering)
print(*(os.environ[n] for n in ("TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED", "PYTHONUTF8")))
"""


def test_output_is_utf8_and_unbuffered_and_tokenizers_start_no_threads(tmp_path):
    """In an ASCII environment, in which a caption would end the run."""
    script = write(tmp_path, "hygiene.py", HYGIENE)
    left_out = ("PYTHONUNBUFFERED", "PYTHONUTF8", "TOKENIZERS_PARALLELISM")
    env = {k: v for k, v in tiny.environment(tmp_path).items() if k not in left_out and not k.startswith("LC_")}
    env |= {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "sd_scripts_patches", str(script)]
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "caption: caf\u00e9 \u2192 \u732b utf-8 True\nfalse 1 1\n"


LOADER = """
import sys, threading
from collections import namedtuple
import torch.utils.data.dataloader as module
from torch.utils.data import DataLoader

Point = namedtuple("Point", "x y")

class Data(list):
    def __getitem__(self, i):
        point, patches = super().__getitem__(i), str(module.__dict__.get("__hangproof__"))
        assert "'dataloader'" in patches and "'exit'" in patches, patches
        assert {type(point).__module__, __name__} <= {"__main__", "__mp_main__"}
        return point.x

def start_in_thread(loader):
    made = []
    thread = threading.Thread(target=lambda: made.append(iter(loader)))
    thread.start()
    thread.join()
    return made[0]

if __name__ == "__main__":
    for method in sys.argv[1:]:
        loader = DataLoader(Data(Point(x, 0) for x in (1, 2, 3)), num_workers=1, multiprocessing_context=method)
        print(method, [int(batch) for batch in start_in_thread(loader)], flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the signal at a parent's death is Linux's")
def test_loader_workers_live_with_the_patches_by_every_start_method_and_outlive_the_thread_that_starts_them(tmp_path):
    """A fork server is not the trainer, and a thread that starts workers may exit before them: neither kills a worker."""
    pytest.importorskip("torch")
    methods = ("fork", "spawn", "forkserver")
    done = launch(write(tmp_path, "loader.py", LOADER), *methods, timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"{method} [1, 2, 3]" for method in methods]


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
    assert drive(tmp_path).stdout == done.stdout  # a cached .pyc of the original would be used here


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"thing": THING.replace("1", "1 + 1")}, "patch probe: thing: the 1: expected exactly one, found 2"),
        ({"thing": THING + "del Thing.value\n"}, "patch probe: thing:Thing.value: not defined there"),
        ({"script": SCRIPT.split("if __name__")[0] + "print(Here.who())\n"}, "there is no `if __name__"),
    ],
)
def test_what_cannot_be_rewritten_or_patched_is_refused_by_name(tmp_path, changed, reason):
    done = drive(tmp_path, **changed)
    assert done.returncode == 1 and reason in done.stderr and done.stdout == ""


def test_a_module_that_was_imported_too_early_is_refused(tmp_path):
    write(tmp_path, "thing.py", THING)
    done = drive(tmp_path, before=f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import thing\n")
    assert "thing was loaded without its rewrite (probe)" in done.stderr and done.stdout == ""
