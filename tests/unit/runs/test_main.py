"""The command `python -m runs` in this process."""

import json

from ui_helpers import photos

import runs
from runs.__main__ import main


def test_show_lists_the_runs_or_says_where_there_are_none(data, capsys):
    assert main(["show"]) == 0
    assert capsys.readouterr().out == f"no runs in {data / 'outputs'}\n"
    folder = runs.create(runs.make({"name": "cat", "model": "tiny-flux", "backend": "diffusers"}), photos("coffee.png"))
    assert main(["show", "--json"]) == 0
    shown, last = capsys.readouterr().out.splitlines()
    assert shown == str(folder) and json.loads(last) == {"runs": [str(folder)]}
    assert main(["show", "dog"]) == 1
    assert "dog" in capsys.readouterr().err
