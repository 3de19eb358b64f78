"""`python -m benchmarks NAME`: each has its help, measures, and prints one object."""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs_helpers import call

from benchmarks import __main__ as command, overhead


@pytest.mark.parametrize("name", command.NAMES)
def test_a_benchmark_has_arguments_with_which_it_measures(name, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser()
    module.options(parser)
    parser.parse_args([])
    assert callable(module.measure)
    with pytest.raises(SystemExit, match="0"):
        command.main([name, "--help"])
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out
    assert command.main(["speed"]) == 2 and name in capsys.readouterr().err, "an unknown name lists those there are"
    programs = [text for text in vars(module).values() if isinstance(text, str) and text.startswith("\nimport ")]
    words = ("check", "--isolated", "--select=F", "--config=builtins=['module']", "-")
    check = [Path(sys.executable).parent / "ruff", *words]
    for text in programs:
        assert subprocess.run(check, input=text, text=True, capture_output=True).returncode == 0, text


def test_the_object_has_the_machine_the_figures_and_the_verdict(monkeypatch):
    measured = overhead.microseconds
    monkeypatch.setattr(overhead, "microseconds", lambda function, times=0: measured(function, times=20, rounds=1))
    words = ("overhead", "--monitor-seconds", "0", "--steps", "21", "--json")
    done = call("benchmarks", *words, SD_SCRIPTS_DIR="/nonexistent")
    assert done.returncode in (0, 1), done.stderr  # a busy machine exceeds the limit
    found = json.loads(done.stdout)
    assert found["ok"] == (done.returncode == 0) == (not found["exceeded"])
    assert found["machine"]["cores"] and found["microseconds"]["heartbeat_step"] > 0 and "skipped" in found["loop"]


PRINTS = """
import json, sys
assert sys.argv[1:] == ["overhead", "--steps", "30", "--json"], sys.argv
print(json.dumps({{"parts": {{"a": {0}, "b": 5}}, "rows": [1], "ok": True}}))
"""


def test_against_another_checkout_it_prints_the_ratios_of_the_figures_that_differ(tmp_path, monkeypatch, capsys):
    for name, value in (("ours", 3), ("theirs", 4)):
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        (tmp_path / name / "benchmarks" / "__main__.py").write_text(PRINTS.format(value))
    monkeypatch.setattr(command, "ROOT", tmp_path / "ours")
    assert command.main(["overhead", "--against", str(tmp_path / "theirs"), "--steps", "30"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ratios"] == {"parts.a": {"median": 0.75, "low": 0.75, "high": 0.75, "n": 3}}
