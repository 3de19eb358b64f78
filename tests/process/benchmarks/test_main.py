"""`python -m benchmarks NAME`: each has its help, measures, and prints one object."""

import argparse
import importlib
import json

import pytest
from runs_helpers import python

from benchmarks.__main__ import NAMES, main


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_has_arguments_with_which_it_measures(name, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser()
    module.options(parser)
    parser.parse_args(["--list"] if name == "faults" else [])
    assert callable(module.measure)
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out


def test_an_unknown_name_lists_those_there_are(capsys):
    assert main(["speed"]) == 2
    listed = capsys.readouterr().err
    assert all(name in listed for name in NAMES)


def test_the_object_has_the_machine_the_figures_and_the_verdict():
    words = ("overhead", "--monitor-seconds", "0", "--steps", "21", "--json")
    done = python("-m", "benchmarks", *words, SD_SCRIPTS_DIR="/nonexistent")
    assert done.returncode in (0, 1), done.stderr  # a busy machine exceeds the limit
    found = json.loads(done.stdout)
    assert found["ok"] == (done.returncode == 0) == (not found["exceeded"])
    assert found["machine"]["cores"] and found["microseconds"]["heartbeat_step"] > 0 and "skipped" in found["loop"]
