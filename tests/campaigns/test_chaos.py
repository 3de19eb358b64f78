"""Chaos on the monitor (`python -m benchmarks chaos`: 25 minutes, every place, 50 kills): proof that it finds a defect.

python -m pytest tests/campaigns/test_chaos.py          1 minute
"""

import errno
import sys

import pytest

from benchmarks import chaos
from benchmarks.chaos import Trial

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="chaos needs /proc, so Linux")

# A monitor that dies of any error of the operating system, with its keeper. The wrapper's error becomes that death.
FRAGILE = """
import os
source = open(os.environ["CHAOS_SHIM"] + "/sitecustomize.py").read()
dies = "os.kill(os.getppid(), 9) if '--child' in sys.orig_argv else None; os._exit(1)"
assert "raise error" in source
exec(compile(source.replace("raise error", dies), "chaos", "exec"))
"""


@pytest.mark.timeout(400)
def test_a_monitor_that_dies_of_an_error_is_found(tmp_path):
    journeys = chaos.undisturbed()
    assert {name: o.state for name, o in journeys.items()} == {name: j.ends for name, j in chaos.JOURNEYS.items()}
    assert [v for o in journeys.values() for v in o.violations] == []
    places = journeys["hang"].places
    functions = {function for function, _, _ in places}
    assert {"os.replace", "os.fsync", "process.fork_exec", "os.waitpid", "time.monotonic", "file.write"} <= functions
    shim = tmp_path / "fragile"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(FRAGILE, encoding="utf-8")
    replaced = [place for place, calls in places.items() if place[0] == "os.replace" and calls[1] > 4]
    assert replaced, "status.json is replaced all the time"
    broken = chaos.play(Trial("fragile", "hang", replaced[0], errno.EIO), keep=tmp_path / "kept", shim=shim)
    assert broken.reached
    assert any("unwatched" in v or "ended with exit code" in v for v in broken.violations), broken
    assert list((tmp_path / "kept").iterdir())
