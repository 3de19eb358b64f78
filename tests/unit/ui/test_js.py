"""The page's scripts are tested by node's own test runner (tests/unit/js), with the node that Playwright brings."""

import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1] / "js"


def test_the_scripts_logic():
    playwright = pytest.importorskip("playwright", reason="no node: Playwright is not installed")
    node = Path(playwright.__file__).parent / "driver" / "node"
    if not node.exists():
        pytest.skip("no node: this Playwright brings none")
    files = sorted(map(str, TESTS.glob("*.test.mjs")))
    command = [str(node), "--test", "--test-isolation=none", "--test-reporter=spec", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert files and done.returncode == 0, done.stdout + done.stderr
