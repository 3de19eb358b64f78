"""What each command of `launch` reports."""

import argparse
import json

import pytest

from launch import common


@pytest.mark.parametrize("wanted", [True, False])
def test_a_report_ends_with_json_where_it_is_asked_for(capsys, wanted):
    assert common.report(argparse.Namespace(json=wanted), "written for 写真", {"run": "写真"}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "written for 写真"
    assert lines[1:] == (['{"run": "写真"}'] if wanted else [])
    assert all(json.loads(line) for line in lines[1:])
