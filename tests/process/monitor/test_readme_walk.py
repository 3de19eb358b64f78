"""The walk of a hang in monitor/README.md is the one that a real run takes."""

import json
import re
import subprocess
import sys

import pytest
from monitor_helpers import ROOT, environment, fault_at, toy_run, undisturbed, weight

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="the toy is a shell script")]


def readme_walk() -> list[str]:
    """The steps of README's list, as "file:function"."""
    text = (ROOT / "monitor" / "README.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\d+\. .*$", text.partition("## The walk of a hang")[2], re.M)
    return [f"{file}:{name}" for step in steps for file, name in re.findall(r"`([\w/]+\.py)` `([\w.]+)`", step)]


def test_a_hang_enters_what_the_readme_lists_in_its_order(tmp_path):
    folder = toy_run(tmp_path / "toy", fault_at(34, "time.sleep(3600)"), steps=50, pace=0.03, every=10)
    command = [sys.executable, str(ROOT / "tests/support/monitor_walk.py"), str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert weight(folder) == undisturbed(50)
    entered = json.loads(done.stdout.splitlines()[-1])
    listed = [step for step in readme_walk() if step != "resume/script.py:render"]  # where an attempt was not prepared
    assert len(listed) > 15
    assert not [step for step in listed if step not in entered], entered
    order = [entered.index(step) for step in listed]
    once = [n for i, n in enumerate(order) if n not in order[:i]]
    assert once == sorted(once), "the README's order is not that of the walk"
