"""The launcher runs a script as Python does: arguments, paths, spawned workers. No checkout needed."""

import json
import sys

import children
import pytest
from patches_helpers import launch, write
from runs_helpers import python

from sd_scripts_patches import runner

REPORT = """
import json, sys
import helper
print(json.dumps({
    "argv": sys.argv[1:], "path": sys.path, "name": __name__, "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(), "helper": helper.VALUE,
}))
if __name__ == "__main__":
    pass
"""


def test_a_script_and_a_module_see_what_python_shows_them(tmp_path):
    """A module also finds the modules beside it."""
    write(tmp_path, "helper.py", "VALUE = 7\n")
    script = write(tmp_path, "report.py", REPORT)
    args = ["--a", "1", "--hangproof_npz_timeout_s", "9", "b c", "--hangproof_exit_grace_s=3"]
    seen = json.loads(python("-m", "sd_scripts_patches", str(script), *args, PYTHONPATH="").stdout)
    plain = json.loads(python(str(script), "--a", "1", "b c", PYTHONPATH="").stdout)
    assert seen.pop("path") == [*plain.pop("path"), str(children.ROOT)] and seen == plain
    assert seen["argv"] == ["--a", "1", "b c"] and seen["main"]
    command, here = ("-m", "report", "--a", "1"), {"cwd": tmp_path, "PYTHONPATH": str(children.ROOT)}
    patched = python("-m", "sd_scripts_patches", *command, **here).stdout
    assert patched == python(*command, **here).stdout and json.loads(patched)["argv"] == ["--a", "1"]


def test_a_spawned_worker_imports_the_main_module_of_its_parent(tmp_path):
    script = write(tmp_path, "script.py", "NAME = __name__\n")
    assert runner.import_parent_main({"init_main_from_path": str(script)})["NAME"] == "__mp_main__"
    assert runner.import_parent_main({"init_main_from_name": "json.tool"})["__name__"] == "__mp_main__"
    for main in ({}, {"init_main_from_name": "json.__main__"}, {"init_main_from_path": str(tmp_path / "script")}):
        assert runner.import_parent_main(main) == {}


LOADER = """
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
import torch.utils.data.dataloader as module
from torch.utils.data import DataLoader

Point = namedtuple("Point", "x y")

class Data(list):
    def __getitem__(self, i):
        point, patches = super().__getitem__(i), str(module.__dict__.get("__hangproof__"))
        assert "'dataloader'" in patches and "'exit'" in patches, patches
        assert {type(point).__module__, __name__} <= {"__main__", "__mp_main__"}
        return point.x

if __name__ == "__main__":
    for method in sys.argv[1:]:
        loader = DataLoader(Data(Point(x, 0) for x in (1, 2, 3)), num_workers=1, multiprocessing_context=method)
        with ThreadPoolExecutor(1) as pool:
            batches = pool.submit(iter, loader).result()
        print(method, [int(batch) for batch in batches], flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the signal at a parent's death is Linux's")
def test_loader_workers_live_with_the_patches_by_every_start_method_and_outlive_the_thread_that_starts_them(tmp_path):
    """Neither a fork server, which is not the trainer, nor a thread that starts workers and exits kills a worker."""
    methods = ("fork", "spawn", "forkserver")
    done = launch(write(tmp_path, "loader.py", LOADER), *methods, timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"{method} [1, 2, 3]" for method in methods]
