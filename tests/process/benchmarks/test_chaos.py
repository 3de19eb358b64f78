"""The whole monitor can be imported under the shim that makes its calls fail (tests/campaigns/test_chaos.py)."""

import subprocess
import sys

import pytest

from benchmarks import chaos
from runs.paths import ROOT

IMPORTS = (
    "import sys; exec(open(sys.argv[1]).read() + '_install()'); from monitor import config, supervisor; config.load()"
)


@pytest.mark.skipif(sys.platform != "linux", reason="chaos needs /proc, so Linux")
def test_the_monitor_is_imported_under_the_shim(tmp_path, monkeypatch):
    for name, value in (("CHAOS_ROOT", ROOT), ("CHAOS_FOLDER", tmp_path), ("CHAOS_LEDGER", tmp_path / "none")):
        monkeypatch.setenv(name, str(value))
    command = [sys.executable, "-c", IMPORTS, str(chaos.SHIM / "sitecustomize.py")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert "monitor/" in next(tmp_path.glob("places-*")).read_text()
