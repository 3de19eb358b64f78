"""monitor/run_folder.py: which of several machines this is, and where its monitor writes."""

import json

import pytest

from monitor.run_folder import MonitorError, RunFolder, machine_number, machines

NODE = "HANGPROOF_NODE"
NUMBERS = {  # `nodes` of the spec (None: a script of the user's own), the variable: the machine, or a part of the error
    "one machine": (1, {}, None),
    "one machine, and the variable is left over": (1, {NODE: "1"}, None),
    "the first of two": (2, {NODE: "0"}, 0),
    "the second of two": (2, {NODE: "1"}, 1),
    "no variable": (2, {}, "trains on several machines, and HANGPROOF_NODE='' is not the number of one"),
    "one too many": (2, {NODE: "2"}, "HANGPROOF_NODE='2'"),
    "no number": (2, {NODE: "../x"}, "docs/machines.md"),
    "an own script": (None, {}, None),
    "an own script on several": (None, {NODE: "3"}, 3),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_the_number_of_a_machine(what, tmp_path):
    nodes, environ, expected = NUMBERS[what]
    if nodes:
        (tmp_path / "run.toml").write_text(f'name = "cat"\nnodes = {nodes}\n')
    if isinstance(expected, str):
        with pytest.raises(MonitorError, match=expected):
            machine_number(tmp_path, environ)
    else:
        assert machine_number(tmp_path, environ) == expected


def test_another_machine_writes_into_a_folder_of_its_own_and_has_neither_store_nor_spend_limit(tmp_path):
    (tmp_path / "run.toml").write_text('name = "cat"\nnodes = 12\nstore = "s3://x"\nspend_limit = 5\n')
    first = RunFolder(tmp_path, machine=0)
    assert first.own == tmp_path and first.spec["store"] == "s3://x"
    for number in (2, 10):
        other = RunFolder(tmp_path, machine=number)
        other.own.mkdir(parents=True)
        other.log("here")
        other.write_status({"state": "running", "step": number, "secret": "x"})
        assert not other.spec["store"] and not other.spec["spend_limit"]
        assert other.new_incident() == other.own / "incidents" / "0001"
    assert not (tmp_path / "status.json").exists() and (tmp_path / "machines" / "2" / "monitor.log").is_file()
    found = machines(tmp_path)
    assert [(one["machine"], one["step"]) for one in found] == [("2", 2), ("10", 10)]
    assert {one["state"] for one in found} == {"running"}
    assert "secret" not in json.dumps(found)
    (tmp_path / "run.toml").unlink()
    assert RunFolder(tmp_path, machine=2).foreign
